"""Read a cubin: the kernels it holds and the digest of each kernel's code.

A code digest is SHA-256 over the kernel's own sections: `.text`, `.nv.constant<bank>` and `.nv.info`. Equal code must
give an equal digest alone and in a group, in any order and under any namespace, so two things are left out, and only
these:

- the kernel's name, which is part of each section's name;
- in `.nv.info`, the symbol-table index inside EIATTR_PARAM_CBANK (attribute 0x0a, first four bytes): it names the
  kernel's own constant bank, whose place depends on what else is in the file. nvcc 13.2;
  `tests/of_codegen/text/test_cubin.py` compares kernels alone and in groups.

Where the file has constants or initialised variables that belong to no kernel (none of our kernels makes any), the text
reaches them through a shared bank and does not say which it means: then they all go into every digest of the file. Such
a kernel is not recognised in another group, but never taken for another one either.

Sections and symbols are read as the System V gABI has them, "ELF-64 Object File Format", tables 1 to 6.
"""

import hashlib
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from codegen.canonical import digest

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
            Symbol(string_at(names, name), info >> 4, info & 15, other, index)
            for name, info, other, index, _, _ in entries
        )


def require_elf(data: bytes) -> None:
    """Raises NotElf where its head is not that of a 64-bit little-endian ELF file."""
    if data[:6] != b"\x7fELF\x02\x01" or len(data) < 64:
        raise NotElf(f"not a 64-bit little-endian ELF file: {len(data)} bytes that begin with {data[:6]!r}")


def read_elf(data: bytes) -> Elf:
    """Raises NotElf where the bytes are something else."""
    require_elf(data)
    machine = struct.unpack_from("<H", data, 18)[0]
    offset = struct.unpack_from("<Q", data, 40)[0]
    size, count, names_index = struct.unpack_from("<HHH", data, 58)
    if size != 64 or offset + size * count > len(data) or names_index >= max(count, 1):
        raise NotElf(f"section headers ({count} of {size} bytes at {offset}) do not fit into {len(data)} bytes")
    headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + size * i) for i in range(count)]
    bodies = [_body(data, kind, start, length) for _, kind, _, _, start, length, *_ in headers]
    sections = tuple(
        Section(string_at(bodies[names_index], name), kind, link, body)
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


def string_at(table: bytes, offset: int) -> str:
    """Raises NotElf."""
    end = table.find(b"\0", offset)
    if end < 0:
        raise NotElf(f"string {offset} is outside its table of {len(table)} bytes")
    return table[offset:end].decode("utf-8", "replace")


EM_CUDA = 190
STO_CUDA_ENTRY = 0x10  # in st_other of a __global__ function
CODE_DIGEST_VERSION = 1
_FORMAT_SIZED = 0x04  # EIFMT_SVAL: 16-bit length, then the value
_PARAM_CBANK = 0x0A  # EIATTR_PARAM_CBANK: symbol index (4 bytes), offset (2), size (2)
_CONSTANT = re.compile(r"\.nv\.constant\d+")
_CONSTANT_RELOCATIONS = re.compile(r"\.rela\.nv\.constant\d+")


@dataclass(frozen=True)
class Cubin:
    """`kernels`: mangled name -> code digest (64 hex)."""

    kernels: dict[str, str]

    @property
    def symbols(self) -> frozenset[str]:
        return frozenset(self.kernels)


def read_cubin(data: bytes) -> Cubin:
    """Raises NotElf where the bytes are no cubin or a kernel lacks its sections."""
    elf = read_elf(data)
    if elf.machine != EM_CUDA:
        raise NotElf(f"an ELF file for machine {elf.machine}, not a cubin (machine {EM_CUDA})")
    entries = [
        symbol.name
        for symbol in elf.symbols(".symtab")
        if symbol.kind == STT_FUNC and symbol.binding != STB_LOCAL and symbol.other & STO_CUDA_ENTRY
    ]
    return Cubin({name: _code_digest(elf, name) for name in entries})


def code_digest_of(digests: Sequence[str]) -> str:
    """A kernel's code digest from its functions', in launch order: its own where there is one function."""
    if len(digests) == 1:
        return digests[0]
    return digest("code", 1, functions=list(digests))


def _code_digest(elf: Elf, kernel: str) -> str:
    parts = _shared_parts(elf, kernel)
    for section in elf.sections:
        if not section.name.endswith("." + kernel):
            continue
        kind = section.name[: -len(kernel) - 1]
        if kind == ".text" or _CONSTANT.fullmatch(kind):
            parts[kind] = section.data
        elif kind == ".nv.info":
            parts[kind] = _without_symbol_index(section.data)
    for needed in (".text", ".nv.info"):
        if needed not in parts:
            raise NotElf(f"kernel {kernel} has no section {needed}.{kernel}")
    state = hashlib.sha256(f"cukiln code {CODE_DIGEST_VERSION}".encode())
    for kind in sorted(parts):
        state.update(f"\0{kind}\0{len(parts[kind])}\0".encode())
        state.update(parts[kind])
    return state.hexdigest()


def _shared_parts(elf: Elf, kernel: str) -> dict[str, bytes]:
    """What belongs to the whole file, under names that no section of a kernel has."""
    parts: dict[str, bytes] = {}
    for section in elf.sections:
        if _CONSTANT.fullmatch(section.name) or section.name == ".nv.global.init":
            parts[f"shared {section.name}"] = section.data
        elif _CONSTANT_RELOCATIONS.fullmatch(section.name):
            parts[f"shared {section.name}"] = _relocations_by_name(elf, section.data, kernel)
    return parts


def _without_symbol_index(info: bytes) -> bytes:
    """`info` with the index inside EIATTR_PARAM_CBANK zeroed. Entries are format (1 byte), attribute (1), value (2),
    and for sized formats that many bytes more."""
    out = bytearray(info)
    place = 0
    while place + 4 <= len(out):
        form, attribute, value = struct.unpack_from("<BBH", out, place)
        place += 4
        if form == _FORMAT_SIZED:
            if attribute == _PARAM_CBANK and value >= 4:
                out[place : place + 4] = bytes(4)
            place += value
    return bytes(out)


def _relocations_by_name(elf: Elf, data: bytes, kernel: str) -> bytes:
    symbols = elf.symbols(".symtab")
    lines = []
    for offset, info, addend in struct.iter_unpack("<QQq", data[: len(data) // 24 * 24]):
        name = symbols[info >> 32].name.replace(kernel, "")
        lines.append(f"{offset} {info & 0xFFFFFFFF} {name} {addend}\n")
    return "".join(lines).encode()
