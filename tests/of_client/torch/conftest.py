"""What the tests of `cukiln.torch` share: a service that has a kernel for every problem, on CPU tensors."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.support.kernels.reference_kernel import PlayedService


# Not every package index has PyTorch's build for CPUs.
collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    import torch

    torch._dynamo.reset()


@pytest.fixture
def played() -> Iterator[Callable[..., PlayedService]]:
    """`played(options…, service=…)` makes a service that is played the process's; the one before comes back."""
    from cukiln.torch import dispatch
    from cukiln.torch.options import Options
    from tests.support.kernels.reference_kernel import PlayedService

    installed: list[Any] = []

    def install(service: PlayedService | None = None, **options: Any) -> PlayedService:
        service = service or PlayedService()
        of_call = {"target": "cpu", "wait_seconds": 30.0, **options}
        dispatcher = dispatch.Dispatcher(Options(client=service, **of_call), load=service.load)  # type: ignore[arg-type]
        dispatch.install(dispatcher)
        installed.append(dispatcher)
        return service

    yield install
    if installed:
        dispatch.configure()
    for dispatcher in installed:
        dispatcher.close()


@pytest.fixture
def service(played: Callable[..., PlayedService]) -> PlayedService:
    """One that has a kernel for every problem; PyTorch's random numbers are the same in every run."""
    import torch

    torch.manual_seed(1)
    return played()
