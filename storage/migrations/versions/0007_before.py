"""The oldest schema that is migrated. It is never made: `Database.migrate` gives a new database the tables of today."""

revision = "0007"
down_revision = None


def upgrade() -> None:
    raise AssertionError("a new database has the tables of today at once")
