"""The line of a compiler's log that explains a failure."""

MOST_CHARACTERS = 300


def telling_line(log: str) -> str:
    """The first line that speaks of an error, else the first that is not blank; empty where there is none."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    telling = [line for line in lines if "error" in line.lower()] or lines
    return telling[0][:MOST_CHARACTERS] if telling else ""
