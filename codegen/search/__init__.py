"""Schedules, tunables, search spaces, rules."""
