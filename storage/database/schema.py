"""The schema's revision, and how a database gets there. Alembic takes 0.2 s to import, so only an upgrade does."""

from pathlib import Path

from sqlalchemy import Column, Connection, MetaData, PrimaryKeyConstraint, String, Table, insert, select

from storage.database.tables import Base

MIGRATIONS = Path(__file__).parents[1] / "migrations"
HEAD = "0014"
"""The last of `storage/migrations/versions`."""

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
        _migrate(connection)
    connection.commit()


def _migrate(connection: Connection) -> None:
    from alembic import command
    from alembic.config import Config
    from alembic.util import CommandError

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS))
    config.attributes["connection"] = connection
    try:
        command.upgrade(config, "head")
    except CommandError as error:
        raise OtherRelease(str(error)) from error
