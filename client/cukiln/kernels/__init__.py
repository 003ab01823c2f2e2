"""From a winner record to a kernel that can be called, and what its calls need."""
