"""Requests of every kind all along, right and wrong ones: while a service's processes are killed, an answer may be
missing, and none may be wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from functools import partial

import httpx

from tests.faults.answers import wrong_in
from tests.faults.seen import Seen

PAUSE_SECONDS = 0.02
MOST_NAMED = 20
LOOKS = 6  # at what may not change, for one ask of each kind
JSON = {"Content-Type": "application/json"}
PROBLEM = {"operator": "matmul", "m": 64, "n": 256, "k": 256}

Ask = Callable[[httpx.Client, random.Random], httpx.Response]
ASKS: list[Ask] = [
    lambda client, _: client.get("/healthz"),
    lambda client, _: client.get("/readyz"),
    lambda client, _: client.get("/v1/jobs", params={"limit": 3}),
    lambda client, _: client.get("/v1/targets"),
    lambda client, _: client.get("/v1/timings"),
    lambda client, rng: client.get(f"/v1/kernels/{rng.getrandbits(256):064x}"),
    lambda client, rng: client.get(f"/v1/jobs/{rng.getrandbits(128):032x}"),
    lambda client, _: client.get("/v1/jobs", params={"cursor": "\x00"}),
    lambda client, _: client.get("/v1/blobs/sha256/none"),
    lambda client, _: client.post("/v1/lookups", json={"problems": [PROBLEM] * 50}),
    lambda client, rng: client.post("/v1/lookups", json={"problems": [{**PROBLEM, "m": rng.randrange(1, 10**9)}]}),
    lambda client, _: client.post("/v1/jobs", json={"problems": [{**PROBLEM, "m": 0}]}),
    lambda client, _: client.post("/v1/jobs", json={"problems": []}),
    lambda client, _: client.post("/v1/jobs", content=b"[" * 100_000, headers=JSON),
    # Large enough for the API's second process, which may be paused.
    lambda client, _: client.post("/v1/lookups", content=b" " * 300_000 + b"{}", headers=JSON, timeout=2.0),
    lambda client, _: client.post("/v1/results", json={"schema": 1}),
    lambda client, _: client.delete("/v1/jobs/none"),
]


class Asker:
    """A client that asks until it is stopped. `wrong`: the first answers that must not be, in words. `seen`: what they
    said of jobs and winners; jobs are added to it as they are accepted."""

    def __init__(self, url: str, seed: int, pause_seconds: float = PAUSE_SECONDS) -> None:
        self.requests = self.mismatches = 0
        self.wrong: list[str] = []
        self.seen = Seen()
        self._url, self._random, self._pause = url, random.Random(seed), pause_seconds
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask_all_along)
        self._thread.start()

    def stop(self) -> None:
        """After a last look at each job and winner."""
        assert self._thread.is_alive(), "the asker has ended before it was stopped"
        self._over.set()
        self._thread.join()

    def _ask_all_along(self) -> None:
        asks = [*ASKS, *[self.seen.ask] * LOOKS]
        with httpx.Client(base_url=self._url, timeout=10.0, trust_env=False) as client:
            while not self._over.wait(self._pause):
                self._check(partial(self._random.choice(asks), client, self._random))
            if not all(self._check(partial(client.get, path)) for path in self.seen.paths):
                self._count("the last look got no answer")

    def _check(self, ask: Callable[[], httpx.Response]) -> bool:
        """Whether there was an answer."""
        request = "no answer"
        try:
            answer = ask()
            request = f"{answer.request.method} {answer.request.url}"
            words = wrong_in(answer.status_code, answer.headers, answer.content)
            words = words or self.seen.changed(answer.request.url.path, answer.status_code, answer.content)
        except httpx.TransportError:
            return False
        except Exception as error:  # noqa: BLE001 - an answer that cannot be checked is a wrong one
            words = f"not checked: {error!r}"
        self.requests += 1
        if words is not None:
            self._count(f"{request}: {words}")
        return True

    def _count(self, mismatch: str) -> None:
        self.mismatches += 1
        self.wrong += [mismatch] if len(self.wrong) < MOST_NAMED else []
