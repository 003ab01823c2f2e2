"""Wrong PTX by rule: one instruction changed, dropped, or given operands of another."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from codegen.kernel import Kernel
from codegen.targets import target as sheet_of
from codegen.text.render_group import symbols
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain
from workers.cpu.ptx import PtxBuilder, PtxRequest, verify_ptx
from workers.cpu.verify import CpuVerdict

TARGET = "sm_80"


@cache
def ptx_of(kernels: tuple[Kernel, ...], target: str = TARGET) -> str:
    """What nvcc makes of them, once for a test process."""
    with processes().private_folder("ptx") as folder:
        return PtxBuilder(folder, toolchain(), processes(), LIMITS).ptx_of(kernels, target)


def verdict_of(kernel: Kernel, ptx: str, target: str = TARGET, cpu_seconds: float = 5.0) -> CpuVerdict:
    (verdict,) = verdicts_of([kernel], ptx, target, cpu_seconds)
    return verdict


def verdicts_of(
    kernels: Sequence[Kernel], ptx: str, target: str = TARGET, cpu_seconds: float = 5.0
) -> list[CpuVerdict]:
    """`cpu_seconds`: what a loop that never ends is given."""
    request = PtxRequest(target, 1, sheet_of(target).tensor_sums, cpu_seconds=cpu_seconds)
    return verify_ptx(kernels, request, toolchain(), processes(), LIMITS, ptx=ptx)


@dataclass(frozen=True)
class Mutant:
    """`line` of the PTX, as it was and as it is."""

    rule: str
    line: int
    before: str
    after: str

    def of(self, ptx: str) -> str:
        lines = ptx.split("\n")
        assert lines[self.line - 1] == self.before
        lines[self.line - 1] = self.after
        return "\n".join(lines)


def _number(change: int) -> Callable[[re.Match[str]], str]:
    return lambda match: f"{match[1]}{int(match[2]) + change}{match[3]}"


def _swapped(first: int, second: int) -> Callable[[re.Match[str]], str]:
    """The groups of a match in other places."""

    def swap(match: re.Match[str]) -> str:
        parts = list(match.groups())
        parts[first - 1], parts[second - 1] = parts[second - 1], parts[first - 1]
        return "".join(parts)

    return swap


def _renamed(**words: str) -> Callable[[re.Match[str]], str]:
    return lambda match: f"{match[1]}{words[match[2]]}{match[3]}"


def _dropped(match: re.Match[str]) -> str:
    return ""


_OTHER = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
_REG = r"%\w+"
# By name: what it matches of a whole line, and what becomes of that.
RULES: dict[str, tuple[re.Pattern[str], Callable[[re.Match[str]], str]]] = {
    "no barrier": (re.compile(r"\s*bar\.sync\s.*"), _dropped),
    "no wait": (re.compile(r"\s*cp\.async\.wait_group .*"), _dropped),
    "no commit": (re.compile(r"\s*cp\.async\.commit_group;"), _dropped),
    "no store": (re.compile(r"\s*st\..*"), _dropped),
    "no zeros": (re.compile(r"(\s*cp\.async\.\w+\.shared\.global .*, \d+), %r\d+;"), lambda match: f"{match[1]};"),
    "transposed": (
        re.compile(r"(.*ldmatrix.*\.x4)(\.trans)?(\.shared.*)"),
        lambda match: f"{match[1]}{'' if match[2] else '.trans'}{match[3]}",
    ),
    "matrices swapped": (re.compile(rf"(\s*ldmatrix.*?\{{)({_REG})(, )({_REG})(.*)"), _swapped(2, 4)),
    "rows of a swapped": (re.compile(rf"(\s*mma\.sync.*?\}}, \{{)({_REG})(, )({_REG})(.*)"), _swapped(2, 4)),
    "no product": (re.compile(r"\s*mma\.sync.*"), _dropped),
    "another lane": (re.compile(r"(\s*shfl\.sync.*, )(\d+)(, \d+, -\d+;)"), lambda m: f"{m[1]}{int(m[2]) ^ 3}{m[3]}"),
    "another comparison": (
        re.compile(r"(\s*setp\.)(lt|le|gt|ge|eq|ne)(\..*)"), lambda match: f"{match[1]}{_OTHER[match[2]]}{match[3]}"
    ),
    "another shift": (re.compile(r"(\s*sh[lr]\.\w+\s.*, )(\d+)(;)"), _number(1)),
    "another mask": (re.compile(r"(\s*and\.b\d+\s.*, )(\d+)(;)"), _number(-1)),
    "another addend": (re.compile(r"(\s*add\.s\d+\s.*, )(-?\d+)(;)"), _number(1)),
    "another factor": (re.compile(r"(\s*mul\.(?:lo|wide)\.\w+\s.*, )(\d+)(;)"), _number(1)),
    "another selector": (re.compile(r"(\s*prmt\.b32\s.*, )(\d+)(;)"), _number(1)),
    "another place of a load": (re.compile(r"(\s*ld\.(?:shared|global|param).*\+)(-?\d+)(\];)"), _number(4)),
    "another place of a store": (re.compile(r"(\s*st\.(?:shared|global).*\+)(-?\d+)(\].*)"), _number(16)),
    "or for xor": (
        re.compile(r"(\s*)(xor|or|and)(\.(?:b\d+|pred)\s.*)"), _renamed(xor="or", **{"or": "and", "and": "or"})
    ),
    "max for min": (re.compile(r"(\s*)(min|max)(\..*)"), _renamed(min="max", max="min")),
    "the other one": (re.compile(rf"(\s*selp\.\w+\s+{_REG}, )([^,]+)(, )([^,]+)(, .*)"), _swapped(2, 4)),
    "terms swapped": (re.compile(rf"(\s*sub\.\w+\s+{_REG}, )([^,]+)(, )([^;]+)(;)"), _swapped(2, 4)),
    "factor for addend": (re.compile(rf"(\s*fma\.\w+\.f32\s+{_REG}, )([^,]+)(, [^,]+, )([^;]+)(;)"), _swapped(2, 4)),
    "sum for product": (re.compile(r"(\s*)(mul)((?:\.rn)?\.f32\s.*)"), _renamed(mul="add")),
    "difference for sum": (re.compile(r"(\s*)(add)((?:\.rn)?\.(?:f32|s32|s64)\s.*)"), _renamed(add="sub")),
    "halves swapped": (re.compile(rf"(\s*cvt\.rn\.b?f16x2\.f32\s+{_REG}, )({_REG})(, )({_REG})(;)"), _swapped(2, 4)),
    "no sign": (re.compile(r"(\s*)(neg)(\.f32\s.*)"), _renamed(neg="abs")),
}  # fmt: skip


def mutants_of(kernel: Kernel, ptx: str) -> Iterator[Mutant]:
    """All that the rules make of the kernel's entries."""
    wanted, inside = set(symbols(kernel)), False
    for number, line in enumerate(ptx.split("\n"), 1):
        if ".entry" in line:
            inside = any(symbol in line for symbol in wanted)
        if not inside:
            continue
        for name, (pattern, change) in RULES.items():
            guard, statement = re.fullmatch(r"(\s*(?:@!?%p\d+ )?)(.*)", line).groups()  # type: ignore[union-attr]
            if match := pattern.fullmatch(statement):
                changed = change(match)
                if changed != statement:
                    yield Mutant(name, number, line, f"{guard}{changed}" if changed else "")


def sample(mutants: Sequence[Mutant], count: int, seed: int) -> list[Mutant]:
    """As many of each rule as of another, as far as there are so many."""
    rng = random.Random(seed)
    by_rule: dict[str, list[Mutant]] = {}
    for mutant in mutants:
        by_rule.setdefault(mutant.rule, []).append(mutant)
    for own in by_rule.values():
        rng.shuffle(own)
    rounds = max(map(len, by_rule.values()), default=0)
    return [own[turn] for turn in range(rounds) for own in by_rule.values() if turn < len(own)][:count]
