"""What `cukiln.torch.configure` sets."""

from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict, get_args

from cukiln.client import Client
from cukiln.errors import UsageError
from cukiln.http.seconds import check_seconds

OnMiss: TypeAlias = Literal["none", "tune", "nearest"]


@dataclass(frozen=True)
class Options:
    """Where kernels come from.

    `client`, or `url` (and all else as of `cukiln.Client()`): the service. `target`: an architecture; default: that of
    each tensor's GPU. With `cpu` calls on CPU tensors are computed by the emulation of kernels: slow, for tests.
    `on_miss`: what the service does where it has no winner. `wait_seconds`: how long the first call of a problem waits
    for its kernel at most; PyTorch's own operator runs until it is there. `retry_seconds`: after which a miss is asked
    for again, behind the caller's back. `deterministic`, `workspace_limit_bytes`: which kernels may run. `enabled`:
    with False every call is PyTorch's own.
    """

    client: Client | None = None
    url: str | None = None
    target: str | None = None
    on_miss: OnMiss = "none"
    wait_seconds: float = 0.5
    retry_seconds: float = 30.0
    deterministic: bool = False
    workspace_limit_bytes: int | None = None
    enabled: bool = True

    def __post_init__(self) -> None:
        if self.on_miss not in get_args(OnMiss):
            raise UsageError(f"on_miss is {self.on_miss!r}; allowed: {', '.join(get_args(OnMiss))}")
        if self.client is not None and self.url is not None:
            raise UsageError("client and url are given; one of them says where the service is")
        check_seconds("wait_seconds", self.wait_seconds)
        check_seconds("retry_seconds", self.retry_seconds, waited=False)


class OptionsGiven(TypedDict, total=False):
    """The fields of `Options`, as arguments."""

    client: Client | None
    url: str | None
    target: str | None
    on_miss: OnMiss
    wait_seconds: float
    retry_seconds: float
    deterministic: bool
    workspace_limit_bytes: int | None
    enabled: bool
