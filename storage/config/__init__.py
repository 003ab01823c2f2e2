"""Settings and what they name: folders, locks, logs, operators."""
