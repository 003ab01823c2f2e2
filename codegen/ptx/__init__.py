"""PTX, as nvcc writes it, read and translated to C++ for the CPU."""
