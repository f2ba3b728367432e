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
        # A worker of several. Seen on a busy machine, one run in five: torch aborts ("terminate called without an active exception")
        # while the interpreter takes its threads down after all work is done and saved, and the launcher calls the run failed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 0 if code is None else 1)
    sys.exit(code)
