"""`python -m masw.cli`: the console command where no script is installed, and what torchrun starts."""

import os
import sys

from masw.cli import main

if __name__ == "__main__":
    code: int | str | None = 0
    try:
        main()
    except SystemExit as leaving:
        code = leaving.code
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A worker of several. Some runs on a busy machine ended in an abort ("terminate called without an active exception"). That is
        # what threads left at interpreter shutdown look like, which this skips; the cause was inferred, not caught (docs/LOG.md).
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
    sys.exit(code)
