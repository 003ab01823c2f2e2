"""Blobs over HTTP: immutable, conditional, in parts, and checked before they are sent."""

from __future__ import annotations

import hashlib

import pytest

from service.http.answers import none_match
from tests.support.fixtures_api import Api

DATA = bytes(range(256)) * 4
DIGEST = hashlib.sha256(DATA).hexdigest()
PATH = f"/v1/blobs/sha256/{DIGEST}"
ETAG = f'"{DIGEST}"'


@pytest.fixture(autouse=True)
def stored(api: Api) -> None:
    api.blobs.put(DATA, "application/x-sharedlib")


def test_a_blob_is_sent_whole_and_may_be_kept_for_ever(api: Api) -> None:
    answer = api.client.get(PATH)
    assert (answer.status_code, answer.content) == (200, DATA)
    assert answer.headers["etag"] == ETAG
    assert "immutable" in answer.headers["cache-control"]
    assert answer.headers["content-type"] == "application/x-sharedlib"


def test_head_says_what_get_would_without_the_bytes(api: Api) -> None:
    get, head = api.client.get(PATH), api.client.head(PATH)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "content-type", "cache-control"):
        assert head.headers[name] == get.headers[name]


@pytest.mark.parametrize("header", [ETAG, f"W/{ETAG}", f'"other", {ETAG}', "*"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_known_blob_is_not_sent_again(api: Api, method: str, header: str) -> None:
    answer = api.client.request(method, PATH, headers={"If-None-Match": header, "Range": "bytes=0-1"})
    assert (answer.status_code, answer.content) == (304, b"")
    assert answer.headers["etag"] == ETAG


def test_another_etag_is_sent_the_blob(api: Api) -> None:
    assert api.client.get(PATH, headers={"If-None-Match": '"other"'}).content == DATA


@pytest.mark.parametrize(
    "header", ["bytes=0-0", "bytes=1024-", "bytes=5-2", "bytes=a-b", "rows=0-1", "bytes=0-1,4-5", "0-1"]
)
def test_a_range_is_ignored(api: Api, header: str) -> None:
    answer = api.client.get(PATH, headers={"Range": header})
    assert (answer.status_code, answer.content) == (200, DATA)


@pytest.mark.parametrize("headers", [{}, {"Range": "bytes=0-9"}])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_damaged_bytes_are_never_sent(api: Api, method: str, headers: dict[str, str]) -> None:
    path = api.blobs.path(DIGEST)
    assert path is not None
    path.chmod(0o600)
    path.write_bytes(DATA[:-1] + b"!")
    answer = api.client.request(method, PATH, headers=headers)
    assert answer.status_code == 500
    assert answer.headers["content-type"] == "application/problem+json"
    if method == "GET":
        assert answer.json()["type"] == "urn:cukiln:problem:blob-corrupt"


def test_a_lost_file_is_a_404(api: Api) -> None:
    path = api.blobs.path(DIGEST)
    assert path is not None
    path.unlink()
    assert api.client.get(PATH).json()["type"] == "urn:cukiln:problem:blob-not-found"


def test_without_if_none_match_all_is_sent() -> None:
    assert not none_match(None, ETAG)
