"""How a bundle is packed, in parts, for a machine without a network."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cukiln.cli.server import server_module
from cukiln.counted import counted
from cukiln.errors import UsageError


@dataclass(frozen=True)
class Packing:
    """How a bundle is packed for another machine."""

    wheels: Path
    part_bytes: int

    def beside(self, target: str) -> tuple[str, dict[str, Any]]:
        """A file of the bundle's folder, and the request whose winner's library it is."""
        carry = server_module("workers.offline.carry")
        return carry.WORKSPACES_LIBRARY, carry.workspaces_request(target)

    def pack(self, bundle: Path) -> str:
        """A sentence about what is packed. Raises `UsageError`."""
        carry = server_module("workers.offline.carry")
        try:
            carried = carry.pack(bundle, bundle / "carried", wheels=self.wheels, part_bytes=self.part_bytes)
        except carry.NotCarried as error:
            raise UsageError(str(error)) from error
        files, wheels = counted(len(carried.files), "file"), counted(carried.wheels, "wheel")
        there = f"python3 {carry.SCRIPT} --budget 500"
        return f"{carried.folder}: {files}, {carried.bytes / 1e6:.1f} MB, {wheels}; there: {there}"


def packing(wheels: Path | None, part_bytes: str) -> Packing:
    """Looked at before anything is compiled. Raises `UsageError`."""
    carry = server_module("workers.offline.carry")
    chosen = Packing(wheels or carry.DEFAULT_WHEELS, size_of(part_bytes))
    try:
        carry.wheels_in(chosen.wheels)
    except carry.NotCarried as error:
        raise UsageError(str(error)) from error
    return chosen


def size_of(text: str) -> int:
    """Bytes of a size such as `16M`. Raises `UsageError`."""
    match = re.fullmatch(r"([1-9][0-9]{0,11})([KMG]?)", text)
    if match is None:
        raise UsageError(f"{text!r} is no size: give bytes, or a number with K, M or G, such as 16M")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[match[2]]
