"""All databases of a test process share what SQLAlchemy has compiled: compiling a statement takes ten times as long as
running it, and almost every test opens a database of its own."""

from __future__ import annotations

from functools import cache, partial
from typing import Any

from httpx._transports import default
from sqlalchemy import create_engine

from storage.database import session


class Statements(dict[Any, Any]):
    """SQLAlchemy's keys begin with the dialect of one engine, here with its name."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get((key[0].name, *key[1:]), default)

    def __setitem__(self, key: Any, compiled: Any) -> None:
        super().__setitem__((key[0].name, *key[1:]), compiled)


def share_certificates() -> None:
    """Of the certificate authorities: each client of httpx reads them in 20 ms, also where it asks over http."""
    default.create_ssl_context = cache(default.create_ssl_context)  # type: ignore[attr-defined]


def share_statements() -> None:
    session.create_engine = partial(create_engine, execution_options={"compiled_cache": Statements()})  # type: ignore[attr-defined]
