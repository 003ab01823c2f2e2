"""Requests of every kind all along, right and wrong ones: while a service's processes are killed, an answer may be
missing, and none may be wrong."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import httpx

from tests.faults.answers import wrong_in

PAUSE_SECONDS = 0.02
MOST_NAMED = 20
PROBLEM = {"operator": "matmul", "m": 64, "n": 256, "k": 256}

Ask = Callable[[httpx.Client, random.Random], httpx.Response]
ASKS: list[Ask] = [
    lambda client, _: client.get("/healthz"),
    lambda client, _: client.get("/readyz"),
    lambda client, _: client.get("/v1/jobs", params={"limit": 3}),
    lambda client, _: client.get("/v1/targets"),
    lambda client, _: client.get("/v1/timings"),
    lambda client, drawn: client.get(f"/v1/kernels/{drawn.getrandbits(256):064x}"),
    lambda client, drawn: client.get(f"/v1/jobs/{drawn.getrandbits(128):032x}"),
    lambda client, _: client.get("/v1/jobs", params={"cursor": "\x00"}),
    lambda client, _: client.get("/v1/blobs/sha256/none"),
    lambda client, _: client.post("/v1/lookups", json={"problems": [PROBLEM] * 50}),
    lambda client, drawn: client.post("/v1/lookups", json={"problems": [{**PROBLEM, "m": drawn.randrange(1, 10**9)}]}),
    lambda client, _: client.post("/v1/jobs", json={"problems": [{**PROBLEM, "m": 0}]}),
    lambda client, _: client.post("/v1/jobs", json={"problems": []}),
    lambda client, _: client.post("/v1/jobs", content=b"[" * 100_000, headers={"Content-Type": "application/json"}),
    lambda client, _: client.post("/v1/results", json={"schema": 1}),
    lambda client, _: client.delete("/v1/jobs/none"),
]


class Asker:
    """A client that asks until it is stopped. `wrong`: the first answers that must not be, in words."""

    def __init__(self, url: str, seed: int) -> None:
        self.requests = self.mismatches = 0
        self.wrong: list[str] = []
        self._url, self._random = url, random.Random(seed)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        with httpx.Client(base_url=self._url, timeout=10.0, trust_env=False) as client:
            while not self._over.wait(PAUSE_SECONDS):
                try:
                    answer = self._random.choice(ASKS)(client, self._random)
                except httpx.TransportError:
                    continue  # nobody answers
                self.requests += 1
                words = wrong_in(answer.status_code, answer.headers, answer.content)
                if words is not None:
                    self.mismatches += 1
                    request = f"{answer.request.method} {answer.request.url}"
                    self.wrong += [f"{request}: {words}"] if len(self.wrong) < MOST_NAMED else []
