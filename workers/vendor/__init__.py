"""The peers of a comparison: cuBLASLt, cuDNN, CuPy, PyTorch."""
