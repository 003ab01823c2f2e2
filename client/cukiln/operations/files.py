"""Winner records by key and files by digest, of the service or of the local cache."""

import hashlib
import time
from typing import TypeAlias

import httpx2

from cukiln.http.bodies import LARGEST_RECORD
from cukiln.http.transport import Call
from cukiln.local_cache import check_digest, verify
from cukiln.operations.answers import parse
from cukiln.operations.record_memory import cached_record, keep_record
from cukiln.operations.state import NO_ANSWER, ClientState
from cukiln.operations.steps import Operation, part
from cukiln.types import WinnerRecord

LEAST_BYTES_A_SECOND = 250_000.0  # of a library that a call waits for

_Changed: TypeAlias = tuple[WinnerRecord | None, str | None]


class FileOperations(ClientState):
    def _kernel(self, key: str) -> Operation[WinnerRecord]:
        """The winner record `key`, or the one whose key begins so. A record that has not changed is not sent again;
        where the service does not answer, it comes from the local cache. Raises `NotFound`."""
        path = f"/v1/kernels/{part(key, 'the key')}"
        request = hashlib.sha256(f"{self.url}{path}".encode()).hexdigest()
        answer = self.cache.answer(request)
        stored = None if answer is None else cached_record(self.cache, answer)
        headers = {"If-None-Match": answer.etag} if answer and stored and answer.etag else {}
        try:
            changed: _Changed
            changed = yield Call(
                "GET", path, headers=headers, seconds=self._lookup_budget, read=_changed_record,
                most_bytes=LARGEST_RECORD,
            )  # fmt: skip
        except NO_ANSWER:
            if stored is None:
                raise
            return stored
        record, etag = changed
        if record is None:
            assert stored is not None  # whose entity tag was sent
            return stored
        keep_record(self.cache, request, record, self.url, at=time.time(), etag=etag)
        return record

    def _blob(self, digest: str, kind: str = "so", *, patient: bool = True) -> Operation[bytes]:
        """The bytes with this SHA-256, from the local cache or the service.

        `kind` is the suffix of the cached file. Not `patient`: it stands in the way of a call that did not ask for it,
        so that the answer begins within the client's `lookup_budget`, and a megabyte of it takes 4 s at most. A cache
        that cannot be written is a warning. Raises `NotFound`, and `DigestMismatch` when other bytes came.
        """
        check_digest(digest)
        data = self.cache.get(digest, kind)
        if data is None:
            path = f"/v1/blobs/sha256/{digest}"
            seconds, rate = (self._transport.timeout, None) if patient else (self._lookup_budget, LEAST_BYTES_A_SECOND)
            headers = {"Accept": "*/*"}
            response = yield Call("GET", path, headers=headers, seconds=seconds, bytes_a_second=rate)
            data = verify(response.content, digest, f"the answer of {self.url}{path}")
            self.cache.keep(digest, data, kind)
        return data


def _changed_record(response: httpx2.Response) -> _Changed:
    """None where it has not changed; with its entity tag."""
    if response.status_code == httpx2.codes.NOT_MODIFIED and "If-None-Match" in response.request.headers:
        return None, None
    return parse(response, WinnerRecord), response.headers.get("ETag")
