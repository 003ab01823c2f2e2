"""Chrome's Trace Event Format, as far as a trace of ours has to keep to it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any

Event = dict[str, Any]


def checked(document: dict[str, Any]) -> list[Event]:
    """The events, in whole microseconds and in order, every slice within the one around it, every begin with its end,
    every process and thread with a name."""
    events: list[Event] = document["traceEvents"]
    assert document["displayTimeUnit"] == "ms"
    metadata = [event for event in events if event["ph"] == "M"]
    rest = events[len(metadata) :]
    assert all(event["ph"] in ("X", "b", "e", "C") for event in rest), "metadata stands first, nothing else is there"
    for event in rest:
        assert isinstance(event["ts"], int) and event["ts"] >= 0 and event.get("dur", 0) >= 0, event
    assert [event["ts"] for event in rest] == sorted(event["ts"] for event in rest)
    named = {(event["name"], event["pid"], event["tid"]) for event in metadata}
    for event in rest:
        assert ("process_name", event["pid"], 0) in named and ("thread_name", event["pid"], event["tid"]) in named
    _nested(rest)
    _paired(rest)
    return events


def _nested(events: list[Event]) -> None:
    around: dict[tuple[int, int], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] != "X":
            continue
        outer = around[event["pid"], event["tid"]]
        while outer and outer[-1]["ts"] + outer[-1]["dur"] <= event["ts"] and event["cat"] != "phase":
            outer.pop()
        while outer and outer[-1]["cat"] == "phase":  # phases hold nothing
            last = outer.pop()
            assert last["ts"] + last["dur"] <= event["ts"], f"{event['name']} begins within {last['name']}"
        if outer:
            assert event["ts"] + event["dur"] <= outer[-1]["ts"] + outer[-1]["dur"], f"{event['name']} reaches out"
        if event["cat"] == "phase":
            assert outer and outer[-1]["cat"] in ("compile", "finish"), f"{event['name']} is in no compile"
        else:
            assert not outer, f"{event['name']} begins within {outer[-1]['name']}"
        outer.append(event)


def _paired(events: list[Event]) -> None:
    open_at: dict[str, int] = {}
    for event in events:
        if event["ph"] == "b":
            assert open_at.setdefault(event["id"], event["ts"]) == event["ts"], f"{event['id']} begins twice"
        elif event["ph"] == "e":
            assert open_at.pop(event["id"]) <= event["ts"]
    assert not open_at, "each wait ends"


def slices(events: list[Event], category: str) -> list[Event]:
    return [event for event in events if event["ph"] == "X" and event["cat"] == category]


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """How much time the spans have together; what two of them share counts once."""
    whole, until = 0.0, float("-inf")
    for begin, end in sorted(spans):
        whole += max(0.0, end - max(begin, until))
        until = max(until, end)
    return whole


def waits(events: list[Event]) -> list[tuple[str, int]]:
    """Name and microseconds of each wait, in order of their beginnings."""
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    return [(event["name"], ends[event["id"]] - event["ts"]) for event in events if event["ph"] == "b"]


def process_names(events: list[Event]) -> dict[int, str]:
    return {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
