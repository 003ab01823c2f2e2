"""A cursor is one that the service gave, or a bad request: never a failure."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from storage.database.pages import make_cursor, read_cursor
from storage.errors import BadCursor
from tests.support.fixtures.api import Api, serving

LONGEST = 512
PARTS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    folder: Path = tmp_path_factory.mktemp("cursors")
    with serving(folder) as api:
        api.submit()
        yield api


def encoded(parts: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(parts).encode()).decode().rstrip("=")


def statuses(api: Api, cursor: str) -> set[int]:
    [job] = api.client.get("/v1/jobs").json()["jobs"]
    paths = ("/v1/jobs", f"/v1/jobs/{job['job']}/candidates", "/")
    return {api.client.get(path, params={"cursor": cursor}).status_code for path in paths}


@given(st.lists(PARTS, max_size=3))
@example([1.0, "\ud800"])
@example([10**30, "x"])
@example([-1, "\ud800"])
@example([2**63, "0"])
@example([float("nan"), "0"])
@example([1.0, "0\0"])
@example([True, "0"])
@example([1.0, "0" * LONGEST])
def test_whatever_a_cursor_holds_it_is_a_page_or_a_bad_request(api: Api, parts: Any) -> None:
    cursor = encoded(parts)
    assert statuses(api, cursor) <= ({200, 400} if len(cursor) <= LONGEST else {422})


@given(st.text(max_size=600))
@example("\ud800")
def test_whatever_a_cursor_is_it_is_read_or_bad(cursor: str) -> None:
    with suppress(BadCursor):
        read_cursor(cursor, (float, str))


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**31 - 1), st.integers(0, 2**256 - 1))
def test_what_was_given_is_read_again(at: float, position: int, number: int) -> None:
    text = f"{number:x}"
    assert read_cursor(make_cursor(at, position, text), (float, int, str)) == [at, position, text]
    with pytest.raises(BadCursor):
        read_cursor(make_cursor(at, position, text), (int, float, str))
