"""The schema's revision, and how a database gets there. Alembic takes 0.2 s to import, so only a migration does."""

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table, insert, select, update

from storage.database.tables import Base

HEAD = "0014"
"""Of the tables of today: a change of them is a new revision (`storage.database.migrate`)."""

# As Alembic makes it.
_VERSION = Table(
    "alembic_version",
    MetaData(),
    Column("version_num", String(32), nullable=False),
    PrimaryKeyConstraint("version_num", name="alembic_version_pkc"),
)


class OtherRelease(Exception):
    """The database has a revision that this release does not know."""


def revision(connection: Connection) -> str | None:
    """Of the database's schema; None where it has none."""
    if not connection.dialect.has_table(connection, _VERSION.name):
        return None
    return connection.scalar(select(_VERSION.c.version_num))


def upgrade(connection: Connection) -> None:
    """Bring the schema to `HEAD`. Raises OtherRelease."""
    present = revision(connection)
    if present is None:
        Base.metadata.create_all(connection, checkfirst=False)
        _VERSION.create(connection, checkfirst=True)
        connection.execute(insert(_VERSION).values(version_num=HEAD))
    elif present != HEAD:
        from storage.database.migrate import OLDEST, migrate

        if not OLDEST <= present < HEAD:
            raise OtherRelease(f"its schema has revision {present!r}")
        migrate(connection, present)
        connection.execute(update(_VERSION).values(version_num=HEAD))
    connection.commit()
