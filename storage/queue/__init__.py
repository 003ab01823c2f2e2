"""Tasks, leases, attempts, losses, turns: nothing of what tasks mean."""
