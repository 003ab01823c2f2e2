"""Every row that cukiln keeps. The database is the truth: Redis only carries wake-ups and progress.

```
jobs ─┬─ job_problems ─── candidates ──► builds (a kernel under a toolchain) ──► groups (one .cu file each)
      ├─ pending_builds (still to be compiled for the job)
      └─ task_jobs ─── tasks (tasks: waiting, leased or ended)
winners (by problem, architecture, device class)       verdicts (of a slice or a code digest)
blobs (bytes known to be durable)                      measurements (of a code digest, on a device class)
imports ── imported_winners, imported_findings         toolchains, devices (what works here)
keys (what may call)
```
Times are seconds since the epoch (UTC), durations are seconds.
"""

# ruff: noqa: F403
from storage.database.tables.jobs import *
from storage.database.tables.records import *
