"""Whether a group's library is one of ours, read from its file, by the loader's own way through the program headers:
none of its code runs before this check (docs/decisions/0015-a-library-is-read-before-it-is-loaded.md).

The lists are what libraries of this project have, built by g++ with LINK_FLAGS of `workers.compile.toolchain` (no start
files, so no initialiser at all), on x86-64 and aarch64, with the additions of distributions that fortify by default.
System V gABI, "Program Loading and Dynamic Linking"; https://flapenguin.me/elf-dt-gnu-hash for the hash table.
"""

import re
import struct
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from codegen.text.cubin import NotElf, require_elf, string_at

NEEDED = frozenset(
    {
        "libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1",
    }
)  # fmt: skip
IMPORTS = frozenset(
    {
        "dlopen", "dlsym", "dlclose", "dlerror", "pthread_mutex_lock", "pthread_mutex_unlock", "snprintf", "vsnprintf",
        "memcpy", "memset", "memmove", "strlen", "__tls_get_addr",
        # _FORTIFY_SOURCE and -fstack-protector
        "__snprintf_chk", "__vsnprintf_chk", "__memcpy_chk", "__memset_chk", "__memmove_chk", "__stack_chk_fail",
        "__stack_chk_guard",
    }
)  # fmt: skip
COMMON_EXPORTS = frozenset({"cukiln_prepare", "cukiln_last_error"})
_ENTRY = re.compile(r"cukiln_(?:launch|workspace_bytes)_[0-9a-f]{16}")

_PT_LOAD, _PT_DYNAMIC = 1, 2
_PF_X, _PF_W = 1, 2
_STB_LOCAL, _STT_GNU_IFUNC, _SHN_UNDEF = 0, 10, 0
_DT_NEEDED, _DT_HASH, _DT_STRTAB, _DT_SYMTAB, _DT_RELA, _DT_RELASZ, _DT_STRSZ = 1, 4, 5, 6, 7, 8, 10
_DT_PLTRELSZ, _DT_JMPREL, _DT_GNU_HASH = 2, 23, 0x6FFFFEF5
# By tag: what a library of ours may have. Not there: INIT, FINI, their arrays, RPATH, RUNPATH, AUDIT, FILTER, TEXTREL.
_TAGS = {
    0: "NULL", 1: "NEEDED", 2: "PLTRELSZ", 3: "PLTGOT", 4: "HASH", 5: "STRTAB", 6: "SYMTAB", 7: "RELA", 8: "RELASZ",
    9: "RELAENT", 10: "STRSZ", 11: "SYMENT", 20: "PLTREL", 23: "JMPREL", 24: "BIND_NOW", 30: "FLAGS",
    0x6FFFFFFB: "FLAGS_1", 0x6FFFFFF9: "RELACOUNT", 0x6FFFFFFE: "VERNEED", 0x6FFFFFFF: "VERNEEDNUM",
    0x6FFFFFF0: "VERSYM", 0x6FFFFEF5: "GNU_HASH", 0x6FFFFEF6: "TLSDESC_PLT", 0x6FFFFEF7: "TLSDESC_GOT",
    # -z pack-relative-relocs, the default of some distributions: where the loader adds the library's address to a word.
    # It holds places alone, so there is no symbol in it and nothing is called.
    35: "RELRSZ", 36: "RELR", 37: "RELRENT",
}  # fmt: skip
# By machine, further ones. x86-64, -z mark-plt: where the procedure linkage table is, for loaders that are asked by
# GLIBC_TUNABLES (no child of ours is) to turn its jumps, to functions that are imported anyway, into direct ones.
_TAGS_OF_MACHINE = {62: {0x70000000: "X86_64_PLT", 0x70000001: "X86_64_PLTSZ", 0x70000003: "X86_64_PLTENT"}}
_FORBIDDEN = {
    12: "an initialiser (DT_INIT)", 13: "a finaliser (DT_FINI)", 25: "a constructor (DT_INIT_ARRAY)",
    26: "a destructor (DT_FINI_ARRAY)", 32: "a constructor (DT_PREINIT_ARRAY)", 15: "a search path (DT_RPATH)",
    29: "a search path (DT_RUNPATH)",
}  # fmt: skip
# By machine: relocations for which the loader calls a function of the library.
_CALLING = {62: 37, 183: 1032}  # EM_X86_64: R_X86_64_IRELATIVE, EM_AARCH64: R_AARCH64_IRELATIVE


@dataclass(frozen=True)
class _Symbol:
    name: str
    binding: int
    kind: int
    defined: bool


def refusal(library: bytes, kernels: Collection[str]) -> str | None:
    """Why the library must not be loaded; None where it may. `kernels`: ids of kernels that it must hold."""
    try:
        return _refusal(_Image(library), kernels)
    except (ValueError, OverflowError, struct.error) as error:  # NotElf is a ValueError
        return f"this is no library that can be read: {error}"


def _refusal(image: "_Image", kernels: Collection[str]) -> str | None:
    for tag, _ in image.dynamic:
        if tag not in _TAGS and tag not in _TAGS_OF_MACHINE.get(image.machine, {}):
            return f"it has {_FORBIDDEN.get(tag, f'a dynamic entry {tag:#x}')}, which no library of ours has"
    for name in image.needed():
        if name not in NEEDED:
            return f"it needs the library {name}; no library of ours does"
    symbols = image.symbols()
    for symbol in symbols:
        # What is weak and not found stays 0; a call of it crashes. It is still not ours where it might be found.
        if not symbol.defined and symbol.name and symbol.name not in IMPORTS:
            return f"it imports {symbol.name}, which no library of ours does"
        if symbol.kind == _STT_GNU_IFUNC:
            return f"{symbol.name or 'a function'} is chosen by code that runs at loading (IFUNC)"
    if image.calls_while_loading(len(symbols)):
        return "it has code that runs at loading (an indirect relocation)"
    exports = {symbol.name for symbol in symbols if symbol.defined and symbol.binding != _STB_LOCAL}
    expected = {f"cukiln_{what}_{kernel[:16]}" for kernel in kernels for what in ("launch", "workspace_bytes")}
    for name in sorted((expected | COMMON_EXPORTS) - exports):
        return f"it does not export {name}"
    for name in sorted(exports - expected - COMMON_EXPORTS):
        if not _ENTRY.fullmatch(name):
            return f"it exports {name}, which no library of ours does"
    return None


class _Image:
    """A shared library as the loader sees it."""

    def __init__(self, data: bytes) -> None:
        require_elf(data)
        kind, self.machine = struct.unpack_from("<HH", data, 16)
        start = struct.unpack_from("<Q", data, 32)[0]
        size, count = struct.unpack_from("<HH", data, 54)
        if kind != 3 or size != 56 or self.machine not in _CALLING:
            raise NotElf(f"type {kind}, machine {self.machine}: not a shared library of x86-64 or aarch64")
        self._data = data
        # type, flags, offset, address, physical address, bytes in the file, bytes in memory, alignment
        headers = [struct.unpack_from("<IIQQQQQQ", data, start + size * i) for i in range(count)]
        self._segments = [header for header in headers if header[0] == _PT_LOAD]
        if any(header[1] & _PF_X and header[1] & _PF_W for header in self._segments):
            raise NotElf("a segment that can be written and executed")
        (dynamic,) = [header for header in headers if header[0] == _PT_DYNAMIC]
        self.dynamic = self._entries(self._at(dynamic[3], dynamic[5]))
        self._values = dict(self.dynamic)
        if len(self._values) + len(self.needed()) != len(self.dynamic) + bool(self.needed()):
            raise NotElf("a dynamic entry that stands there twice")

    @staticmethod
    def _entries(data: bytes) -> list[tuple[int, int]]:
        entries: list[tuple[int, int]] = []
        for tag, value in struct.iter_unpack("<QQ", data[: len(data) // 16 * 16]):
            if tag == 0:
                return entries
            entries.append((tag, value))
        raise NotElf("the dynamic section has no end")

    def needed(self) -> list[str]:
        return [self._name(value) for tag, value in self.dynamic if tag == _DT_NEEDED]

    def symbols(self) -> list[_Symbol]:
        table = self._at(self._value(_DT_SYMTAB), 24 * self._symbol_count())
        return [
            _Symbol(self._name(name), info >> 4, info & 15, section != _SHN_UNDEF)
            for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", table)
        ]

    def calls_while_loading(self, symbols: int) -> bool:
        """Raises NotElf where a relocation names a symbol beyond those that were looked at."""
        for info in self._relocations():
            if info >> 32 >= max(1, symbols):
                raise NotElf(f"a relocation of symbol {info >> 32}; there are {symbols}")
            if info & 0xFFFFFFFF == _CALLING[self.machine]:
                return True
        return False

    def _relocations(self) -> Iterator[int]:
        for start, size in ((_DT_RELA, _DT_RELASZ), (_DT_JMPREL, _DT_PLTRELSZ)):
            if start in self._values:
                for _, info, _ in struct.iter_unpack("<QQq", self._at(self._values[start], self._value(size))):
                    yield info

    def _symbol_count(self) -> int:
        """From the hash table, as there is no other count. What it leaves out, `dlsym` does not find either."""
        if _DT_HASH in self._values:
            return int(struct.unpack("<II", self._at(self._values[_DT_HASH], 8))[1])
        table = self._value(_DT_GNU_HASH)
        buckets, first, bloom, _ = struct.unpack("<IIII", self._at(table, 16))
        start = table + 16 + 8 * bloom
        last = max(struct.unpack(f"<{buckets}I", self._at(start, 4 * buckets)), default=0)
        if last < first:
            return int(first)
        chains = start + 4 * buckets
        while not struct.unpack("<I", self._at(chains + 4 * (last - first), 4))[0] & 1:
            last += 1
        return int(last) + 1

    def _value(self, tag: int) -> int:
        if tag not in self._values:
            raise NotElf(f"no dynamic entry {_TAGS[tag]}")
        return self._values[tag]

    def _name(self, offset: int) -> str:
        return string_at(self._at(self._value(_DT_STRTAB), self._value(_DT_STRSZ)), offset)

    def _at(self, address: int, size: int) -> bytes:
        """Bytes of the file by their address once loaded."""
        for _, _, offset, begin, _, in_file, _, _ in self._segments:
            if begin <= address and address + size <= begin + in_file:
                data = self._data[offset + address - begin : offset + address - begin + size]
                if len(data) == size:
                    return data
        raise NotElf(f"{size} bytes at address {address:#x} are not in the file")
