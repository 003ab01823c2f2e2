"""Rules find what may be wrong on a line, leave alone what is no code, and take turns."""

from __future__ import annotations

import sys

import pytest

from tests.mutants.changes import changes_of
from tests.mutants.rules import RULES
from tests.mutants.subjects import SUBJECTS
from tests.mutants.verify import in_turn

TEXT = """namespace cukiln {
#if defined(CUKILN_DEVICE)
template <class C>
__device__ void run(const Arguments& arguments, int rows, int columns) {
  const int64_t place = int64_t(blockIdx.x) * C::threads + 1;  // a comment: 7 < 8
  if (place >= rows) return;
  float sum = 0.0f;
  for (int i = 0; i < columns; ++i) sum += values[i + 1];
  CUKILN_COUNT("multiply", 1);
  store(place, sum);
  out.data[0] = place < rows ? sum : other;
}
#endif
#if defined(CUKILN_HOST)
inline int64_t grid(int rows) { return ceil_div(rows, 4); }
#endif
"""
MADE = {
    "constant": "float sum = 1.0f;",
    "comparison": "if (place > rows) return;",
    "operator": "sum -= values[i + 1];",
    "operand": "if (place >= columns) return;",
    "statement": "  ;",
    "extent": "i < (columns - 1); ++i",
    "element": "values[(i + 1) ^ 1]",
    "initial value": "float sum = (0.0f) + 1;",
    "case": "if (false) return;",
    "32-bit offset": "const int64_t place = int(blockIdx.x)",
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_makes_a_line_wrong_in_its_way(rule: str) -> None:
    changed = [change.changed for change in changes_of("a.cuh", TEXT) if change.rule == rule]
    assert any(MADE[rule] in line for line in changed), changed


def test_nothing_is_changed_but_code() -> None:
    for change in changes_of("a.cuh", TEXT):
        assert "COUNT" not in change.text and not change.text.startswith("#")
        assert change.column < (len(change.text.partition("//")[0]))
        assert change.changed != change.text


def test_a_change_is_known_by_its_place_and_its_half_of_the_text() -> None:
    lines = TEXT.splitlines()
    for change in changes_of("a.cuh", TEXT):
        assert lines[change.line - 2] == change.text
        assert change.on_host == ("ceil_div" in change.text)


def test_turns_go_round_the_rules_and_depend_on_the_seed() -> None:
    made, rules = changes_of("a.cuh", TEXT), list(RULES)
    first = in_turn(made, rules, "1")
    assert [change.rule for change in first[: len(rules)]] == rules
    assert sorted(first) == sorted(made) and first == in_turn(made, rules, "1")
    assert first != in_turn(made, rules, "2")


def test_kernels_are_there_without_a_run_of_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python -m tests.mutants.run` has them, in a process that has imported none of their modules."""
    monkeypatch.delenv("CUKILN_TEST_SEED")
    (subject,) = [each for each in SUBJECTS if each.name == "matmul"]
    for module in subject.modules:
        monkeypatch.delitem(sys.modules, module, raising=False)
    assert subject.kernels()
