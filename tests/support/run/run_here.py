"""`python -m MODULE …` in this process, in which its imports are there: they are most of a short command."""

from __future__ import annotations

import io
import multiprocessing
import os
import runpy
import subprocess
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest

from codegen import primitives
from codegen.text import render_group, scan_functions


def run_here(
    module: str, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """`env`: variables that it has beside ours."""
    out, err = io.StringIO(), io.StringIO()
    umask = os.umask(0o077)
    os.umask(umask)
    status: object = 0
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
            patch.setattr("sys.argv", [module, *words])
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            if cwd is not None:
                patch.chdir(cwd)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            err.write(f"{status}\n")
    finally:
        os.umask(umask)
    returncode = status if isinstance(status, int) else int(status is not None)
    return subprocess.CompletedProcess([module, *words], returncode, out.getvalue(), err.getvalue())


def run_forked(
    module: str, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """The same in a fork of this process, which keeps what the command leaves in caches to itself. Operators may lie in
    other folders there than those of the same names that were loaded here."""
    fork = multiprocessing.get_context("fork")
    ours, theirs = fork.Pipe(duplex=False)

    def run() -> None:
        forget_texts()
        theirs.send(run_here(module, *words, env=env, cwd=cwd))

    process = fork.Process(target=run)
    process.start()
    theirs.close()
    try:
        ended: subprocess.CompletedProcess[str] = ours.recv()
    finally:
        process.join()
    return ended


def forget_texts() -> None:
    """What is kept of operators' texts, by names of operators and by kernels."""
    for module in (primitives, render_group, scan_functions):
        for function in vars(module).values():
            if hasattr(function, "cache_clear"):
                function.cache_clear()
