"""The one way values become bytes and digests: canonical JSON (RFC 8785) with labelled parts."""

import contextlib
import hashlib
import json
import math
from typing import Any

import rfc8785

from codegen.errors import CannotKey

# RFC 8785 section 3.2.2.3: numbers are IEEE doubles, so larger integers would lose digits silently.
LARGEST_INTEGER = 2**53 - 1


# Where no number is a float and all keys are ASCII, the standard library's encoder, which is C, writes RFC 8785.
_PLAIN = json.JSONEncoder(sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def as_integer(value: Any) -> Any:
    """JSON has one kind of number: 8.0 is 8. Anything else stays as it is; booleans and strings are no numbers."""
    if isinstance(value, float) and value.is_integer() and abs(value) <= LARGEST_INTEGER:
        return int(value)
    return value


def canonical_json(value: Any) -> bytes:
    """The RFC 8785 bytes of `value`: equal for equal content, whatever the key order or spelling of numbers.

    Raises CannotKey for what has no canonical form: NaN, infinities, integers beyond 2^53 - 1, sets, other types.
    """
    if _is_plain(value):
        with contextlib.suppress(UnicodeEncodeError):  # refused below
            return _PLAIN.encode(value).encode()
    _require_keyable(value, "$")
    return rfc8785.dumps(value)


def digest(kind: str, version: int, /, **parts: Any) -> str:
    """SHA-256 in hex over the schema (`kind`, `version`) and the labelled parts."""
    if not parts:
        raise CannotKey(f"a digest of kind {kind!r} needs at least one part")
    return hashlib.sha256(canonical_json({"kind": kind, "version": version, "parts": parts})).hexdigest()


def _is_plain(value: Any) -> bool:
    """Whether it is keyable, and _PLAIN writes its canonical form."""
    kind = type(value)
    if kind is str or kind is bool or value is None:
        return True
    if kind is int:
        return bool(abs(value) <= LARGEST_INTEGER)
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or not key.isascii() or not _is_plain(item):
                return False
        return True
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))
    return False


def _require_keyable(value: Any, path: str) -> None:
    kind = type(value)
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError:
            raise CannotKey(f"{path} holds a lone surrogate, which has no canonical form") from None
    elif kind is int:
        if abs(value) > LARGEST_INTEGER:
            raise CannotKey(f"{path} is {value}; integers up to {LARGEST_INTEGER} have a canonical form")
    elif kind is float:
        if not math.isfinite(value):
            raise CannotKey(f"{path} is {value}; only finite numbers have a canonical form")
    elif kind is dict:
        for key, item in value.items():
            if type(key) is not str:
                raise CannotKey(f"{path} has the key {key!r}; only strings can be keys")
            _require_keyable(item, f"{path}.{key}")
    elif kind in (list, tuple):
        for index, item in enumerate(value):
            _require_keyable(item, f"{path}[{index}]")
    elif value is not None and kind is not bool:
        raise CannotKey(f"{path} is a {kind.__name__}, which has no canonical form")
