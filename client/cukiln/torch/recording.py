"""`record`: the problems that a model's calls are, as a request that `cukiln tune` takes."""

import json
import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cukiln.request_file import writable, write_problems
from cukiln.torch.dispatch import Dispatcher, Key, Operator, Tensors, current, forget_graphs, install, remove
from cukiln.torch.find_kernels import Entry
from cukiln.torch.options import Options
from cukiln.torch.plan import Plan


class _Recorder(Dispatcher):
    """It has no kernels; each problem that is new to it is remembered."""

    def __init__(self) -> None:
        super().__init__(Options(enabled=False))
        self.problems: list[dict[str, Any]] = []
        self._seen: set[str] = set()
        self._recording = threading.Lock()  # autograd computes gradients on threads of its own

    def after_fork(self) -> None:
        super().after_fork()
        self._recording = threading.Lock()

    def computes(self, device: torch.device) -> bool:
        return True

    def has_kernel(self, operator: Operator, tensors: Tensors, options: Hashable) -> bool:
        return True  # all problems of a graph are to be seen

    def first(self, key: Key, plan: Plan | None, device: torch.device) -> Entry:
        if plan is not None:
            text = json.dumps(dict(plan.problem), sort_keys=True)
            with self._recording:
                if text not in self._seen:
                    self._seen.add(text)
                    self.problems.append(dict(plan.problem))
        entry = Entry(None, device)
        entry.ready.set()
        return self._keep(key, entry)


@contextmanager
def record(file: Path | str | None = None, *, target: str | None = None) -> Iterator[list[dict[str, Any]]]:
    """The problems of all calls meanwhile, each once, those of gradients too; PyTorch's own operators compute them. At
    the end they are in `file`, a request that `cukiln tune` takes, for `target` (default: what that command takes);
    also where what is inside raises. Raises `UsageError` at once where no file can be written there.

    No GPU is needed: calls on CPU tensors are recorded as those of the same tensors on a GPU.
    """
    written = None if file is None else writable(Path(file))
    recorder = _Recorder()
    recorder.of_gpus = target != "cpu"
    forget_graphs()  # which hide their problems
    install(recorder)
    try:
        yield recorder.problems
    finally:
        remove(recorder)
        current().misses_are_due()  # graphs are compiled again, which would have the misses of before for good
        recorder.close()
        if written is not None:  # also of a model that raises: what it called before is there
            shared = {} if target is None else {"target": target}
            write_problems(written, {**shared, "problems": recorder.problems})
