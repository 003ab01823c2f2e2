"""Libraries of groups, out of the blobs into a folder where a process can load them; what nobody can fetch any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from storage.blobs import BlobStore
from storage.errors import BlobCorrupt, BlobMissing


@dataclass
class Libraries:
    """Files by blob digest; `lost`: why a digest has none."""

    paths: dict[str, Path] = field(default_factory=dict)
    lost: dict[str, str] = field(default_factory=dict)


def fetch_libraries(blobs: BlobStore, digests: Iterable[str], folder: Path) -> Libraries:
    """Write each library into the folder, checked against its digest. Raises what the store raises where it is away."""
    found = Libraries()
    for digest in dict.fromkeys(digests):
        try:
            data = blobs.get(digest)
        except (BlobMissing, BlobCorrupt) as error:
            found.lost[digest] = str(error)
            continue
        path = folder / f"{digest}.so"
        path.write_bytes(data)
        path.chmod(0o500)
        found.paths[digest] = path
    return found
