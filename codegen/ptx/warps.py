"""What the lanes of a warp and the warps of a block do together. Every mask of members must name the whole warp:
kernels here have no smaller group, and the runtime goes on only when all 32 lanes are there."""

from codegen.ptx.operands import Operands
from codegen.ptx.rules import Match, rule

# By the types of an mma: what carries it out, and the registers of d, a and b.
MMA = {
    "m16n8k16.row.col.f32.f16.f16.f32": ("mma_f16", 4, 4, 2),
    "m16n8k16.row.col.f32.bf16.bf16.f32": ("mma_bf16", 4, 4, 2),
    "m16n8k16.row.col.f16.f16.f16.f16": ("mma_f16_f16", 2, 4, 2),
    "m16n8k8.row.col.f32.f16.f16.f32": ("mma_f16_k8", 4, 2, 1),
    "m16n8k8.row.col.f32.tf32.tf32.f32": ("mma_tf32", 4, 4, 2),
    "m16n8k32.row.col.s32.s8.s8.s32": ("mma_s8", 4, 4, 2),
    "m16n8k32.row.col.s32.u8.u8.s32": ("mma_u8", 4, 4, 2),
}


@rule(r"shfl\.sync\.(idx|up|down|bfly)\.b32")
def _shuffle(operands: Operands, match: Match) -> str:
    operands.count(5)
    target, bar, inside = operands.instruction.operands[0].partition("|")
    value, lane, clamp, mask = (operands.value(number, 32) for number in (1, 2, 3, 4))
    result = f"shuffle<Shuffle_{match[1]}>({value}, {lane}, {clamp}, {mask}, {operands.here})"
    name = operands.register(target, 32)
    if not bar:
        return f"{name} = {result}.value;"
    return f"{{ const Shuffled got = {result}; {name} = got.value; {operands.register(inside, 1)} = got.inside; }}"


@rule(r"vote\.sync\.(any|all|uni)\.pred")
def _vote(operands: Operands, match: Match) -> str:
    operands.count(3)
    ballot = f"ballot({operands.predicate(1)}, {operands.value(2, 32)}, {operands.here})"
    test = {"any": "ballot != 0", "all": "ballot == whole_warp", "uni": "ballot == 0 || ballot == whole_warp"}[match[1]]
    return f"{{ const uint32_t ballot = ptx::{ballot}; {operands.out(0, 1)} = {test}; }}"


@rule(r"vote\.sync\.ballot\.b32")
def _ballot(operands: Operands, match: Match) -> str:
    operands.count(3)
    return f"{operands.out(0, 32)} = ballot({operands.predicate(1)}, {operands.value(2, 32)}, {operands.here});"


@rule(r"bar\.warp\.sync")
def _warp_barrier(operands: Operands, match: Match) -> str:
    operands.count(1)
    return f"warp_barrier({operands.value(0, 32)}, {operands.here});"


@rule(r"bar(?:rier)?\.sync(?:\.aligned)?")
def _barrier(operands: Operands, match: Match) -> str:
    """`barrier.sync` without `.aligned` may be reached one lane at a time, which the runtime does not let pass."""
    operands.count(1, 2)
    if operands.instruction.opcode == "barrier.sync":
        raise operands.instruction.refused("a barrier that is not .aligned")
    if len(operands) == 1 and operands.constant(0) == 0:
        return f"cpu::barrier({operands.here});"
    if len(operands) == 1:
        return f"named_barrier({operands.constant(0)}, thread_count, {operands.here});"
    return f"named_barrier(int32_t({operands.value(0, 32)}), int32_t({operands.value(1, 32)}), {operands.here});"


@rule(r"bar\.arrive")
def _arrive(operands: Operands, match: Match) -> str:
    operands.count(2)
    threads = operands.value(1, 32)
    return f"named_barrier_arrive(int32_t({operands.value(0, 32)}), int32_t({threads}), {operands.here});"


@rule(r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16")
def _load_matrix(operands: Operands, match: Match) -> str:
    operands.count(2)
    count = int(match[1])
    targets = operands.registers(0, count, 32)
    lines = [f"{name} = out[{number}];" for number, name in enumerate(targets)]
    call = (
        f"load_matrix({count}, {'true' if match[2] else 'false'}, {operands.shared_memory(1)}, out, {operands.here});"
    )
    return f"{{ unsigned out[{count}]; {call} {' '.join(lines)} }}"


@rule(r"mma\.sync\.aligned\.(m16n8k\d+\.row\.col\.\w+\.\w+\.\w+\.\w+)")
def _multiply(operands: Operands, match: Match) -> str:
    operands.count(4)
    if match[1] not in MMA:
        raise operands.instruction.refused("no rule for these types of mma")
    name, of_d, of_a, of_b = MMA[match[1]]
    targets = operands.registers(0, of_d, 32)
    a, b, c = (operands.values(number, count, 32) for number, count in ((1, of_a), (2, of_b), (3, of_d)))
    lines = [f"{target} = d[{number}];" for number, target in enumerate(targets)]
    arrays = f"unsigned d[] = {{{', '.join(c)}}}; const unsigned a[] = {{{', '.join(a)}}}, b[] = {{{', '.join(b)}}};"
    return f"{{ {arrays} {name}(d, a, b, {operands.here}); {' '.join(lines)} }}"
