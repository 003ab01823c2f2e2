"""Work that ended with its worker, or because the machine failed.

That says nothing about the work, so it is counted apart from failures, and nothing is remembered of it: it comes back
after growing pauses, and after some losses alone, which needs the least memory. What is lost alone again and again is
skipped."""

from __future__ import annotations

TOGETHER = 2
"""Losses after which it is tried alone: a build in a file of its own, of an item its first part."""
ALONE = 3
MOST = TOGETHER + ALONE
"""Losses after which it is skipped."""
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.5, 30.0


def pause_after(losses: int) -> float:
    """Seconds before it is tried again."""
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** (losses - 1))


LOST = "lost "
"""How the message of what was lost too often begins."""


def why_skipped(reason: str) -> str:
    return f"{LOST}{MOST} times, the last {ALONE} of them alone, so nothing is known of it ({reason}): submit it again"
