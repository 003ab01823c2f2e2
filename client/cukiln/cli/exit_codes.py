"""What the commands end with: 0 is done; 4 a verification of PTX that has no translation;
78 a worker that cannot start with its settings, 130 an interrupt."""

FAILED, WRONG_USE, PARTIAL = 1, 2, 3  # PARTIAL: some problems have no winner
OF_STATE = {"done": 0, "failed": FAILED, "cancelled": FAILED, "partial": PARTIAL}
