"""Rendering kernels and libraries, and reading what compilers print and make."""
