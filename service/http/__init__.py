"""Connections, bodies, errors, conditional requests: nothing of what cukiln does."""
