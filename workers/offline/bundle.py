"""The folder of a job that is measured elsewhere: `cukiln export-bundle` writes it, `workers.offline.measure_bundle`
reads it.

```
FOLDER/bundle.json          problems, candidates, kernels, toolchains: `Bundle`
FOLDER/lib/<sha256>.so      the group libraries that hold the candidates' kernels
```
The file is written last, so that a folder without it was not written whole. A library is used only where its bytes have
the digest that it is named after.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError

SCHEMA = 1
BUNDLE_FILE, LIBRARIES = "bundle.json", "lib"
MAX_WORDS = 5  # of what is wrong with a file, how much is said

Digest = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]


class BundleError(Exception):
    """The folder cannot be measured; the message says which part of it is wrong and what to do."""


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
        raise BundleError(f"{path} is not a bundle of schema {SCHEMA}: {words_of(error)}") from error
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


def words_of(error: ValidationError) -> str:
    """What is wrong, field by field, in one line."""
    entries = error.errors(include_url=False, include_input=False)
    words = [f"{'.'.join(map(str, entry['loc'])) or 'the whole'}: {entry['msg']}" for entry in entries[:MAX_WORDS]]
    more = len(entries) - len(words)
    return "; ".join(words) + (f"; and {more} more" if more > 0 else "")
