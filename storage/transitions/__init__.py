"""One module per step of a job: what it changes in the database."""
