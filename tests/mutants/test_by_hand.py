"""What a rule makes is not written by hand as well."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Mapping
from functools import cache

from codegen.operators import operator
from codegen.text.render_group import header_text, inlined
from tests.mutants.changes import OF_ALL, changes_of
from tests.mutants.subjects import SUBJECTS
from tests.support.kernels.wrong_kernels import COMMON, CUDA_CORES, DIVIDED, EPILOGUES, TENSOR_CORES


def by_hand() -> Iterator[tuple[str, str, str, str, str]]:
    """Name, file, its text, what stands there, what is wrong in its place."""
    texts = operator("matmul").kernel_texts
    for name, wrong in {**COMMON, **CUDA_CORES, **TENSOR_CORES, **DIVIDED}.items():
        yield name, wrong.file, texts[wrong.file], wrong.old, wrong.new
    for name, (_, old, new) in EPILOGUES.items():
        yield name, OF_ALL, header_text(OF_ALL), old, new
    for module in dict.fromkeys(module for subject in SUBJECTS for module in subject.modules):
        for declared in importlib.import_module(module).DECLARED:
            if declared.mutations is not None:
                own: Mapping[str, str] = operator(declared.operator).kernel_texts
                for name, (file, old, new) in declared.mutations.wrong.items():
                    yield f"{declared.operator}: {name}", file, own[file], old, new


def bare(line: str) -> str:
    """Brackets and blanks change nothing here."""
    return re.sub(r"[\s()]", "", line.partition("//")[0])


@cache
def by_rules(file: str, text: str) -> frozenset[tuple[int, str]]:
    return frozenset((change.line, bare(change.changed)) for change in changes_of(file, text))


def made_by_a_rule(file: str, text: str, old: str, new: str) -> bool:
    lines = enumerate(text.splitlines(), 2)
    return any((number, bare(line.replace(old, new))) in by_rules(file, text) for number, line in lines if old in line)


def test_no_wrong_text_that_a_rule_makes_is_written_by_hand() -> None:
    every = list(by_hand())
    assert len(every) > 100
    assert [name for name, file, text, old, new in every if made_by_a_rule(file, inlined(text), old, new)] == []
