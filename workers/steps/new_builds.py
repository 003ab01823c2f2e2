"""The builds of kernels: by what digest they are found, and what compiling them is predicted to take."""

from __future__ import annotations

from collections.abc import Mapping

from codegen.compile_model import CompileModel
from codegen.identity import build_id
from codegen.kernel import Kernel
from codegen.render_group import slice_digest
from storage.builds import NewBuild


class NewBuilds:
    """Each kernel's build under a toolchain, made once however many candidates share it. `models` by toolchain."""

    def __init__(self, models: Mapping[str, CompileModel]) -> None:
        self._models = models
        self._made: dict[tuple[Kernel, str, str], NewBuild] = {}

    def of(self, kernel: Kernel, target: str, toolchain: str) -> NewBuild:
        place = (kernel, target, toolchain)
        if place not in self._made:
            text = slice_digest(kernel)
            model = self._models[toolchain]
            self._made[place] = NewBuild(
                id=build_id(kernel.id, text, toolchain, target),
                kernel=kernel.id,
                slice=text,
                kernel_json=kernel.to_json(),
                target=target,
                toolchain=toolchain,
                predicted_seconds=model.kernel_seconds(kernel),
                predicted_bytes=model.kernel_bytes(kernel),
            )
        return self._made[place]
