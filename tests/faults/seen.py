"""What may not change from one answer to the next, whatever dies in between."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field
from typing import Any

import httpx

from storage.database.tables import LIVE


@dataclass
class Seen:
    """`jobs`: ids that were answered 202; `ends`: the first terminal state of each; `revisions`: of each winner that a
    job reported, the digest of the whole record by its revision (no field of a revision is volatile)."""

    jobs: list[str] = field(default_factory=list)
    ends: dict[str, str] = field(default_factory=dict)
    revisions: dict[str, dict[int, str]] = field(default_factory=dict)

    @property
    def paths(self) -> list[str]:
        return [f"/v1/jobs/{job}" for job in self.jobs] + [f"/v1/kernels/{key}" for key in self.revisions]

    def ask(self, client: httpx.Client, rng: random.Random) -> httpx.Response:
        return client.get(rng.choice(self.paths or ["/v1/targets"]))

    def changed(self, path: str, status: int, body: bytes) -> str | None:
        """How an answer contradicts an earlier one, None where it does not."""
        if path not in self.paths or status not in (200, 404):
            return None
        if status == 404:
            return "it is gone"
        id, answer = path.rpartition("/")[2], json.loads(body)
        return self._job(id, answer) if id in self.jobs else self._record(id, answer)

    def _job(self, id: str, report: dict[str, Any]) -> str | None:
        for problem in report["problems"]:
            if problem["winner"] is not None:
                self.revisions.setdefault(problem["key"], {})
        state = str(report["state"])
        first = self.ends.get(id) if state in LIVE else self.ends.setdefault(id, state)
        return None if first in (None, state) else f"the job was {first} and is {state}"

    def _record(self, key: str, record: dict[str, Any]) -> str | None:
        digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
        revision = record["revision"]
        if self.revisions[key].setdefault(revision, digest) != digest:
            return f"revision {revision} has two contents"
        return None
