"""What a client does, step by step: what is sent, how an answer is read, what is remembered. `cukiln.client` has the
two ways to take the steps, blocking and `async`; each operation is written here once."""
