"""Blobs over HTTP: immutable, conditional, in parts, and checked before they are sent."""

from __future__ import annotations

import hashlib

import obstore
import pytest
from obstore.exceptions import GenericError

from service.http.answers import ByteRange, Unsatisfiable, byte_range, none_match
from tests.support.fixtures.api import Api

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
    assert answer.headers["accept-ranges"] == "bytes"


def test_head_says_what_get_would_without_the_bytes(api: Api) -> None:
    get, head = api.client.get(PATH), api.client.head(PATH)
    assert (head.status_code, head.content) == (200, b"")
    for name in ("etag", "content-length", "content-type", "cache-control", "accept-ranges"):
        assert head.headers[name] == get.headers[name]
    assert api.client.head(PATH, headers={"Range": "bytes=0-0"}).status_code == 200


@pytest.mark.parametrize("header", [ETAG, f"W/{ETAG}", f'"other", {ETAG}', "*"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_known_blob_is_not_sent_again(api: Api, method: str, header: str) -> None:
    answer = api.client.request(method, PATH, headers={"If-None-Match": header, "Range": "bytes=0-1"})
    assert (answer.status_code, answer.content) == (304, b"")
    assert answer.headers["etag"] == ETAG


def test_another_etag_is_sent_the_blob(api: Api) -> None:
    assert api.client.get(PATH, headers={"If-None-Match": '"other"'}).content == DATA


@pytest.mark.parametrize(
    ("header", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=10-19", 10, 19),
        ("bytes=1000-", 1000, 1023),
        ("bytes=-5", 1019, 1023),
        ("bytes=0-99999", 0, 1023),
        ("bytes=-99999", 0, 1023),
    ],
)
def test_a_range_is_sent_alone(api: Api, header: str, first: int, last: int) -> None:
    answer = api.client.get(PATH, headers={"Range": header})
    assert (answer.status_code, answer.content) == (206, DATA[first : last + 1])
    assert answer.headers["content-range"] == f"bytes {first}-{last}/1024"
    assert answer.headers["content-length"] == str(last - first + 1)
    assert answer.headers["etag"] == ETAG


@pytest.mark.parametrize("header", ["bytes=1024-", "bytes=5000-6000", "bytes=-0"])
def test_a_range_outside_is_a_416(api: Api, header: str) -> None:
    answer = api.client.get(PATH, headers={"Range": header})
    assert (answer.status_code, answer.json()["type"]) == (416, "urn:cukiln:problem:range-not-satisfiable")
    assert answer.headers["content-range"] == "bytes */1024"
    assert answer.json()["allowed"] == "bytes=0-1023"


@pytest.mark.parametrize("header", ["bytes=5-2", "bytes=a-b", "rows=0-1", "bytes=0-1,4-5", "bytes=-", "bytes=", "0-1"])
def test_a_range_that_cannot_be_read_is_ignored(api: Api, header: str) -> None:
    answer = api.client.get(PATH, headers={"Range": header})
    assert (answer.status_code, answer.content) == (200, DATA)


def test_if_range_of_another_version_sends_the_whole(api: Api) -> None:
    headers = {"Range": "bytes=0-1"}
    assert api.client.get(PATH, headers={**headers, "If-Range": ETAG}).status_code == 206
    assert api.client.get(PATH, headers={**headers, "If-Range": '"other"'}).status_code == 200
    assert api.client.get(PATH, headers={**headers, "If-Range": f"W/{ETAG}"}).status_code == 200


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


def test_a_store_that_does_not_answer_is_a_503_that_may_be_asked_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise GenericError("Generic S3 error: 503 Slow Down")

    with monkeypatch.context() as patch:
        patch.setattr(obstore, "get", away)
        answer = api.client.get(PATH)
    assert (answer.status_code, answer.json()["type"]) == (503, "urn:cukiln:problem:blobs-unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert api.client.get(PATH).content == DATA


def test_a_lost_file_is_a_404(api: Api) -> None:
    path = api.blobs.path(DIGEST)
    assert path is not None
    path.unlink()
    assert api.client.get(PATH).json()["type"] == "urn:cukiln:problem:blob-not-found"


def test_an_empty_blob_has_no_satisfiable_range() -> None:
    with pytest.raises(Unsatisfiable):
        byte_range("bytes=0-", None, ETAG, 0)
    with pytest.raises(Unsatisfiable):
        byte_range("bytes=-1", None, ETAG, 0)
    assert byte_range("bytes=-1", None, ETAG, 1) == ByteRange(0, 0)
    assert not none_match(None, ETAG)
