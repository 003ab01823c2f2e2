"""Verifying, measuring and comparing candidates in the child process that owns a GPU."""
