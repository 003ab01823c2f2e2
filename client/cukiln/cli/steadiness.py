"""How it is written that a GPU changed while the best kernels took turns, or was held back throughout, and why the
vendor's library was not among them."""

from collections.abc import Iterable

from cukiln.types import MeasuredOn, WinnerSummary

Compared = WinnerSummary | MeasuredOn | None
_UNSTEADY = "unsteady: the GPU changed while the best took turns, also when they did once more; ratios hardly suffer: "
_LIMITED = "limited: something held the GPU back before and after, the same for all; times are of a GPU so limited: "
_MISSING = "no vendor: its library was not compared: "
_MOST_NAMES = 3


def marked(text: str, compared: Compared) -> str:
    """With what is to be known of it in a line of its own."""
    if compared is None:
        return text
    marks = [*(["unsteady"] if compared.unsteady else []), *(["limited"] if compared.limited_by else [])]
    return f"{text}\n({', '.join(marks)})" if marks else text


def steadiness_notes(compared: Iterable[tuple[str, Compared]]) -> list[str]:
    """What each mark stands for, by the names that have it."""
    rows = [(name, entry) for name, entry in compared if entry is not None]
    unsteady = [(name, "; ".join(entry.unsteady)) for name, entry in rows if entry.unsteady]
    limited = [(name, ", ".join(entry.limited_by)) for name, entry in rows if entry.limited_by]
    missing = [(name, entry.vendor_missing) for name, entry in rows if entry.vendor_missing]
    return [
        head + "; ".join(_told(words, pairs) for words in dict.fromkeys(words for _, words in pairs))
        for head, pairs in ((_UNSTEADY, unsteady), (_LIMITED, limited), (_MISSING, missing))
        if pairs
    ]


def _told(words: str, pairs: Iterable[tuple[str, str]]) -> str:
    names = [name for name, of_it in pairs if of_it == words]
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{words} ({', '.join(names[:_MOST_NAMES])}{more})"
