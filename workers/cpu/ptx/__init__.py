"""A kernel's own PTX, run on the CPU: a witness beside the twins of the primitives."""
