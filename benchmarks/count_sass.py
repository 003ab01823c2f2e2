"""Instructions of attention's main loop, read from the SASS of the best predicted schedules: nothing is run.

The main loop is the one with the most tensor-core instructions (HMMA); its body computes one tile of keys. What a
branch of it alone reaches and masks scores (`mask`: between BSSY and BSYNC, with neither products nor copies) runs for
tiles with keys that some query does not see, and is counted apart. Counted once are instructions of a warp, wherever a
predicate may switch them off.

The last line is one JSON object. `other_per_hmma` is what a warp issues beside each product in a tile without a mask,
`predicted_other_per_hmma` what `codegen/operators/attention/work.py` takes for it.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from benchmarks.predict_attention import HEAD_DIMS, TARGETS, best, fields_of
from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.operators.attention.work import MMA_MACS
from codegen.search.schedule import Schedule
from codegen.targets import target
from workers.compile.toolchain import Toolchain, find_toolchain
from workers.processes.processes import Limits, Processes
from workers.steps.winner_library import build_winner

LIMITS = Limits(wall_seconds=120, cpu_seconds=120, memory_bytes=4 << 30, output_bytes=1 << 28)
LENGTH = 4096
PRODUCT, COPY = "HMMA", "LDGSTS"
_LABEL = re.compile(r"^(\.L\w+):")
_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]*)([^;]*);")
_TARGET_LABEL = re.compile(r"`\((\.L\w+)\)")


@dataclass(frozen=True)
class Instruction:
    """`name` without its modifiers; `label`: where a branch leads, or none."""

    name: str
    label: str | None


@dataclass(frozen=True)
class Loop:
    """Instructions of one pass by name, without those of the mask, and those."""

    body: Counter[str]
    mask: Counter[str]

    @property
    def products(self) -> int:
        return self.body[PRODUCT]

    @property
    def other_per_product(self) -> float:
        return (self.body.total() - self.products) / self.products


def read(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions in order, and for each label how many stand before it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line.strip()):
            labels[label[1]] = len(instructions)
        elif instruction := _INSTRUCTION.search(line):
            leads_to = _TARGET_LABEL.search(instruction[2])
            instructions.append(Instruction(instruction[1].partition(".")[0], leads_to[1] if leads_to else None))
    return instructions, labels


def main_loop(sass: str) -> Loop:
    """Raises ValueError where no loop has products."""
    instructions, labels = read(sass)
    bodies = [
        instructions[labels[instruction.label] : number + 1]
        for number, instruction in enumerate(instructions)
        if instruction.name == "BRA" and instruction.label is not None and labels[instruction.label] <= number
    ]
    body = max(bodies, key=lambda part: Counter(i.name for i in part)[PRODUCT], default=[])
    names = [instruction.name for instruction in body]
    if PRODUCT not in names:
        raise ValueError(f"no loop of this SASS has {PRODUCT}")
    mask = [name for first, end in _branches(names) for name in names[first:end]]
    return Loop(Counter(names) - Counter(mask), Counter(mask))


def _branches(names: Sequence[str]) -> list[tuple[int, int]]:
    """What lies between the branch behind each BSSY and its BSYNC, where it neither multiplies nor copies."""
    branches = []
    for start, name in enumerate(names):
        if name == "BSSY" and "BSYNC" in names[start:] and "BRA" in names[start:]:
            first, end = names.index("BRA", start) + 1, names.index("BSYNC", start)
            if first < end and not {PRODUCT, COPY} & set(names[first:end]):
                branches.append((first, end))
    return branches


def candidate_of(arch: str, head_dim: int) -> Candidate:
    """The best predicted of a problem without a mask."""
    fields = fields_of(head_dim, False, LENGTH)
    own = operator("attention")
    return own.candidate(own.parse(fields), Schedule.of(best(arch, head_dim, False, LENGTH).schedule))


def predicted_other(candidate: Candidate, arch: str) -> float:
    """Instructions of a warp for each product, without it, as the roofline takes them."""
    work = operator("attention").work(candidate.problem, candidate.schedule, target(arch))
    return work.other_instructions / (32.0 * work.mma / MMA_MACS) - 1.0


def counted(arch: str, head_dim: int, toolchain: Toolchain, processes: Processes) -> dict[str, Any]:
    """Raises SystemExit where no disassembler is found."""
    candidate = candidate_of(arch, head_dim)
    build = build_winner(candidate, target(arch), toolchain, processes, LIMITS)
    if build.sass is None:
        raise SystemExit("neither nvdisasm nor cuobjdump is found beside nvcc or in PATH")
    loop = main_loop(build.sass.decode())
    return {
        "target": arch,
        "head_dim": head_dim,
        "schedule": candidate.schedule.as_dict(),
        "registers": build.resources.registers,
        "spilled_bytes": build.resources.spill_bytes,
        "hmma": loop.products,
        "other_per_hmma": round(loop.other_per_product, 2),
        "predicted_other_per_hmma": round(predicted_other(candidate, arch), 2),
        "mask_per_hmma": round(loop.mask.total() / loop.products, 2),
        "instructions": dict(loop.body.most_common()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--targets", nargs="*", default=TARGETS, help=f"default: {' '.join(TARGETS)}")
    arguments = parser.parse_args()
    with closing(Processes()) as processes:
        toolchain = find_toolchain(processes)
        loops = [counted(arch, head_dim, toolchain, processes) for arch in arguments.targets for head_dim in HEAD_DIMS]
    print(json.dumps({"benchmark": "count-sass", "toolchain": dict(toolchain.versions), "loops": loops}))


if __name__ == "__main__":
    main()
