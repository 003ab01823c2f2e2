"""The SASS of a cubin, where a disassembler is found: nvdisasm or cuobjdump, beside nvcc or in PATH.

Neither comes with the compiler's wheels; `pip install nvidia-cuda-nvdisasm` puts nvdisasm beside their nvcc. SASS is
for people to read: nothing is verified by it, so whatever goes wrong here costs the text and nothing else.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from workers.processes.job_files import write_bytes
from workers.processes.process_stream import once_more
from workers.processes.processes import Limits, ProcessError, Processes

log = logging.getLogger("cukiln.disassemble")

CUBIN = "winner.cubin"
# nvdisasm takes 0.06 s for a kernel and 82 MB (13.5 on cubins of eight matmul kernels), and writes 70 KB.
LIMITS = Limits(wall_seconds=30, cpu_seconds=30, memory_bytes=2 << 30, output_bytes=16 << 20)
# -c: code alone. cuobjdump has nvdisasm's work done by that of its own folder or of PATH.
_TOOLS = {"nvdisasm": ("-c",), "cuobjdump": ("-sass",)}


def disassemble(
    cubin: bytes, nvcc: Path, processes: Processes, cancel: threading.Event | None = None, limits: Limits = LIMITS
) -> bytes | None:
    """The SASS as text; None where there is no disassembler or it fails. Never raises."""
    command = find_disassembler(nvcc)
    if command is None:
        return None
    try:
        with processes.private_folder() as folder:
            write_bytes(folder / CUBIN, cubin)
            path = os.pathsep.join([str(Path(command[0]).parent), os.environ.get("PATH", os.defpath)])
            argv = [*command, CUBIN]
            run = partial(processes.run, argv, cwd=folder, limits=limits, env={"PATH": path}, cancel=cancel)
            finished = once_more(run, "machine")  # of the same library it is not made again
    except (ProcessError, OSError) as error:
        log.warning("no SASS: %s", error)
        return None
    if not finished.ok:
        log.warning("no SASS: %s ended with %s: %s", command[0], finished.returncode, finished.text().strip()[-200:])
        return None
    return finished.stdout or None


def find_disassembler(nvcc: Path) -> Sequence[str] | None:
    """The command without its file; None where there is none."""
    folders = dict.fromkeys((nvcc.parent, nvcc.resolve().parent))  # /usr/bin/nvcc may be a link into the toolkit
    places = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])
    for name, options in _TOOLS.items():
        program = shutil.which(name, path=places)
        if program is not None:
            return (program, *options)
    return None
