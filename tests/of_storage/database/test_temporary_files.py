"""What the database needs beside its own folder."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.small_disk import is_possible, small_disk
from tests.support.fixtures.storage import write_migrated
from tests.support.run.places import ROOT

# More than SQLite keeps in memory of a statement that it may have to take back: that many rows of one statement, each
# with an index that it may violate.
WRITE = """
import sys
from pathlib import Path
from sqlalchemy import text
from storage.database.session import Database
database = Database(f"sqlite:///{sys.argv[1]}")
with database.write() as session:
    session.execute(text("CREATE TABLE rows (id INTEGER PRIMARY KEY, name TEXT UNIQUE, value TEXT)"))
    many = [{"name": str(number), "value": "x" * 2000} for number in range(500)]
    session.execute(text("INSERT INTO rows (name, value) VALUES (:name, :value)"), many)
with database.write() as session:
    session.execute(text("UPDATE rows SET name = name || '.', value = value || '.'"))
print("written")
"""


@pytest.mark.skipif(not is_possible(), reason="this user may mount nothing")
def test_a_full_folder_of_temporary_files_does_not_stop_the_database(tmp_path: Path) -> None:
    with small_disk(tmp_path / "temporary") as disk:
        assert disk is not None
        disk.fill()
        done = subprocess.run(
            disk.inside(sys.executable, "-c", WRITE, str(write_migrated(tmp_path / "own.db"))),
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(disk.folder)},
            capture_output=True,
            text=True,
        )
    assert (done.stdout, done.returncode) == ("written\n", 0), done.stderr[-2000:]
