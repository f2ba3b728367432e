"""Pieces that the pages share. Pages draw; what they draw comes from masw."""
