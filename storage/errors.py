"""What callers of the storage cannot go on from.

```
StorageError
├── LostClaim         another worker holds the item now, or it was cancelled: the transaction is rolled back
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

from __future__ import annotations


class StorageError(Exception):
    """Base of all errors of this package."""


class LostClaim(StorageError):
    """The item of `kind` and `ref` is no longer held under `token`."""

    def __init__(self, kind: str, ref: str, token: str) -> None:
        super().__init__(kind, ref, token)
        self.kind, self.ref, self.token = kind, ref, token

    def __str__(self) -> str:
        return f"the {self.kind} item {self.ref} is no longer held by attempt {self.token}; nothing was written"


class ImportWithdrawn(StorageError):
    """The import was withdrawn while it was written."""

    def __init__(self, import_id: str) -> None:
        super().__init__(import_id)
        self.import_id = import_id

    def __str__(self) -> str:
        return f"import {self.import_id} was withdrawn while it was written: send the results again to have them"


class BlobMissing(StorageError):
    """No bytes are stored under `digest`."""

    def __init__(self, digest: str) -> None:
        super().__init__(digest)
        self.digest = digest

    def __str__(self) -> str:
        return f"no blob sha256:{self.digest} is stored"


class BlobCorrupt(StorageError):
    """The bytes stored under `digest` have the digest `found`."""

    def __init__(self, digest: str, found: str) -> None:
        super().__init__(digest, found)
        self.digest, self.found = digest, found

    def __str__(self) -> str:
        return f"blob sha256:{self.digest} is damaged: its bytes have digest {self.found}; it is not handed out"


class BadCursor(StorageError):
    """A page cursor that this service did not make."""

    def __init__(self, cursor: str) -> None:
        super().__init__(cursor)
        self.cursor = cursor

    def __str__(self) -> str:
        return f"cursor {self.cursor[:80]!r} was not made by this list: take next_cursor of the page before"


class SchemaMissing(StorageError):
    """The database has schema revision `found`, this code needs `expected`."""

    def __init__(self, found: str | None, expected: str) -> None:
        super().__init__(found, expected)
        self.found, self.expected = found, expected

    def __str__(self) -> str:
        found = self.found or "empty"
        return f"the database schema is {found}, {self.expected} is needed: `cukiln serve` migrates it"


class DatabaseUnusable(StorageError):
    """The database at `where` (without its password) cannot be opened or migrated because of `why`."""

    def __init__(self, where: str, why: str, advice: str) -> None:
        super().__init__(where, why, advice)
        self.where, self.why, self.advice = where, why, advice

    def __str__(self) -> str:
        return f"the database {self.where} cannot be used ({self.why}): {self.advice}"


class BackupUnusable(StorageError):
    """The message says why, and what to do."""


class SettingsError(StorageError):
    """A setting that cannot be used; the message names the variable, the value's fault and what is allowed."""
