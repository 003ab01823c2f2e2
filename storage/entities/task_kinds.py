"""What tasks are about: kinds, the refs of each, and how long past its jobs' deadlines it may continue. The queue
depends on none of them."""

import hashlib
import math
from typing import Final

PLAN: Final = "plan"
COMPILE: Final = "compile"
VERIFY: Final = "verify"
MEASURE: Final = "measure"
COMPARE: Final = "compare"
FINISH: Final = "finish"
ON_GROUPS = (COMPILE, VERIFY, MEASURE)
"""Whose ref names a group, for all jobs that have builds in it."""
UNTIMED = (FINISH,)
"""Done after a job's deadline, too: it makes the best of what there is by then."""
GROUP_GRACE_SECONDS = 2.5
"""Of work on a group: its results by then may still be recorded."""


def grace_seconds(kind: str) -> float:
    """How long past its jobs' deadlines a task of the kind may continue."""
    if kind in UNTIMED:
        return math.inf
    return GROUP_GRACE_SECONDS if kind in ON_GROUPS else 0.0


def plan_ref(job_id: str, first: int, last: int) -> str:
    """The `ref` of a plan task: a job's problems at positions first to last, both included."""
    return f"{job_id}:{first}-{last}"


def parse_plan_ref(ref: str) -> tuple[str, int, int]:
    """Job id, first and last position of a plan task's `ref`."""
    job_id, positions = ref.split(":")
    first, last = positions.split("-")
    return job_id, int(first), int(last)


def measure_ref(group_id: str, device_class: str) -> str:
    """The `ref` of a measure task. A hash stands for the class: a product's name may be longer than a `ref`."""
    return f"{group_id}:{hashlib.sha256(device_class.encode()).hexdigest()[:16]}"


def group_of_ref(ref: str) -> str:
    """The group of a verify or measure task's `ref`."""
    return ref.partition(":")[0]
