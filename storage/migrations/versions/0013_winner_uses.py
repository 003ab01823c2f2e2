"""What winner records name: the digests of their files and of their code, each found by an index."""

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"

_FIELDS = ("so_sha256", "cubin_sha256", "source_sha256", "ptx_sha256", "sass_sha256", "code_digest")
_AT_ONCE = 500


def upgrade() -> None:
    uses = op.create_table(
        "winner_uses",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.PrimaryKeyConstraint("digest", "key", name=op.f("pk_winner_uses")),
    )
    op.create_index(op.f("ix_winner_uses_key"), "winner_uses", ["key"], unique=False)
    _fill(uses)


def _fill(uses: sa.Table) -> None:
    """A part at a time: records are large."""
    last = ""
    page = sa.text("SELECT key, CAST(record AS TEXT) FROM winners WHERE key > :last ORDER BY key LIMIT :most")
    while rows := op.get_bind().execute(page, {"last": last, "most": _AT_ONCE}).all():
        last = rows[-1][0]
        new = [{"digest": digest, "key": key} for key, record in rows for digest in _named(json.loads(record))]
        if new:
            op.get_bind().execute(sa.insert(uses), new)


def _named(record: dict[str, Any]) -> set[str]:
    return {entry[name] for entry in record.get("front", []) for name in _FIELDS if entry.get(name)}
