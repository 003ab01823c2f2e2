"""Results that were measured elsewhere: out, in, withdrawn."""
