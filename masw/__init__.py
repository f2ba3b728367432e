"""masw: strong drafts with compact memories. Speculative decoding for long documents (arXiv 2608.30252)."""

__version__ = "0.1.0"
