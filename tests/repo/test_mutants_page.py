"""The page of mutants shows the last summary, which has so many of every operator as it promises."""

from __future__ import annotations

import json

from codegen.operators import operators
from tests.mutants.arguments import takes
from tests.mutants.subjects import SUBJECTS
from tests.mutants.summary import nothing, operator_of
from tests.repo.mutants_page import PAGE, last_summary, with_tables

SUMMARY = json.loads(last_summary().read_text(encoding="utf-8"))


def test_the_tables_are_those_of_the_last_summary() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_tables(text, SUMMARY) == text, "write it again: python -m tests.repo.mutants_page"


def test_every_operator_has_at_least_forty_mutants() -> None:
    of_ours = {name for name, own in operators().items() if type(own).__module__.startswith("codegen.operators.")}
    assert {subject.operator for subject in SUBJECTS} == of_ours
    for name in of_ours:
        assert sum(row["mutants"] for own, row in SUMMARY["subjects"].items() if operator_of(own) == name) >= 40, name


def test_at_most_five_of_a_hundred_are_equivalent() -> None:
    rows = SUMMARY["subjects"].values()
    assert 100 * sum(row["equivalent"] for row in rows) <= 5 * sum(row["mutants"] for row in rows)


def test_each_survivor_says_what_it_would_take_to_see_it() -> None:
    for row in SUMMARY["survived"]:
        assert row["kernels"] and row["takes"], row
        assert row["takes"] == (takes(row["file"], row["text"]) or nothing(row["how"])), row


def test_the_counts_of_survivors_are_those_of_the_list() -> None:
    rows = SUMMARY["subjects"].values()
    survived = sum(row["survived"] + row["of 32-bit offsets"] for row in rows)
    assert len(SUMMARY["survived"]) <= survived and (survived == 0) == (SUMMARY["survived"] == [])
