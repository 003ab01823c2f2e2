"""Alembic's entry: runs on the connection that `Database.migrate` hands over."""

from alembic import context

from storage.database.tables import Base


def run() -> None:
    connection = context.config.attributes.get("connection")
    if connection is None:  # the alembic command line of a developer
        from storage.config.settings import load_settings
        from storage.database.session import Database

        connection = Database(load_settings().database_url).engine.connect()
    # SQLite cannot alter most of a table: batch mode copies it instead.
    context.configure(connection=connection, target_metadata=Base.metadata, render_as_batch=True)
    with context.begin_transaction():
        context.run_migrations()


run()
