"""A winner's own library: its kernel built alone once, then shared by every problem that it wins."""

from __future__ import annotations

from codegen.kernel import Candidate
from codegen.targets import Target
from storage.libraries import (
    Library,
    add_library,
    end_library,
    find_library,
    forget_library,
    library_builder,
    start_library,
)
from workers.build_winner import build_winner, winner_library_id
from workers.compile_file import Phase
from workers.limits import process_limits
from workers.steps.context import StepContext

_LOOK_SECONDS = 0.05  # while another attempt builds the library: that takes about a second


def winner_library(context: StepContext, candidate: Candidate, target: Target) -> tuple[Library, float]:
    """The library of a candidate, and the CPU seconds that building it cost now: 0 where it was known, or where another
    attempt was building it and this one waited.

    Raises WinnerNotBuilt, InfrastructureError, CompileCancelled, and Cancelled while it waits."""
    identity = winner_library_id(candidate, target, context.toolchain)
    mine = False
    try:
        while True:
            with context.database.read() as session:
                known = find_library(session, identity)
                builder = library_builder(session, identity)
            if known is not None and not context.blobs.missing(known.blobs):
                return known, 0.0
            if mine:  # and what another attempt had built before that was looked for again
                return _build(context, candidate, target, identity, known is not None)
            if builder is None:
                with context.database.write() as session:
                    mine = start_library(session, identity, context.claim)
            if not mine:
                context.cancel.wait(_LOOK_SECONDS)
                context.check()
    finally:
        if mine:
            with context.database.write() as session:
                end_library(session, identity, context.claim)


def _build(
    context: StepContext, candidate: Candidate, target: Target, identity: str, lost: bool
) -> tuple[Library, float]:
    """`lost`: its bytes are gone, and a build may not give the same ones again."""
    limits = process_limits(context.settings.compile_limits)
    stopwatch = context.stopwatch
    build = build_winner(candidate, target, context.toolchain, context.processes, limits, context.cancel, stopwatch)
    context.phases.extend(build.phases)
    uploading_at = stopwatch.read().wall
    blobs = context.blobs.put_many(
        [
            (build.library, "application/x-sharedlib"),
            (build.cubin, "application/x-cubin"),
            (build.source.encode(), "text/x-cuda"),
            (build.ptx, "text/x-ptx"),
            *([(build.sass, "text/x-sass")] if build.sass is not None else []),
        ]
    )
    context.phases.append(Phase("upload", stopwatch.read().wall - uploading_at, uploading_at))
    library, cubin, source, ptx, *sass = [blob.digest for blob in blobs]
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
