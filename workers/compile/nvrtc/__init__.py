"""NVRTC and ptxas as one compiler: for CUDA 12, of which no package index has an nvcc."""
