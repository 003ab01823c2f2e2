"""`python -m cukiln` is the command `cukiln`."""

from cukiln.cli import main

main()
