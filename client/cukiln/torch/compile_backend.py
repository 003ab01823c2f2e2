"""`torch.compile(model, backend="cukiln")`: what kernels can compute is replaced, the rest is another backend's."""

import logging
import sys
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from cukiln.errors import UsageError

if TYPE_CHECKING:
    from cukiln.torch.graph_pass import Replaced

LOG = logging.getLogger("cukiln.torch")
INNER = ("inductor", "aot_eager", "eager")
REPLACE = ("known", "all")
_replaced: deque["Replaced"] = deque(maxlen=1000)


def backend(
    module: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """A backend of `torch.compile`, there by the name "cukiln" too.

    `options`: `inner`, the backend that compiles the rest of the graph (inductor, aot_eager, eager); `operators`, those
    that may be replaced (`cukiln.torch.graph_pass.OPERATORS`), default all; `replace`: `known`, the default, only what
    a kernel is known for now, so that the inner backend fuses the rest, or `all`, whose calls find kernels later too.
    Others and `mode` are Inductor's.
    """
    # Importing Dynamo and the pass takes seconds, which `import cukiln.torch` does not.
    from cukiln.torch.graph_pass import OPERATORS, replace_calls

    of_inner = dict(options or {})
    inner = of_inner.pop("inner", INNER[0])
    operators: Collection[str] = of_inner.pop("operators", OPERATORS)
    if inner not in INNER:
        raise UsageError(f"inner is {inner!r}; allowed: {', '.join(INNER)}")
    which = of_inner.pop("replace", REPLACE[0])
    if which not in REPLACE:
        raise UsageError(f"replace is {which!r}; allowed: {', '.join(REPLACE)}")
    if unknown := [name for name in operators if name not in OPERATORS]:
        raise UsageError(f"operators has {unknown[0]!r}; allowed: {', '.join(OPERATORS)}")
    if inner != "inductor" and (of_inner or mode):
        raise UsageError(f"inner is {inner!r}, which has no mode and no options such as {[*of_inner, mode][0]!r}")
    replaced = replace_calls(module, operators, known_alone=which == "known")
    _replaced.append(replaced)
    LOG.info("a graph of %d nodes: %s", len(module.graph.nodes), replaced)
    if inner == "inductor":
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        of_mode = list_mode_options(mode) if mode else {}
        return compile_fx(module, list(example_inputs), config_patches={**of_mode, **of_inner})
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(inner)(module, list(example_inputs))


def replaced() -> list["Replaced"]:
    """What was replaced in each graph that this process compiled with the backend, oldest first, of the last 1000."""
    return list(_replaced)


def register() -> None:
    """Make the backend known by its name where PyTorch does not find it by the package's metadata: in a checkout."""
    if "torch._dynamo" in sys.modules:
        from torch._dynamo.backends.registry import list_backends, register_backend

        if "cukiln" not in list_backends(exclude_tags=()):
            register_backend(backend, name="cukiln")
