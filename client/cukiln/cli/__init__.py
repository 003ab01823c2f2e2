"""The command line: `main` has the commands, the other modules what is more than a call."""
