"""`python -m cukiln` is the command `cukiln`."""

from cukiln.cli.main import main

main()
