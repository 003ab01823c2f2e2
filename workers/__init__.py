"""Processes that do the work of jobs, and all that they start."""
