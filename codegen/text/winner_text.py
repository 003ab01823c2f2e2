"""A winner's own library: the text of its host side, and the id that it is found by."""

import hashlib
from collections.abc import Sequence

from codegen.identity import library_id
from codegen.kernel import Candidate, Kernel
from codegen.operators import operator
from codegen.targets import Target
from codegen.text.render_emulation import EMULATION_FLAGS, render_emulation
from codegen.text.render_group import slice_digest
from codegen.text.render_library import render_library


def winner_text(kernel: Kernel, launch: Sequence[int], target: Target) -> str:
    """C++, with these launch-time values."""
    if target.emulates is not None:
        return render_emulation(kernel, launch)
    return render_library([kernel], target=target.name, launch=launch)


def host_digest(kernel: Kernel, launch: Sequence[int], target: Target) -> str:
    host = hashlib.sha256(winner_text(kernel, launch, target).encode())
    if target.emulates is not None:  # these flags are not the toolchain's
        host.update(" ".join(["\0", *EMULATION_FLAGS]).encode())
    return host.hexdigest()


def winner_library_id(candidate: Candidate, target: Target, toolchain: str) -> str:
    """Of kernel source, host text, toolchain (its digest) and target: problems whose winners agree in these share one
    library."""
    launch = operator(candidate.kernel.operator).launch_values(candidate.schedule)
    host = host_digest(candidate.kernel, launch, target)
    return library_id(slice_digest(candidate.kernel), host, toolchain, target.name)
