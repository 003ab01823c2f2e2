"""When something is to be done, and functions that may be late."""

import threading
import time
from collections.abc import Callable
from typing import TypeVar

import httpx2

_T = TypeVar("_T")


class Limit:
    """When something is to be done, which may be put off."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._end = seconds, time.monotonic() + seconds

    def extend(self, seconds: float) -> None:
        self.seconds, self._end = self.seconds + seconds, self._end + seconds

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def within(limit: Limit, function: Callable[[], _T]) -> _T:
    """Of a function that may be late, such as a name that is resolved or an answer that comes byte by byte: its result,
    within the limit. Raises `httpx2.ReadTimeout`, or `ConnectError` without a thread. Where its reads keep to the limit
    (`cukiln.http.bounded_network`), it then ends, and its thread with it."""
    outcome: list[_T | BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            outcome.append(function())
        except BaseException as error:  # noqa: BLE001 - raised again by the caller
            outcome.append(error)
        done.set()

    try:
        threading.Thread(target=run, name="cukiln-call", daemon=True).start()
    except RuntimeError as error:  # of a machine that has no more of them
        raise httpx2.ConnectError(str(error)) from error
    while not done.wait(limit.left):
        if limit.left == 0.0:
            raise httpx2.ReadTimeout(f"no answer within {limit.seconds:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
