"""Mutants by rule: wrong kernels made of an operator's text by a program, verified by the product's own plan."""
