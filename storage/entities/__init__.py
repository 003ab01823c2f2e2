"""One module per kind of row."""
