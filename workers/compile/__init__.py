"""nvcc and g++: files, groups of kernels, culprits, libraries."""
