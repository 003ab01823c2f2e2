"""What a call of `cukiln.torch` costs beside its kernel: that of `bench_client`, whose launch does nothing."""

from collections.abc import Callable
from typing import Any

import cukiln
from benchmarks.harness import median_seconds

HITS, BATCH = 200, 100
SIDE = 16


class NoKernel:
    """Takes the arguments of a library, as a library does, and launches nothing."""

    def bound(self, *, attributes: tuple[int, ...], scalars: tuple[float, ...]) -> Callable[..., None]:
        import tvm_ffi

        nothing: Callable[..., None] = tvm_ffi.get_global_func("testing.nop")
        return nothing

    def workspace_bytes(self, *tensors: Any) -> int:
        return 0


def torch_calls(record: cukiln.WinnerRecord) -> dict[str, float | None]:
    """Of a product of small matrices that is looked up before: a call; one of which a gradient may be asked; its
    gradients, which are two products more; and, for comparison, PyTorch's own on the same matrices, which multiplies.
    None without PyTorch."""
    try:
        import torch

        import cukiln.torch
        from cukiln.torch import dispatch
    except ImportError:
        return {"torch_call_us": None, "torch_call_grad_us": None}

    class Service:
        def lookup(self, problems: list[Any], **options: Any) -> list[cukiln.LookedUp]:
            return [cukiln.LookedUp(name=None, key=record.key, record=record, at=1.0) for _ in problems]

    options = cukiln.torch.Options(client=Service(), target="cpu", wait_seconds=60)  # type: ignore[arg-type]
    timed = dispatch.Dispatcher(options, load=lambda entry, client: NoKernel())  # type: ignore[arg-type,return-value]
    dispatch.install(timed)
    try:
        a, b = torch.randn(SIDE, SIDE), torch.randn(SIDE, SIDE)
        trained, dy = torch.randn(SIDE, SIDE, requires_grad=True), torch.ones(SIDE, SIDE)
        made, own = cukiln.torch.matmul(trained, trained), torch.matmul(trained, trained)
        calls: dict[str, Callable[[], object]] = {
            "torch_call_us": lambda: cukiln.torch.matmul(a, b),
            "torch_call_grad_us": lambda: cukiln.torch.matmul(a, trained),
            "torch_gradients_us": lambda: torch.autograd.grad(made, trained, dy, retain_graph=True),
            "torch_operator_us": lambda: torch.ops.cukiln.matmul(a, b),
            "torch_matmul_us": lambda: torch.matmul(a, b),
            "torch_matmul_grad_us": lambda: torch.matmul(a, trained),
            "torch_matmul_gradients_us": lambda: torch.autograd.grad(own, trained, dy, retain_graph=True),
        }
        figures: dict[str, float | None] = {
            name: round(1e6 * median_seconds(call, HITS, BATCH), 2) for name, call in calls.items()
        }
        if any(entry.call is None for entry in dispatch.current().table.values()):
            raise SystemExit("what was timed were PyTorch's own operators")
    finally:
        dispatch.remove(timed)
        timed.close()
    return figures
