"""An estimate of a candidate's time from ptxas' resource report and a roofline. Never a measurement.

Occupancy follows NVIDIA's CUDA Occupancy Calculator (registers are given to warps in units of 256, shared memory to
blocks in units of 128 bytes from 8.0 on and 256 before). Time is the roofline of Williams, Waterman and Patterson (CACM
52:4, 2009) with six roofs (issue of FMAs and all else, tensor cores, special functions, shared memory, L2, DRAM),
quantised into waves of blocks, with latency hidden as Little's law allows (Volkov, "Understanding Latency Hiding on
GPUs", UC Berkeley 2016).
A candidate of several launches takes the sum of their times.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from codegen.alignment import round_up
from codegen.kernel import Candidate
from codegen.operator import Work
from codegen.operators import operator
from codegen.targets import Target
from codegen.text.ptxas_report import Resources

WARP = 32
REGISTER_UNIT = 256  # registers per allocation to a warp
WARPS_PER_UNIT = 4  # warps are placed on the multiprocessor's four partitions
# Bytes per clock: shared memory has 32 banks of 4 bytes (CUDA C++ Programming Guide, "Shared Memory").
SHARED_BYTES_PER_CLOCK = 128.0
# Integer multiply-adds of 32 bits per clock and multiprocessor, from 7.x on (CUDA C++ Programming Guide 13.0,
# "Arithmetic Instructions", throughput table).
IMAD_LANES = 64.0
# Results of special functions per clock and multiprocessor (the same table: rcp, rsqrt, ex2, lg2, sin, cos, tanh).
SPECIAL_LANES = 16.0
# Measured by microbenchmarks (Jia et al., arXiv:1804.06826 and arXiv:1903.07486) on Volta and Turing: 4 clocks from FMA
# to FMA, 19 to 23 from shared memory, 400 to 600 from DRAM, 64 bytes per clock and multiprocessor from L2.
FMA_LATENCY = 4.0
SHARED_LATENCY = 23.0
DRAM_LATENCY = 500.0
# From the L2: 188 and 193 clocks on Turing and Volta (the same), 222 to 339 by the multiprocessor on an L40
# (arXiv:2606.22588).
L2_LATENCY = 250.0
L2_BYTES_PER_CLOCK = 64.0
# The A100 white paper's 5,120 bytes per clock over its 108 multiprocessors, all reading at once on tensor cores. Both
# stand in for products of which no L2 was measured (`Target.l2_gb_s`).
L2_SHARED_BYTES_PER_CLOCK = 47.0
# Clocks from mma.sync to one that needs its result: 17.7 to 33 by shape on A100 (Sun et al., "Dissecting Tensor Cores
# via Microbenchmarks", arXiv:2206.02874).
MMA_LATENCY = 33.0
# From the copy of a tile to its barrier, on a GPU whose DRAM is busy: a ring of s stages can do (s - 1) steps in that
# time, whatever their size. Fitted to five tiles of m = 128, n = k = 4,096 (benchmarks/published/triton-h100-fp16.csv)
# that take 41 to 43 us; the file's other problems were not looked at for it (decision 42).
RING_LATENCY_US = 1.3
# Of a barrier that all warps of a block meet at, once a step: an assumption.
BARRIER_CLOCKS = 30.0
# Registers that launches beside the reported one take: a dozen values per thread.
SMALL_KERNEL_REGISTERS = 40
# Of the DRAM's peak, what a streaming kernel reaches; a launch's own time. Assumptions, which scale all ranks alike.
DRAM_EFFICIENCY = 0.85
LAUNCH_US = 2.0
# What a product takes beside: its first tiles come, its last sums leave, and nothing hides either. Fitted to the 5.2 us
# of the smallest product in benchmarks/published/cublas-h100-bf16.csv (decision 42).
PRODUCT_US = 1.6


@dataclass(frozen=True)
class Occupancy:
    """Resident blocks of a multiprocessor, what limits them, and the share of its warps that they fill."""

    blocks_per_sm: int
    limited_by: str
    fraction: float


@dataclass(frozen=True)
class Prediction:
    """Microseconds of one run and where they come from: each roof's time if nothing else took any."""

    us: float
    occupancy: float
    blocks_per_sm: int
    limited_by: str
    waves: float
    bound_by: str
    roofs_us: dict[str, float]
    spilled: bool

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def occupancy(threads: int, registers: int, shared_bytes: int, target: Target) -> Occupancy:
    """Of blocks with `threads` threads, `registers` per thread and `shared_bytes` of static and dynamic shared."""
    warps = -(-threads // WARP)
    per_warp = round_up(max(registers, 1) * WARP, REGISTER_UNIT)
    warps_of_registers = target.registers_per_sm // per_warp // WARPS_PER_UNIT * WARPS_PER_UNIT
    unit = 256 if target.reserved_shared_bytes == 0 else 128
    per_block = round_up(shared_bytes + target.reserved_shared_bytes, unit)
    # In the order in which a tie is named.
    limits = {
        "threads": target.max_threads_per_sm // (warps * WARP),
        "blocks": target.max_blocks_per_sm,
        "registers": warps_of_registers // warps,
        "shared_memory": target.shared_per_sm // per_block if per_block else target.max_blocks_per_sm,
    }
    limited_by = min(limits, key=lambda name: limits[name])
    blocks = limits[limited_by]
    return Occupancy(blocks, limited_by, blocks * warps * WARP / target.max_threads_per_sm)


def predict(candidate: Candidate, resources: Resources, target: Target) -> Prediction:
    """A pure function of its arguments: the same candidate, report and data sheet give the same microseconds."""
    op = operator(candidate.problem.operator)
    return predict_work(op.work(candidate.problem, candidate.schedule, target), resources, target)


def predict_work(work: Work, resources: Resources, target: Target) -> Prediction:
    """Of a kernel that does this work, whatever it is."""
    shared = work.dynamic_shared_bytes + resources.static_shared_bytes
    fits = occupancy(work.threads, resources.registers, shared, target)
    # A kernel that cannot be resident cannot run; one block keeps its figures finite and last in rank.
    resident = max(1, fits.blocks_per_sm)
    waves = work.blocks / (target.sm_count * resident)
    roofs = _roofs(work, target, resident, resources.spill_bytes)
    latency = _latency(work, roofs, target, resident)
    # A round is what its fullest multiprocessor takes: a part-filled last wave still takes the time of its own blocks.
    us = (_combine(roofs, work.overlap) + latency) / target.clock_mhz + _fixed_us(work)
    if fits.blocks_per_sm == 0:
        us *= 1000.0
    times = {name: round(value / target.clock_mhz, 6) for name, value in {**roofs, "latency": latency}.items()}
    if work.others:
        times["other_launches"] = round(sum(_small_launch_us(other, target) for other in work.others), 6)
        us += times["other_launches"]
    bound_by = max(times, key=lambda name: times[name])
    return Prediction(
        round(us, 6),
        fits.fraction,
        fits.blocks_per_sm,
        fits.limited_by,
        waves,
        bound_by,
        times,
        resources.spill_bytes > 0,
    )


def products_us(products: int, imads: int, target: Target) -> float:
    """Microseconds of so many products alone, on all multiprocessors. `imads`: `Operator.imads`."""
    per_clock = IMAD_LANES / imads if imads else float(target.fp32_lanes_per_sm)
    return products / (per_clock * target.sm_count * target.clock_mhz)


def launch_times(prediction: Prediction, work: Work, target: Target, functions: Sequence[str]) -> list[float | None]:
    """Microseconds of each launch, of which `run` is the predicted kernel's and the others are `work.others`, in their
    order; None of those that have no work of their own."""
    others = [_small_launch_us(other, target) for other in work.others]
    of_run = prediction.us - sum(others)
    if len(functions) != len(others) + 1:
        return [prediction.us if len(functions) == 1 else None for _ in functions]
    rest = iter(others)
    return [of_run if name == "run" else next(rest) for name in functions]


def _small_launch_us(work: Work, target: Target) -> float:
    """Microseconds of a launch without a report: its kernel takes few registers."""
    resident = occupancy(work.threads, SMALL_KERNEL_REGISTERS, work.dynamic_shared_bytes, target).blocks_per_sm
    roofs = _roofs(work, target, resident, spilled_bytes=0)
    clocks = _combine(roofs, work.overlap) + _latency(work, roofs, target, resident)
    return clocks / target.clock_mhz + _fixed_us(work)


def _fixed_us(work: Work) -> float:
    """Of a launch, whatever its size. Sums of reductions are no products: they come as a stream of loads."""
    multiplied = work.mma or (work.fma + work.imad and not work.prefetched)
    return LAUNCH_US + (PRODUCT_US if multiplied else 0.0)


def _roofs(work: Work, target: Target, resident: int, spilled_bytes: int) -> dict[str, float]:
    """Clocks of the whole launch under each roof. Blocks are spread evenly, so the fullest multiprocessor decides."""
    fullest = -(-work.blocks // target.sm_count)
    share = fullest / work.blocks
    lanes = float(target.fp32_lanes_per_sm)
    # Four schedulers issue one warp instruction each per clock: what is not an FMA takes an issue slot from one. With
    # half-rate FMA units (64 lanes) every second slot is free for it.
    multiplied = work.fma / lanes + work.imad / IMAD_LANES
    issue = max(multiplied, (work.fma + work.imad + work.other_instructions) / 128.0)
    # Local memory goes through L1 at a quarter of shared memory's rate, once per step for what is spilled.
    spills = spilled_bytes * float(work.blocks) * work.threads * work.steps
    # A third of the multiprocessors can keep the DRAM busy (64 bytes per clock each, against its bandwidth).
    active = min(1.0, 3.0 * work.blocks / target.sm_count)
    bytes_per_clock = target.dram_gb_s * 1e3 / target.clock_mhz * DRAM_EFFICIENCY
    roofs = {
        "fma": issue * share / _issue_efficiency(work, min(resident, fullest)),
        "shared_memory": (work.shared_bytes + 4.0 * spills) * share / SHARED_BYTES_PER_CLOCK,
        "l2": work.l2_bytes * share / _l2_bytes_per_clock(work, target),
        "dram": work.dram_bytes / (bytes_per_clock * active),
    }
    if work.special:
        roofs["special"] = work.special * share / SPECIAL_LANES
    if work.mma:
        rate = max(target.mma_macs(work.mma_type), 1.0)
        roofs["mma"] = work.mma * share / rate / _mma_efficiency(work, rate, min(resident, fullest))
    return roofs


def _l2_bytes_per_clock(work: Work, target: Target) -> float:
    """For each multiprocessor: what was measured on this product, else another's."""
    if target.l2_gb_s:
        return target.l2_gb_s * 1e3 / target.clock_mhz / target.sm_count
    return L2_SHARED_BYTES_PER_CLOCK if work.mma else L2_BYTES_PER_CLOCK


def _mma_efficiency(work: Work, rate: float, resident: int) -> float:
    """The share of the tensor cores' rate that warps can use: each of the four has only its own scheduler's warps,
    and a warp's sums must be enough to cover the latency of one."""
    warps_per_scheduler = resident * work.threads / WARP / 4.0
    interval = work.mma_macs / (rate / 4.0)
    in_flight = min(1.0, warps_per_scheduler * work.independent * interval / MMA_LATENCY)
    # Between two k-steps a warp stalls on its fragments; other warps and its own products fill that time.
    busy = max(1.0, warps_per_scheduler) * work.independent * interval
    return min(1.0, warps_per_scheduler) * in_flight * busy / (busy + SHARED_LATENCY * (1.0 - work.overlap))


def _issue_efficiency(work: Work, resident: int) -> float:
    """The share of issue slots that ready FMAs fill: warps times their independent chains against the FMA's latency."""
    warps_per_scheduler = resident * work.threads / WARP / 4.0
    in_flight = warps_per_scheduler * min(work.independent, 16)
    # Between two rows of a tile a warp stalls on shared memory; other warps and its own FMAs fill that time.
    ready = warps_per_scheduler * work.independent
    return min(1.0, in_flight / FMA_LATENCY) * ready / (ready + SHARED_LATENCY * (1.0 - work.overlap))


def _combine(roofs: dict[str, float], overlap: float) -> float:
    """The highest roof, and of the others the part that the schedule does not overlap with it."""
    highest = max(roofs.values())
    return highest + (1.0 - overlap) * 0.25 * (sum(roofs.values()) - highest)


def _latency(work: Work, roofs: dict[str, float], target: Target, resident: int) -> float:
    """Clocks in which a multiprocessor stalls on global memory."""
    fullest = -(-work.blocks // target.sm_count)
    rounds, in_parallel = -(-fullest // resident), min(resident, fullest)
    steps = max(rounds * work.steps, work.longest)
    # Tables are read by all blocks, so the L2 has them.
    first = rounds * (DRAM_LATENCY + work.looked_up * L2_LATENCY)
    if not work.prefetched:
        # A trip per step and block, hidden by other blocks.
        hidden = work.overlap / (1.0 + work.overlap) + 1.0 - 1.0 / in_parallel
        return first + steps * DRAM_LATENCY * max(0.02, 1.0 - hidden)
    # A ring of stages: a step cannot take less than the latency over the steps in flight, nor less than its barrier;
    # the first one of a round, and what a block looks up before it, are not hidden at all.
    waiting = max(0.0, steps * _trip(work, target) / work.prefetched - max(roofs.values()))
    return first + waiting + steps * BARRIER_CLOCKS / in_parallel


def _trip(work: Work, target: Target) -> float:
    """Clocks of a step's trip. Loads come one by one; the tiles of a product are waited for together, so that a step is
    cold where any of its lines is, of which blocks that run at a time share at least every fourth."""
    if not work.mma:
        return DRAM_LATENCY
    cold = min(1.0, 4.0 * work.dram_bytes / max(1.0, work.l2_bytes))
    return DRAM_LATENCY + cold * max(0.0, RING_LATENCY_US * target.clock_mhz - DRAM_LATENCY)
