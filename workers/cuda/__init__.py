"""A real NVIDIA GPU, by CuPy."""
