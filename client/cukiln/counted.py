"""Numbers of things, in words."""


def counted(count: int, noun: str) -> str:
    """`1 kernel`, `1,204 kernels`, `0 libraries`."""
    return f"{count:,} {noun if count == 1 else plural(noun)}"


def plural(noun: str) -> str:
    """Of a regular noun; of several words the last one counts."""
    return f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in "aeou" else f"{noun}s"
