"""`python -m masw.cli`, for launchers such as torchrun."""

from masw.cli import main

main()
