"""Instructions of the main loops of attention and mla, read from SASS of the best predicted schedules; nothing runs.

The main loop is the one with the most tensor-core instructions (HMMA); its body computes one tile of keys. Loops inside
it count as often as they run. What a branch of it alone reaches and masks scores (`mask`: between BSSY and BSYNC, with
FSEL, with neither products nor copies) runs for tiles with keys that some query does not see, and is counted apart.
Counted are instructions of a warp, wherever a predicate may switch them off.

The last line is one JSON object. `other_per_hmma` is what a warp issues beside each product in a tile without a mask,
`predicted_other_per_hmma` what the operator's `work.py` takes for it.
"""

import argparse
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from benchmarks.predict_attention import HEAD_DIMS, LEVEL, TARGETS, best, fields_of
from benchmarks.shapes import shapes_of
from codegen.kernel import Candidate
from codegen.lower import lower
from codegen.operators import operator
from codegen.operators.attention.work import MMA_MACS
from codegen.operators.mla.problem import HEAD_DIM_CKV
from codegen.predict.predict_uncompiled import predict_uncompiled
from codegen.search.schedule import Schedule
from codegen.search.search import Search
from codegen.targets import target
from workers.compile.toolchain import Toolchain, find_toolchain
from workers.processes.processes import Limits, Processes
from workers.steps.winner_library import build_winner

LIMITS = Limits(wall_seconds=120, cpu_seconds=120, memory_bytes=4 << 30, output_bytes=1 << 28)
LENGTH = 4096
PRODUCT, COPY, SELECT = "HMMA", "LDGSTS", "FSEL"
MLA = {
    "one query": "mla_paged_decode_h16_ckv512_kpe64_ps64",
    "prompts": "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64",
}
# Of attention's public shapes, 32 heads of 128 on 8.
PAGED = {
    "one query, pages of 1": "flashinfer/gqa_paged_decode_h32_kv8_d128_ps1",
    "one query, pages of 16": "vllm/gqa_paged_decode_h32_kv8_d128_ps16",
    "prompts, pages of 1": "flashinfer/gqa_paged_prefill_causal_h32_kv8_d128_ps1",
    "prompts, pages of 16": "vllm/gqa_paged_prefill_h32_kv8_d128_ps16",
}
COLUMNS_OF_ITERATION, ROWS_OF_ITERATION = 64, 8  # of the loops inside mla's: of a product with keys; of a copy
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
    """Instructions of one pass by name, as often as they are issued, without those of the mask, and those."""

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


def main_loop(sass: str, iterations: Mapping[str, int] | None = None) -> Loop:
    """`iterations`: of each loop inside it that has this instruction. Raises ValueError where no loop has products, or
    where there is a loop inside that `iterations` does not have."""
    instructions, labels = read(sass)
    names = [instruction.name for instruction in instructions]
    loops = [
        (labels[instruction.label], number + 1)
        for number, instruction in enumerate(instructions)
        if instruction.name == "BRA" and instruction.label is not None and labels[instruction.label] <= number
    ]
    first, end = max(loops, key=lambda loop: names[slice(*loop)].count(PRODUCT), default=(0, 0))
    if PRODUCT not in names[first:end]:
        raise ValueError(f"no loop of this SASS has {PRODUCT}")
    times = [1] * len(names)
    for inner in loops:
        if first <= inner[0] and inner[1] <= end and inner != (first, end):
            for number in range(*inner):
                times[number] *= _iterations(names[slice(*inner)], iterations or {})
    masked = {number for branch in _branches(names[first:end]) for number in range(*branch)}
    body, mask = Counter[str](), Counter[str]()
    for number in range(first, end):
        (mask if number - first in masked else body)[names[number]] += times[number]
    return Loop(body, mask)


def _iterations(names: Sequence[str], iterations: Mapping[str, int]) -> int:
    for name, count in iterations.items():
        if name in names:
            return count
    raise ValueError(
        f"a loop inside the main one has none of {', '.join(iterations) or 'no instruction'}: {Counter(names)}"
    )


def _branches(names: Sequence[str]) -> list[tuple[int, int]]:
    """What lies between the branch behind each BSSY and its BSYNC, where it selects, and neither multiplies nor
    copies."""
    branches = []
    for start, name in enumerate(names):
        if name == "BSSY" and "BSYNC" in names[start:] and "BRA" in names[start:]:
            first, end = names.index("BRA", start) + 1, names.index("BSYNC", start)
            if first < end and SELECT in names[first:end] and not {PRODUCT, COPY} & set(names[first:end]):
                branches.append((first, end))
    return branches


def candidate_of(arch: str, head_dim: int) -> Candidate:
    """The best predicted of a problem without a mask."""
    fields = fields_of(head_dim, False, LENGTH)
    own = operator("attention")
    return own.candidate(own.parse(fields), Schedule.of(best(arch, head_dim, False, LENGTH).schedule))


def candidate_of_shape(of: str, arch: str, name: str) -> Candidate:
    """The best predicted of an operator's public shape."""
    (fields,) = (shape for shape in shapes_of(of) if shape["name"].endswith(name))
    problem = operator(of).parse({field: value for field, value in fields.items() if field != "name"})
    candidates = lower(problem, target(arch), Search(level=LEVEL)).candidates
    return min(candidates, key=lambda candidate: (predict_uncompiled(candidate, target(arch)).us, candidate.id))


def iterations_of_mla(candidate: Candidate) -> dict[str, int]:
    """Of the loops inside the main one; see block.cuh."""
    return {
        PRODUCT: HEAD_DIM_CKV // COLUMNS_OF_ITERATION,
        COPY: int(candidate.schedule.get("tile_kv")) // ROWS_OF_ITERATION,
    }


def predicted_other(candidate: Candidate, arch: str) -> float:
    """Instructions of a warp for each product, without it, as the roofline takes them."""
    work = operator(candidate.kernel.operator).work(candidate.problem, candidate.schedule, target(arch))
    return work.other_instructions / (32.0 * work.mma / MMA_MACS) - 1.0


def counted(arch: str, head_dim: int, toolchain: Toolchain, processes: Processes) -> dict[str, Any]:
    """Raises SystemExit where no disassembler is found."""
    return {"head_dim": head_dim, **_counted(candidate_of(arch, head_dim), arch, {}, toolchain, processes)}


def counted_of_mla(arch: str, what: str, toolchain: Toolchain, processes: Processes) -> dict[str, Any]:
    """`what`: of MLA. Raises as `counted`."""
    candidate = candidate_of_shape("mla", arch, MLA[what])
    return {"what": what, **_counted(candidate, arch, iterations_of_mla(candidate), toolchain, processes)}


def counted_of_pages(arch: str, what: str, toolchain: Toolchain, processes: Processes) -> dict[str, Any]:
    """`what`: of PAGED. Raises as `counted`."""
    return {
        "what": what,
        **_counted(candidate_of_shape("attention", arch, PAGED[what]), arch, {}, toolchain, processes),
    }


def _counted(
    candidate: Candidate, arch: str, iterations: Mapping[str, int], toolchain: Toolchain, processes: Processes
) -> dict[str, Any]:
    build = build_winner(candidate, target(arch), toolchain, processes, LIMITS)
    if build.sass is None:
        raise SystemExit("neither nvdisasm nor cuobjdump is found beside nvcc or in PATH")
    loop = main_loop(build.sass.decode(), iterations)
    return {
        "operator": candidate.kernel.operator,
        "target": arch,
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
        loops += [counted_of_pages(arch, what, toolchain, processes) for arch in arguments.targets for what in PAGED]
        loops += [counted_of_mla(arch, what, toolchain, processes) for arch in arguments.targets for what in MLA]
    print(json.dumps({"benchmark": "count-sass", "toolchain": dict(toolchain.versions), "loops": loops}))


if __name__ == "__main__":
    main()
