"""What is old is removed, what is damaged mended, all of it backed up."""
