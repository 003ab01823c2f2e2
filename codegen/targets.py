"""Data sheets of the architectures that kernels are compiled for, from targets.toml: one representative product each.
Beside them the target `cpu`: kernels of one of them, computed on a CPU.

Per-architecture limits (threads, blocks, registers and shared memory of a multiprocessor) are from the CUDA C++
Programming Guide 13.0, "Compute Capabilities", table "Technical Specifications per Compute Capability"; the shared
memory that the runtime keeps per block (1 KiB from 8.0 on) from the same chapter and the CUDA Occupancy Calculator. The
number of FP32 lanes is that of the guide's "Arithmetic Instructions" throughput table. Product figures are from the
document named in `source`.

Tensor-core rates are those of dense products that are summed in fp32 (int8: in int32), as each product's document gives
them; tests/of_codegen/test_targets.py holds the published TFLOPS beside them. `mma_share` is what warp-wide `mma.sync`
reaches of that. On 9.0 the peak needs `wgmma`; of `mma.sync` Luo et al. (arXiv:2402.13499, section on tensor cores)
measured a bit over 60 % on Hopper, full rates on Ampere and Ada. For 10.0, whose peak needs `tcgen05`, no published
figure is known to us: the share there is an assumption, that an SM keeps Hopper's rate of `mma.sync`.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib.resources import files
from typing import Any

from codegen.errors import UnknownTarget
from codegen.primitives import tensor_sums


@dataclass(frozen=True)
class Target:
    """An architecture and its representative product.

    Clocks in MHz (boost), bandwidth in GB/s (10^9), memory in bytes. `registers_per_sm` are 32-bit registers.
    `reserved_shared_bytes` is what the runtime takes from the multiprocessor for every resident block. `tensor_macs`
    are multiply-adds per clock and multiprocessor by input type (float16, bfloat16, tf32, int8), 0 where the tensor
    cores lack it; `tensor_clock_mhz` the clock that their published peak assumes; `mma_share` see above. `l2_gb_s` is
    what all multiprocessors together were measured to read from the L2, 0 where no figure of this product is known.
    `emulates`: of a target that is no architecture, the one whose kernels and data sheet it has.
    """

    name: str
    product: str
    source: str
    sm_count: int
    clock_mhz: int
    fp32_lanes_per_sm: int
    dram_gb_s: float
    l2_bytes: int
    shared_per_block: int
    shared_per_sm: int
    reserved_shared_bytes: int
    max_threads_per_sm: int
    max_blocks_per_sm: int
    tensor_clock_mhz: int
    tensor_macs: Mapping[str, int] = field(hash=False)
    mma_share: float = 1.0
    l2_gb_s: float = 0.0
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    max_threads_per_block: int = 1024
    emulates: str | None = None

    @property
    def architecture(self) -> str:
        """What nvcc compiles for, and builds belong to."""
        return self.emulates or self.name

    @property
    def capability(self) -> int:
        """Compute capability as the digits of the architecture's name: 75, 80, 90, 120."""
        return int(self.architecture.removeprefix("sm_").rstrip("af"))

    @property
    def tensor_sums(self) -> int:
        """The oldest compute capability whose tensor cores add as this one's do (`device/cpu/tensor_sums.h`)."""
        return tensor_sums(self.architecture)

    def mma_macs(self, dtype: str) -> float:
        """Multiply-adds per clock of `clock_mhz` and multiprocessor that `mma.sync` reaches; 0 where there are none."""
        return self.tensor_macs[dtype] * self.mma_share * self.tensor_clock_mhz / self.clock_mhz

    def data_sheet(self) -> dict[str, Any]:
        return asdict(self)


def _read() -> dict[str, Target]:
    sheets = tomllib.loads((files("codegen") / "targets.toml").read_text(encoding="utf-8"))
    emulations = {name: sheets.pop(name) for name, sheet in list(sheets.items()) if "emulates" in sheet}
    names = [(name, sheet) for sheet_name, sheet in sheets.items() for name in (sheet_name, sheet.pop("also", None))]
    read = {name: Target(name=name, **sheet) for name, sheet in names if name}
    for name, sheet in emulations.items():
        emulated = read[sheet["emulates"]]
        read[name] = replace(emulated, name=name, product=f"CPU emulation of {emulated.product}", **sheet)
    return read


_TARGETS = _read()


def targets() -> dict[str, Target]:
    """All known targets by name."""
    return dict(_TARGETS)


def architectures() -> dict[str, Target]:
    """Those targets that are architectures of GPUs."""
    return {name: sheet for name, sheet in _TARGETS.items() if sheet.emulates is None}


def target(name: str | None) -> Target:
    """The data sheet of an architecture; raises UnknownTarget, where none is named, too: it lists what is allowed."""
    sheet = None if name is None else _TARGETS.get(name)
    if sheet is None:
        allowed = sorted(_TARGETS)
        what = "no target is named" if name is None else f"unknown target {name[:40]!r}"
        raise UnknownTarget(f"{what}; allowed: {', '.join(allowed)}", field="target", allowed=allowed)
    return sheet
