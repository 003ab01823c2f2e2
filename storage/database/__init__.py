"""Tables, sessions, the statements that several modules share, the clock."""
