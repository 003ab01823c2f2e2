"""A worker process: wake-ups, leases, tasks, the reconciler."""
