"""Errors from which a caller of the storage cannot continue.

```
OSError
└── BlobsAway         the object store does not answer, is full or read-only, or refuses

StorageError
├── LostLease         the attempt has no lease any more, or was cancelled: the transaction is rolled back
├── ImportWithdrawn   it was withdrawn while it was written
├── BlobMissing       no bytes are stored under the digest
├── BlobCorrupt       the stored bytes do not have their digest
├── BadCursor         a page cursor that this service did not make
├── SchemaMissing     the database was never migrated, or by another version
├── DatabaseUnusable  the database cannot be opened or migrated
├── BackupUnusable    a backup cannot be made, or restored, as asked
└── SettingsError     a setting that cannot be used
```
"""

from dataclasses import dataclass


class StorageError(Exception):
    """Base of all errors of this package. `text`: the message of one with fields."""

    text = ""

    def __str__(self) -> str:
        return self.text.format(**vars(self)) if self.text else super().__str__()


@dataclass
class LostLease(StorageError):
    """The task of `kind` and `ref` is no longer leased under `token`."""

    kind: str
    ref: str
    token: str
    text = "the {kind} task {ref} is no longer leased to attempt {token}; nothing was written"


@dataclass
class ImportWithdrawn(StorageError):
    """The import was withdrawn while it was written."""

    import_id: str
    text = "import {import_id} was withdrawn while it was written: send the results again to have them"


@dataclass
class BlobMissing(StorageError):
    """No bytes are stored under `digest`."""

    digest: str
    text = "no blob sha256:{digest} is stored"


@dataclass
class BlobCorrupt(StorageError):
    """The bytes stored under `digest` have the digest `found`."""

    digest: str
    found: str
    text = "blob sha256:{digest} is damaged: its bytes have digest {found}; it is not handed out"


@dataclass
class BadCursor(StorageError):
    """A page cursor that this service did not make."""

    cursor: str
    text = "cursor {cursor!r:.82} was not made by this list: take next_cursor of the page before"


@dataclass
class SchemaMissing(StorageError):
    """The database has schema revision `found`, this code needs `expected`."""

    found: str | None
    expected: str

    def __str__(self) -> str:
        found = self.found or "empty"
        return f"the database schema is {found}, {self.expected} is needed: `cukiln serve` migrates it"


@dataclass
class DatabaseUnusable(StorageError):
    """The database at `where` (without its password) cannot be opened or migrated because of `why`."""

    where: str
    why: str
    advice: str
    text = "the database {where} cannot be used ({why}): {advice}"


class BlobsAway(OSError):
    """The object store does not answer, is full or read-only, or refuses: no fault of the work."""


class BackupUnusable(StorageError):
    """The message says why, and what to do."""


class SettingsError(StorageError):
    """A setting that cannot be used; the message names the variable, the value's fault and what is allowed."""
