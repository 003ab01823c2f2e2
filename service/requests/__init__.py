"""Requests as models, checked and resolved."""
