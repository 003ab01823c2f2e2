"""What a stand-alone measuring run has before it: problems with their candidates, from a bundle that
`cukiln export-bundle` wrote:

```
FOLDER/bundle.json          problems, candidates, kernels, toolchains: `Bundle`; written last
FOLDER/lib/<sha256>.so      the group libraries that hold the candidates' kernels; the bytes have that digest
```
"""

import hashlib
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

from codegen.errors import CodegenError
from codegen.kernel import Candidate, Kernel
from codegen.operator import Operator
from codegen.operators import operator
from codegen.plan.generator import generator
from codegen.predict.roofline import predict
from codegen.problem import Problem
from codegen.search.schedule import Schedule
from codegen.targets import Target, architectures
from codegen.targets import target as find_target
from codegen.text.ptxas_report import Resources
from workers.gpu.interface import Device, require_driver

SCHEMA = 1
BUNDLE_FILE, LIBRARIES = "bundle.json", "lib"
MAX_FAULTS = 5  # of what is wrong with a file, how much is said

Digest = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]


class BundleError(Exception):
    """The bundle cannot be measured; the message says which part of it is wrong and what to do."""


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class BundleCandidate(Part):
    """`verdict` where its kernel did not compile. Else `library` holds its kernel, of which ptxas said `resources`;
    all four are missing where the library is not known any more, and `message` says why."""

    candidate: Digest
    schedule: dict[StrictStr, StrictInt | StrictStr]
    kernel: Digest
    build: Digest
    toolchain: Digest | None
    verdict: Literal["compile_error", "compile_timeout"] | None = None
    message: str | None = None
    library: Digest | None = None
    code_digest: Digest | None = None
    resources: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None


class BundleProblem(Part):
    """`problem` and `search` are canonical; `workspace_limit_bytes` and `deterministic` are the job's."""

    name: str
    operator: str
    problem: dict[str, Any]
    target: str
    search: dict[str, Any]
    generator: Digest
    workspace_limit_bytes: int | None
    deterministic: bool
    space_size: int
    candidates: tuple[BundleCandidate, ...]


class Bundle(Part):
    """`kernels` by id, `toolchains` by digest, as they describe themselves."""

    schema_: Annotated[StrictInt, Field(alias="schema", ge=1, le=1)]
    job: str
    toolchains: dict[Digest, dict[str, Any]]
    kernels: dict[Digest, dict[str, Any]]
    problems: Annotated[tuple[BundleProblem, ...], Field(min_length=1)]


def read_bundle(folder: Path) -> Bundle:
    """The bundle in `folder`, with every library that it names looked at. Raises BundleError."""
    path = folder / BUNDLE_FILE
    try:
        bundle = Bundle.model_validate_json(path.read_bytes())
    except FileNotFoundError as error:
        raise BundleError(
            f"{path} is not there: `cukiln export-bundle` did not write {folder}, or not to its end; export it again"
        ) from error
    except OSError as error:
        raise BundleError(f"cannot read {path}: {error.strerror}") from error
    except ValidationError as error:
        raise BundleError(f"{path} is not a bundle of schema {SCHEMA}: {message_of(error)}") from error
    for digest in sorted(
        {candidate.library for problem in bundle.problems for candidate in problem.candidates if candidate.library}
    ):
        require_library(library_path(folder, digest), digest)
    return bundle


def library_path(folder: Path, digest: str) -> Path:
    return folder / LIBRARIES / f"{digest}.so"


def require_library(path: Path, digest: str) -> None:
    """Raises BundleError where the file is not there or holds other bytes: a library is code that runs."""
    try:
        actual = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise BundleError(f"{path}: {error.strerror}; copy the whole folder again, or export it again") from error
    if actual != digest:
        raise BundleError(
            f"{path} holds bytes with the digest {actual}: the file is damaged; copy it or export it again"
        )


def message_of(error: ValidationError) -> str:
    """What is wrong, field by field, in one line."""
    entries = error.errors(include_url=False, include_input=False)
    messages = [f"{'.'.join(map(str, entry['loc'])) or 'the whole'}: {entry['msg']}" for entry in entries[:MAX_FAULTS]]
    more = len(entries) - len(messages)
    return "; ".join(messages) + (f"; and {more} more" if more > 0 else "")


LEFT_OUT = "left out by --limit"


@dataclass(frozen=True)
class Built:
    """What became of a build. `state`: ok, with all that follows it, or why there is nothing to measure."""

    state: str
    message: str = ""
    code_digest: str | None = None
    resources: Mapping[str, Any] | None = None
    library: Path | None = None
    toolchain: str | None = None


@dataclass(frozen=True)
class WorkProblem:
    """`said`: its facts as results.json has them; `builds`, `left_out` (why it is not looked at): by candidate id."""

    name: str
    operator: Operator
    problem: Problem
    target: Target
    said: Mapping[str, Any]
    candidates: tuple[Candidate, ...]
    builds: Mapping[str, str]
    left_out: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Work:
    """`builds`: what became of each, by its id."""

    problems: list[WorkProblem]
    toolchains: Mapping[str, Mapping[str, Any]]
    builds: Mapping[str, Built]

    def built(self, problem: WorkProblem, candidate: Candidate) -> Built:
        return self.builds[problem.builds[candidate.id]]


@contextmanager
def _faults_of(name: str) -> Iterator[None]:
    """What is wrong with a problem becomes a BundleError that names it."""
    try:
        yield
    except ValidationError as error:
        raise BundleError(f"{name}: {message_of(error)}") from error
    except (CodegenError, KeyError) as error:
        raise BundleError(f"{name}: {error}") from error


def work_of_bundle(bundle: Bundle, folder: Path, *, name: str | None = None, limit: int | None = None) -> Work:
    """What a bundle holds. `limit`: the best predicted of each problem. Raises BundleError."""
    builds: dict[str, Built] = {}
    problems = []
    for entry in bundle.problems:
        if name in (None, entry.name):
            with _faults_of(entry.name):
                problems.append(_limited(_bundled(entry, bundle, folder, builds), builds, limit))
    _require_distinct(problems, name)
    return Work(problems, bundle.toolchains, builds)


def _bundled(entry: BundleProblem, bundle: Bundle, folder: Path, builds: dict[str, Built]) -> WorkProblem:
    kind = operator(entry.operator)
    if entry.generator != generator(kind.name):
        raise BundleError(
            f"{entry.name}: another release of cukiln exported the bundle (generator {entry.generator[:12]}, this "
            f"checkout has {generator(kind.name)[:12]}); measure it with the checkout that the service runs"
        )
    parsed = kind.parse(entry.problem)
    candidates, build_of, left_out = [], {}, {}
    for listed in entry.candidates:
        candidate = Candidate(parsed, Schedule.of(listed.schedule), Kernel.from_json(bundle.kernels[listed.kernel]))
        if candidate.id != listed.candidate or candidate.kernel.id != listed.kernel:
            raise BundleError(f"{entry.name}: candidate {listed.candidate} is not that of its problem and schedule")
        candidates.append(candidate)
        build_of[candidate.id] = listed.build
        library = library_path(folder, listed.library) if listed.library else None
        facts = (listed.message or "", listed.code_digest, listed.resources, library, listed.toolchain)
        builds[listed.build] = Built(listed.verdict or "ok", *facts)
        if listed.verdict is None and listed.library is None:
            left_out[candidate.id] = listed.message or "its library is not in the bundle"
    return WorkProblem(
        name=entry.name,
        operator=kind,
        problem=parsed,
        target=find_target(entry.target),
        said=entry.model_dump(exclude={"candidates"}),
        candidates=tuple(candidates),
        builds=build_of,
        left_out=left_out,
    )


def _limited(problem: WorkProblem, builds: Mapping[str, Built], limit: int | None) -> WorkProblem:
    if limit is None:
        return problem
    build_of, target = problem.builds, problem.target
    keys = sorted(predicted_us(candidate, builds[build_of[candidate.id]], target) for candidate in problem.candidates)
    left_out = {candidate: LEFT_OUT for us, candidate in keys[limit:] if us < math.inf}
    return replace(problem, left_out={**problem.left_out, **left_out})


def predicted(candidate: Candidate, built: Built, target: Target) -> dict[str, Any] | None:
    """The estimate of a candidate whose build stands."""
    if built.state != "ok" or not built.resources:
        return None
    return predict(candidate, Resources.from_dict(dict(built.resources)), target).as_dict()


def predicted_us(candidate: Candidate, built: Built, target: Target) -> tuple[float, str]:
    """What to sort by for the best predicted first; equal predictions by id."""
    estimate = predicted(candidate, built, target)
    return (estimate["us"] if estimate else math.inf, candidate.id)


def _require_distinct(problems: Iterable[WorkProblem], name: str | None) -> None:
    names = [problem.name for problem in problems]
    if not names:
        raise BundleError(f"no problem is called {name!r}" if name else "there is no problem")
    if twice := sorted({own for own in names if names.count(own) > 1}):
        raise BundleError(f"several problems are called {twice[0]!r}: results are distinguished by name")


def require_fitting(bundle: Bundle, device: Device, *, name: str | None = None) -> None:
    """The device loads the kernels of all problems, or of that one. Raises DriverTooOld, BundleError."""
    require_driver([device], cuda_of(bundle.toolchains))
    for problem in bundle.problems:
        if name in (None, problem.name):
            with _faults_of(problem.name):
                require_capability(problem.name, find_target(problem.target), device)


def cuda_of(toolchains: Mapping[str, Mapping[str, Any]]) -> int:
    """The newest major release of CUDA among the compilers of the kernels; 0 where none is recorded."""
    versions = [made_by.get("versions", {}) for made_by in toolchains.values()]
    compilers = [version[name] for version in versions for name in ("nvcc", "nvrtc") if name in version]
    return max((int(version.partition(".")[0]) for version in compilers), default=0)


def require_capability(problem: str, sheet: Target, device: Device) -> None:
    """Code for one architecture does not run on another. Raises BundleError."""
    if sheet.emulates is not None or divmod(sheet.capability, 10) != device.capability:
        raise BundleError(
            f"{problem} is compiled for {sheet.name}, but {device.name} has compute capability "
            f"{device.capability[0]}.{device.capability[1]}; measure on a GPU of that architecture, or name another "
            "target"
        )


def default_target_of(capability: tuple[int, int]) -> str:
    """Of the targets with a GPU's capability the architecture-specific one, which can do more. Raises BundleError."""
    fitting = sorted(name for name, sheet in architectures().items() if divmod(sheet.capability, 10) == capability)
    if not fitting:
        raise BundleError(
            f"no target has compute capability {capability[0]}.{capability[1]}; there are: {', '.join(architectures())}"
        )
    return fitting[-1]
