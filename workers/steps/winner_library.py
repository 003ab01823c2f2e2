"""A winner's own library: its kernel built alone once, then shared by every problem that it wins."""

import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from codegen.identity import build_id
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.targets import Target
from codegen.targets import target as find_target
from codegen.text.cubin import code_digest_of
from codegen.text.ptxas_report import Resources
from codegen.text.render_group import render_device, slice_digest, symbols
from codegen.text.render_library import render_plan, winner_exports
from codegen.text.scan_functions import assert_unique
from codegen.text.winner_text import winner_library_id, winner_text
from cukiln.types import Launch, LaunchFunction
from storage.entities.groups import known_builds, load_group
from storage.entities.libraries import (
    FILES_OF_LIBRARIES,
    Library,
    add_library,
    end_library,
    files_of,
    find_library,
    forget_library,
    library_builder,
    start_library,
)
from storage.entities.winners import launch_of
from workers.compile.compile_file import CompileFault, FileCompiler, Phase
from workers.compile.compile_group import worst_resources
from workers.compile.toolchain import Toolchain
from workers.processes.job_files import write_bytes
from workers.processes.process_stream import once_more
from workers.processes.processes import Limits, ProcessError, Processes
from workers.processes.stopwatch import Stopwatch
from workers.steps.context import StepContext

log = logging.getLogger("cukiln.compile")
T = TypeVar("T")

CUBIN = "winner.cubin"  # that is disassembled
_LOOK_SECONDS = 0.05  # while another attempt builds the library: that takes about a second
# nvdisasm takes 0.06 s for a kernel and 82 MB (13.5 on cubins of eight matmul kernels), and writes 70 KB.
LIMITS = Limits(wall_seconds=30, cpu_seconds=30, memory_bytes=2 << 30, output_bytes=16 << 20)
# -c: code alone. cuobjdump has nvdisasm's work done by that of its own folder or of PATH.
_TOOLS = {"nvdisasm": ("-c",), "cuobjdump": ("-sass",)}


class WinnerNotBuilt(ProcessError):
    """The kernel compiled in its group but not alone: `log` says why. The candidate cannot win."""

    def __init__(self, candidate: str, log: str) -> None:
        super().__init__(candidate, log)
        self.candidate, self.log = candidate, log

    def __str__(self) -> str:
        return f"candidate {self.candidate} does not compile alone: {self.log[-300:]}"


@dataclass(frozen=True)
class WinnerBuild:
    """What is published. It can win only where `code_digest` equals the verified one."""

    source: str
    cubin: bytes
    library: bytes
    ptx: bytes
    sass: bytes | None
    code_digest: str
    resources: Resources
    log: str
    phases: tuple[Phase, ...]
    wall_seconds: float
    cpu_seconds: float


def build_winner(
    candidate: Candidate,
    target: Target,
    toolchain: Toolchain,
    processes: Processes,
    limits: Limits,
    cancel: threading.Event | None = None,
    stopwatch: Stopwatch | None = None,
) -> WinnerBuild:
    """Equal inputs give equal bytes. Raises WinnerNotBuilt, InfrastructureError, CompileCancelled."""
    kernel = candidate.kernel
    group = render_device([kernel])
    assert_unique(group.text, group.functions)
    launch = operator(kernel.operator).launch_values(candidate.schedule)
    text = winner_text(kernel, launch, target)
    with processes.private_folder() as folder:
        compiler = FileCompiler(folder, toolchain, processes, limits, cancel, stopwatch or Stopwatch())
        try:
            code = compiler.compile_device(group.text, target.name, group.symbols)
            library = compiler.link_library(text, winner_exports(kernel))
        except CompileFault as fault:
            raise WinnerNotBuilt(candidate.id, fault.log) from fault
    names = symbols(kernel)
    return WinnerBuild(
        source=group.text,
        cubin=code.cubin,
        library=library,
        ptx=code.ptx,
        sass=disassemble(code.cubin, toolchain.device_compiler.path, processes, cancel),
        code_digest=code_digest_of([code.contents.kernels[name] for name in names]),
        resources=worst_resources([code.resources[name] for name in names]),
        log=compiler.log,
        phases=tuple(compiler.phases),
        wall_seconds=compiler.wall_seconds,
        cpu_seconds=compiler.cpu_seconds,
    )


def plan_launch(
    candidate: Candidate,
    toolchain: Toolchain,
    processes: Processes,
    limits: Limits,
    cancel: threading.Event | None = None,
) -> Launch:
    """How to call the candidate, from the launch code itself. Raises WinnerNotBuilt and what `build_winner` does."""
    with processes.private_folder() as folder:
        compiler = FileCompiler(folder, toolchain, processes, limits, cancel)
        try:
            plan = compiler.run_program(render_plan(candidate), "plan")
        except CompileFault as fault:
            raise WinnerNotBuilt(candidate.id, fault.log) from fault
    names = symbols(candidate.kernel)
    *launches, workspace = [list(map(int, line.split())) for line in plan.splitlines()]
    functions = [
        LaunchFunction(
            symbol=names[function],
            grid=(grid_x, grid_y, grid_z),
            block=(block_x, block_y, block_z),
            shared_bytes=shared,
        )
        for function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared in launches
    ]
    return launch_of(candidate, functions, workspace[0])


def disassemble(
    cubin: bytes, nvcc: Path, processes: Processes, cancel: threading.Event | None = None, limits: Limits = LIMITS
) -> bytes | None:
    """The SASS as text; None where there is no disassembler or it fails (`pip install nvidia-cuda-nvdisasm`)."""
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


def winner_library(context: StepContext, candidate: Candidate, target: Target) -> tuple[Library, float]:
    """The library and the CPU seconds that building it cost now. Raises what `build_winner` does, and Cancelled."""
    identity = winner_library_id(candidate, target, context.toolchain.digest)

    def stored() -> Library | None:
        with context.database.read() as session:
            return find_library(session, identity)

    def there() -> tuple[Library, float] | None:
        library = stored()
        return None if library is None or context.blobs.missing(files_of(library)) else (library, 0.0)

    def make() -> tuple[Library, float]:
        build = _build if target.emulates is None else _build_emulation
        return build(context, candidate, target, identity, stored() is not None)

    return once_at_a_time(context, identity, there, make)


def once_at_a_time(context: StepContext, identity: str, there: Callable[[], T | None], make: Callable[[], T]) -> T:
    """What is `there`, else what is made now: by one attempt of all, which the others wait for. `identity`: of a
    library or its PTX. Raises what `make` does, and Cancelled."""
    is_builder = False
    try:
        while True:
            with context.database.read() as session:
                builder = library_builder(session, identity)
            if (made := there()) is not None:
                return made
            if is_builder:  # and what another attempt had made before that was looked for again
                return make()
            if builder is None:
                with context.database.write() as session:
                    is_builder = start_library(session, identity, context.lease)
            if not is_builder:
                context.cancel.wait(_LOOK_SECONDS)
                context.check()
    finally:
        if is_builder:
            with context.database.write() as session:
                end_library(session, identity, context.lease)


def _build(
    context: StepContext, candidate: Candidate, target: Target, identity: str, lost: bool
) -> tuple[Library, float]:
    """`lost`: its bytes are gone, and a build may not give the same ones again."""
    tools = (context.toolchain, context.processes, context.settings.limits("compile"))
    build = build_winner(candidate, target, *tools, context.cancel, context.stopwatch)
    context.phases.extend(build.phases)
    files, upload = context.uploaded(
        {
            "library": (build.library, "application/x-sharedlib"),
            "cubin": (build.cubin, "application/x-cubin"),
            "source": (build.source.encode(), "text/x-cuda"),
            "ptx": (build.ptx, "text/x-ptx"),
            **({"sass": (build.sass, "text/x-sass")} if build.sass is not None else {}),
        }
    )
    context.phases.append(upload)
    values = {"code_digest": build.code_digest, "resources": build.resources.as_dict(), "sass": None, **files}
    return _add(context, candidate, identity, values, lost), build.cpu_seconds


def _build_emulation(
    context: StepContext, candidate: Candidate, target: Target, identity: str, lost: bool
) -> tuple[Library, float]:
    """As `_build`; all but the library itself is of the architecture."""
    architecture = find_target(target.architecture)
    compiled, cpu_seconds = _compiled(context, candidate, architecture), 0.0
    if compiled is None:
        made, cpu_seconds = winner_library(context, candidate, architecture)
        compiled = {name: getattr(made, name) for name in ("code_digest", "resources", *FILES_OF_LIBRARIES)}
    with context.processes.private_folder() as folder:
        tools = (context.toolchain, context.processes, context.settings.limits("compile"))
        compiler = FileCompiler(folder, *tools, context.cancel, context.stopwatch)
        try:
            launch = operator(candidate.kernel.operator).launch_values(candidate.schedule)
            text = winner_text(candidate.kernel, launch, target)
            library = compiler.link_emulation(text, winner_exports(candidate.kernel))
        except CompileFault as fault:
            raise WinnerNotBuilt(candidate.id, fault.log) from fault
    files, upload = context.uploaded({"library": (library, "application/x-sharedlib")})
    context.phases.extend([*compiler.phases, upload])
    return _add(context, candidate, identity, {**compiled, **files}, lost), cpu_seconds + compiler.cpu_seconds


def _compiled(context: StepContext, candidate: Candidate, architecture: Target) -> dict[str, Any] | None:
    """The file in which the kernel was compiled, by the columns of a library: of an emulation nothing more is needed,
    and compiling the kernel alone would take a quarter of a job's time. None where it is lost."""
    kernel, toolchain = candidate.kernel, context.toolchain.digest
    build_of = build_id(kernel.id, slice_digest(kernel), toolchain, architecture.name)
    with context.database.read() as session:
        build = known_builds(session, [build_of]).get(build_of)
        group = load_group(session, build.group_id) if build is not None and build.group_id is not None else None
    if build is None or build.code_digest is None or group is None:
        return None
    files = {"cubin": group.cubin, "source": group.source}
    if None in files.values() or context.blobs.missing(files.values()):
        return None
    return {"code_digest": build.code_digest, "resources": build.resources, **files, "ptx": None, "sass": None}


def _add(context: StepContext, candidate: Candidate, identity: str, values: Mapping[str, Any], lost: bool) -> Library:
    with context.database.write() as session:
        if lost:
            forget_library(session, identity)
        toolchain = context.toolchain.digest
        return add_library(session, id=identity, kernel=candidate.kernel.id, toolchain=toolchain, **values)
