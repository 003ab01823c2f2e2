"""A real service whose processes are killed at random: `python -m tests.faults`, or `make test-faults`."""
