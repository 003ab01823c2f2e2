"""Kernels on the CPU: built, run, verified."""
