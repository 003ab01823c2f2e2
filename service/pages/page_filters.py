"""How the pages write numbers, times and prose: what Jinja's filters call."""

import datetime

from markupsafe import Markup, escape


def seconds(value: float | None) -> str:
    """`0.012`, `4.31`, `58.2`, `1,204`: about three digits."""
    if value is None:
        return "–"
    places = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 or value == 0 else 3
    return f"{value:,.{places}f}"


def duration(value: float | None) -> str:
    """`0.8 s`, `1 min 20 s`, `2 h 5 min`."""
    if value is None:
        return "–"
    if value < 60:
        return f"{value:.0f} s" if value == round(value) else f"{seconds(value)} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def moment(value: float | None) -> str:
    """Unix seconds as `2026-11-21 20:22:58`, in UTC."""
    if value is None:
        return "–"
    return datetime.datetime.fromtimestamp(value, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S")


def count(value: int) -> str:
    return f"{value:,}"


def share(part: float, whole: float) -> str:
    """`37 %`; a dash where there is nothing to have a share of."""
    return f"{100 * part / whole:.0f} %" if whole else "–"


def microseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g} µs" if value < 1000 else f"{value:,.0f} µs"


def prose(text: str) -> Markup:
    """Text of ours in which `backticks` mark code."""
    parts = escape(text).split("`")
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if place % 2 else part for place, part in enumerate(parts)
    )
