"""The page on profiles has the figures of today, and they are those of the requirement."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.repo import profile_page
from tests.repo.profile_page import ELEMENTS, KEPT, LAYERS, PAGE, layer, with_table
from tests.support.kernels.counted_runs import Counted

WRITE = "python -m tests.repo.profile_page writes the table"


@pytest.mark.parametrize("name", profile_page.TABLES)
def test_the_page_has_the_tables_of_today(name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text, name, profile_page.TABLES[name]()) == text, WRITE


def test_the_first_layers_forms_send_what_was_measured_elsewhere() -> None:
    """Ring bytes, truncations, multiplications, and whether filters are secret: logs of a two-party evaluation."""
    forms = profile_page.forms(layer(*LAYERS[0]))
    assert [(form.ring_bytes, form.truncations, form.multiplications, form.filters) for form in forms] == [
        (759_296, 65_536, 1_769_472, "secret"),
        (6_291_456, 786_432, 786_432, "public"),
        (3_964_928, 495_616, 786_432, "public"),
        (1_572_864, 196_608, 786_432, "public"),
        (647_168, 65_536, 786_432, "secret"),
    ]
    assert profile_page.dense() == 414_496


def test_what_winograd_saves_turns_into_a_loss_with_depth() -> None:
    rows = [row.split(" | ") for row in profile_page.by_depth().splitlines()[2:]]
    assert [row[-2] for row in rows] == ["1.17", "1.76", "1.12", "0.67", "0.58"]
    assert rows[-1][-1] == "1.02 |"


# ---- ReLUs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Counted]:
    return profile_page.counted_relus(tmp_path_factory.mktemp("relus"))


def test_the_page_has_the_counts_of_the_relus(runs: dict[str, Counted]) -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert with_table(text, "relus", profile_page.relu_table(runs)) == text, WRITE


def test_the_masked_pass_moves_the_dense_ones_bytes_and_the_mask(runs: dict[str, Counted]) -> None:
    dense, masked = runs["lists"].sectors("run"), runs["masked"].sectors()
    assert masked == (dense[0] + ELEMENTS // 8, dense[1])
    assert dense == (2 * ELEMENTS, 2 * ELEMENTS)


def test_lists_move_more_in_more_launches(runs: dict[str, Counted]) -> None:
    assert runs["lists"].of()["launch"].times == 3
    assert sum(runs["lists"].sectors()) > 1.5 * sum(runs["masked"].sectors())
    assert int(profile_page.mask().sum()) == KEPT
    scattered = runs["lists"].of("scatter")
    assert scattered["store_global"].times == KEPT


def test_in_sass_a_vector_of_the_masked_pass_is_a_load_a_store_and_a_word_of_the_mask() -> None:
    """Beside it the elements behind the last whole vector, one by one."""
    masked = profile_page.relus()["masked"]
    vectors = int(masked.schedule.get("loads"))
    found = profile_page.global_accesses(profile_page.sass(masked))
    assert masked.schedule.get("vector") == 8
    one_by_one = found.pop("LDG 2")
    assert one_by_one == found.pop("STG 2")
    assert found == {"LDG 16": vectors, "STG 16": vectors, "LDG 4": vectors + one_by_one}


def test_the_page_names_an_existing_picture() -> None:
    assert (Path(PAGE).parent / "pictures" / "profile.png").stat().st_size > 10_000
