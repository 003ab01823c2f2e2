"""Predicted seconds: of a kernel on a GPU by roofline, of compiling it."""
