"""`cukiln serve`: the processes of a service on one machine."""
