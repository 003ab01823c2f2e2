"""The bound on searches that look at every schedule: how large a space is, and which lists make it so."""

import math

from codegen.errors import SpaceTooLarge
from codegen.search.search import Search
from codegen.search.space import SearchSpace


def require_bounded(space: SearchSpace, search: Search, most: int) -> None:
    """Raises SpaceTooLarge where a search without a limit has more than `most` schedules. Nothing is enumerated."""
    if search.limit is not None or space.size <= most:
        return
    if search.schedules is not None:
        field, made, to_do = "search.schedules", "", "give a limit, which samples them, or a shorter list"
    else:
        field = "search.tunables" if search.tunables is not None else "search.level"
        made, to_do = f" ({lists_text(space)})", "give a limit, which samples them, or shorter lists"
    raise SpaceTooLarge(
        f"the search has {space.size:,} schedules{made}; at most {most:,} are looked at without a limit: {to_do}",
        field=field,
        allowed={"maximum": most},
    )


def lists_text(space: SearchSpace) -> str:
    """The lists with more than one value, the longest first, each with its length: `tile_m 5 × stages 3`. Tunables that
    are chosen together are one list. Of several spaces one after the other: the lists of the largest."""
    if space.parts:
        text = lists_text(max(space.parts, key=lambda part: part.size))
        return text if len(space.parts) == 1 else f"most of them by {text}"
    lengths = [(len(axis.choices), " with ".join(axis.names)) for axis in space.axes]
    longest_first = sorted((entry for entry in lengths if entry[0] > 1), key=lambda entry: (-entry[0], entry[1]))
    assert math.prod(length for length, _ in longest_first) == space.size
    return " × ".join(f"{name} {length}" for length, name in longest_first)
