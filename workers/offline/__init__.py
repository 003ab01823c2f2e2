"""Measuring on a machine that has a GPU and no service."""
