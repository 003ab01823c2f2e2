"""The digests that things are found by. Content only; each states what it depends on.

| identity | depends on |
|---|---|
| problem | every field of the canonical problem |
| signature | operator, signature |
| kernel | operator, signature, compile-time tunables |
| candidate | problem, schedule |
| slice | the kernel's rendered text and the headers it inlines |
| build | kernel, slice, toolchain, target |
| library | slice, text of the host side, toolchain, target |
| winner | problem, architecture, device class, CUDA |
"""

from collections.abc import Mapping
from typing import Any

from codegen.canonical import digest

# Raised when the meaning of a part changes, so that nothing old is found under the new meaning.
SCHEMA_VERSION = 1

CUDA = 13
"""The major release whose compiler is used unless another one is asked for."""
RELEASES = frozenset({12, CUDA})

PlanVersions = Mapping[str, str]
"""The version of the verification plan by operator: each has its own, so that equal ones are of one operator."""


def problem_digest(problem: Mapping[str, Any]) -> str:
    """Of a canonical problem (`Problem.canonical()`)."""
    return digest("problem", SCHEMA_VERSION, problem=dict(problem))


def signature_id(operator: str, signature: Mapping[str, Any]) -> str:
    """Of a problem without its extents (`Operator.signature`)."""
    return digest("signature", SCHEMA_VERSION, operator=operator, signature=dict(signature))


def kernel_id(operator: str, signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> str:
    return digest("kernel", SCHEMA_VERSION, operator=operator, signature=dict(signature), tunables=dict(tunables))


def candidate_id(problem: str, schedule: Mapping[str, Any]) -> str:
    """Of a problem digest and a schedule; independent of generator and toolchain."""
    return digest("candidate", SCHEMA_VERSION, problem=problem, schedule=dict(schedule))


def slice_id(text: str, headers: str) -> str:
    """Of a kernel's own block and of the digest of the headers that it is compiled with."""
    return digest("slice", SCHEMA_VERSION, text=text, headers=headers)


def build_id(kernel: str, slice_digest: str, toolchain: str, target: str) -> str:
    return digest("build", SCHEMA_VERSION, kernel=kernel, slice=slice_digest, toolchain=toolchain, target=target)


def winner_key(problem: str, architecture: str, device_class: str, cuda: int = CUDA) -> str:
    """Of a problem digest, an architecture (`sm_90a`), a device class (product name or `predicted:<arch>`), and the
    major release of CUDA by which kernels are compiled."""
    key = digest("winner", SCHEMA_VERSION, problem=problem, architecture=architecture, device_class=device_class)
    return under_cuda(key, cuda)


def under_cuda(of: str, cuda: int) -> str:
    """A digest, for what is found under one major release of CUDA: its kernels need a driver for that. It is the same
    under `CUDA`, so that what there was before other releases is found."""
    return of if cuda == CUDA else digest("cuda", SCHEMA_VERSION, of=of, cuda=cuda)


def library_id(slice_digest: str, host: str, toolchain: str, target: str) -> str:
    """Of a winner's own library: its kernel's slice, the digest of its host side's text, toolchain and target."""
    return digest("library", SCHEMA_VERSION, slice=slice_digest, host=host, toolchain=toolchain, target=target)
