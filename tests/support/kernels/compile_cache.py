"""What a compiler or a disassembler made of the same files is made once in a run: many tests compile the same few
kernels on their way to something else. For tests whose subject is not compiling itself."""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from workers.processes.processes import Finished, Limits, Processes

TOOLS = ("nvcc", "g++", "nvdisasm")
RUNTIME = frozenset({"runtime.cpp"})
"""What runs kernels on the CPU: two files, the same for all kernels, which each compile worker needs first."""


class CachingProcesses(Processes):
    """`folder` is shared by the processes of the run. `only`: files among the arguments, of which a run has one."""

    def __init__(self, folder: Path, only: frozenset[str] = frozenset(), **options: Any) -> None:
        super().__init__(**options)
        self._folder, self._only = folder, only
        folder.mkdir(exist_ok=True)

    def run(self, argv: Sequence[str], *, cwd: Path, limits: Limits, **options: Any) -> Finished:
        cancel = options.get("cancel")
        is_other = Path(argv[0]).name not in TOOLS or bool(self._only and self._only.isdisjoint(argv))
        if is_other or set(options) - {"cancel", "env", "reads"} or (cancel and cancel.is_set()):
            return super().run(argv, cwd=cwd, limits=limits, **options)
        before = _files(cwd)
        # What runs kernels is compiled beside files of a kernel, and reads none of them.
        read = {name: file for name, file in before.items() if RUNTIME.isdisjoint(argv) or name in argv}
        run = (list(argv), limits, options.get("env"), sorted(read.items()))
        place = self._folder / hashlib.sha256(repr(run).encode()).hexdigest()
        if place.exists():
            finished, made = pickle.loads(place.read_bytes())
            for name, (mode, data) in made.items():
                (cwd / name).write_bytes(data)
                (cwd / name).chmod(mode)
            return _checked(finished)
        finished = super().run(argv, cwd=cwd, limits=limits, **options)
        if finished.ok:
            made = {name: data for name, data in _files(cwd).items() if before.get(name) != data}
            self._keep(place, pickle.dumps((finished, made)))
        return finished

    def _keep(self, place: Path, data: bytes) -> None:
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as written:
            written.write(data)
        Path(written.name).rename(place)


def _files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and content of each."""
    return {path.name: (path.stat().st_mode, path.read_bytes()) for path in folder.iterdir() if path.is_file()}


def _checked(finished: object) -> Finished:
    assert isinstance(finished, Finished)
    return finished
