"""One HTTP conversation with the service, within its time."""
