"""API keys: what each may do, kept as hashes. A key is `cukiln_<id>_<secret>`; its secret has 256 random bits, so one
SHA-256 is enough to keep it by: there is no dictionary to try."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection, Sequence
from typing import Literal, get_args

from sqlalchemy import insert, select, update

from storage.database.session import Session, clock_of
from storage.database.sql import core
from storage.database.tables import KeyRow

Scope = Literal["read", "submit", "import", "admin"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
INCLUDED: dict[Scope, frozenset[Scope]] = {
    "read": frozenset({"read"}),
    "submit": frozenset({"submit", "read"}),
    "import": frozenset({"import", "read"}),
    "admin": frozenset(SCOPES),
}
"""What a scope allows: each reads too, since the answers to what was sent are read."""

_TOKEN = re.compile(r"cukiln_([0-9a-f]{8})_([A-Za-z0-9_-]{43})")


Key = KeyRow


def opens(key: Key, secret: str) -> bool:
    """Whether the secret is this key's; the comparison takes the same time wherever they differ."""
    return key.revoked_at is None and hmac.compare_digest(_hash(secret), key.secret_hash)


def create_key(session: Session, name: str, scopes: Collection[Scope], *, overwrites: bool = False) -> str:
    """The new key as text, which is kept nowhere."""
    id, secret = secrets.token_hex(4), secrets.token_urlsafe(32)
    row = {
        "id": id,
        "name": name,
        "scopes": sorted(scopes, key=SCOPES.index),
        "overwrites": overwrites,
        "secret_hash": _hash(secret),
        "created_at": clock_of(session).now(),
    }
    session.execute(insert(core(KeyRow)).values(row))
    return f"cukiln_{id}_{secret}"


def all_keys(session: Session) -> Sequence[Key]:
    """Every key that was ever made, the oldest first; with those that were revoked."""
    return session.scalars(select(KeyRow).order_by(KeyRow.created_at, KeyRow.id)).all()


def revoke_key(session: Session, id: str) -> bool:
    """Whether there was such a key that was not revoked."""
    standing = (KeyRow.id == id) & KeyRow.revoked_at.is_(None)
    revoked = update(core(KeyRow)).where(standing).values(revoked_at=clock_of(session).now()).returning(KeyRow.id)
    return session.scalar(revoked) is not None


def parts_of(token: str) -> tuple[str, str] | None:
    """Id and secret of a key's text; None where it is none."""
    match = _TOKEN.fullmatch(token)
    return (match[1], match[2]) if match else None


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
