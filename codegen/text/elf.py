"""Read sections and symbols of a 64-bit little-endian ELF file: a cubin, or a shared library. Pure Python, no tool
needed.

Source of the layouts: System V gABI, "ELF-64 Object File Format", tables 1 to 6.
"""

import struct
from dataclasses import dataclass

SHT_NOBITS = 8
STT_FUNC = 2
STB_LOCAL = 0
SHN_UNDEF, SHN_LORESERVE = 0, 0xFF00
STV_DEFAULT, STV_PROTECTED = 0, 3


class NotElf(ValueError):
    """The bytes are not a 64-bit little-endian ELF file, or it is cut off; the message says where."""


@dataclass(frozen=True)
class Section:
    name: str
    kind: int
    link: int
    data: bytes  # empty for SHT_NOBITS


@dataclass(frozen=True)
class Symbol:
    name: str
    binding: int
    kind: int
    other: int
    section: int


@dataclass(frozen=True)
class Elf:
    machine: int
    sections: tuple[Section, ...]

    def symbols(self, table: str) -> tuple[Symbol, ...]:
        """The symbols of `.symtab` or `.dynsym`, in file order; empty where the table is missing."""
        section = next((section for section in self.sections if section.name == table), None)
        if section is None:
            return ()
        if section.link >= len(self.sections):
            raise NotElf(f"{table} names string table {section.link}, there are {len(self.sections)} sections")
        names = self.sections[section.link].data
        entries = struct.iter_unpack("<IBBHQQ", section.data[: len(section.data) // 24 * 24])
        return tuple(
            Symbol(_string(names, name), info >> 4, info & 15, other, index)
            for name, info, other, index, _, _ in entries
        )


def read_elf(data: bytes) -> Elf:
    """Raises NotElf where the bytes are something else."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise NotElf(f"not a 64-bit little-endian ELF file: {len(data)} bytes that begin with {data[:6]!r}")
    machine = struct.unpack_from("<H", data, 18)[0]
    offset = struct.unpack_from("<Q", data, 40)[0]
    size, count, names_index = struct.unpack_from("<HHH", data, 58)
    if size != 64 or offset + size * count > len(data) or names_index >= max(count, 1):
        raise NotElf(f"section headers ({count} of {size} bytes at {offset}) do not fit into {len(data)} bytes")
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + size * i) for i in range(count)]
    bodies = [_body(data, kind, start, length) for _, kind, _, _, start, length, *_ in headers]
    sections = tuple(
        Section(_string(bodies[names_index], name), kind, link, body)
        for (name, kind, _, _, _, _, link, *_), body in zip(headers, bodies, strict=True)
    )
    return Elf(machine, sections)


def exported_symbols(library: bytes) -> frozenset[str]:
    """What a shared library offers to `dlsym`: defined, not local, of default or protected visibility."""
    return frozenset(
        symbol.name
        for symbol in read_elf(library).symbols(".dynsym")
        if symbol.binding != STB_LOCAL
        and SHN_UNDEF < symbol.section < SHN_LORESERVE
        and symbol.other & 3 in (STV_DEFAULT, STV_PROTECTED)
    )


def _body(data: bytes, kind: int, start: int, length: int) -> bytes:
    if kind == SHT_NOBITS:
        return b""
    if start + length > len(data):
        raise NotElf(f"a section of {length} bytes at {start} does not fit into {len(data)} bytes")
    return data[start : start + length]


def _string(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    if end < 0:
        raise NotElf(f"string {offset} is outside its table of {len(table)} bytes")
    return table[offset:end].decode("utf-8", "replace")
