"""A winner's own library: its kernel built alone once, then shared by every problem that it wins."""

from codegen.kernel import Candidate
from codegen.targets import Target
from storage.entities.libraries import (
    Library,
    add_library,
    end_library,
    find_library,
    forget_library,
    library_builder,
    start_library,
)
from workers.compile.build_winner import build_winner, winner_library_id
from workers.steps.context import StepContext

_LOOK_SECONDS = 0.05  # while another attempt builds the library: that takes about a second


def winner_library(context: StepContext, candidate: Candidate, target: Target) -> tuple[Library, float]:
    """The library and the CPU seconds that building it cost now. Raises what `build_winner` does, and Cancelled."""
    identity = winner_library_id(candidate, target, context.toolchain)
    is_builder = False
    try:
        while True:
            with context.database.read() as session:
                library = find_library(session, identity)
                builder = library_builder(session, identity)
            if library is not None and not context.blobs.missing(library.blobs):
                return library, 0.0
            if is_builder:  # and what another attempt had built before that was looked for again
                return _build(context, candidate, target, identity, library is not None)
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
    (library, cubin, source, ptx, *sass), upload = context.uploaded(
        [
            (build.library, "application/x-sharedlib"),
            (build.cubin, "application/x-cubin"),
            (build.source.encode(), "text/x-cuda"),
            (build.ptx, "text/x-ptx"),
            *([(build.sass, "text/x-sass")] if build.sass is not None else []),
        ]
    )
    context.phases.append(upload)
    made = Library(
        id=identity,
        kernel=candidate.kernel.id,
        toolchain=context.toolchain.digest,
        code_digest=build.code_digest,
        resources=build.resources.as_dict(),
        library=library,
        cubin=cubin,
        source=source,
        ptx=ptx,
        sass=next(iter(sass), None),
    )
    with context.database.write() as session:
        if lost:
            forget_library(session, identity)
        add_library(session, made)
    return made, build.cpu_seconds
