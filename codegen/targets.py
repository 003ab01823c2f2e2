"""Data sheets of the architectures that kernels are compiled for: one representative product each.

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

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from codegen.errors import UnknownTarget


@dataclass(frozen=True)
class Target:
    """An architecture and its representative product.

    Clocks in MHz (boost), bandwidth in GB/s (10^9), memory in bytes. `registers_per_sm` are 32-bit registers.
    `reserved_shared_bytes` is what the runtime takes from the multiprocessor for every resident block. `tensor_macs`
    are multiply-adds per clock and multiprocessor by input type (float16, bfloat16, tf32, int8), 0 where the tensor
    cores lack it; `tensor_clock_mhz` the clock that their published peak assumes; `mma_share` see above.
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
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    max_threads_per_block: int = 1024

    @property
    def capability(self) -> int:
        """Compute capability as the digits of the name: 75, 80, 90, 120."""
        return int(self.name.removeprefix("sm_").rstrip("af"))

    def mma_macs(self, dtype: str) -> float:
        """Multiply-adds per clock of `clock_mhz` and multiprocessor that `mma.sync` reaches; 0 where there are none."""
        return self.tensor_macs[dtype] * self.mma_share * self.tensor_clock_mhz / self.clock_mhz

    def data_sheet(self) -> dict[str, Any]:
        return asdict(self)


KIB, MIB = 1024, 1024 * 1024


def _macs(float16: int, bfloat16: int, tf32: int, int8: int) -> dict[str, int]:
    return {"float16": float16, "bfloat16": bfloat16, "tf32": tf32, "int8": int8}


_H100 = {
    "product": "NVIDIA H100 SXM5 80GB",
    # Table 3 has a lower boost clock, 1,830 MHz, for what the tensor cores do in these types.
    "source": "NVIDIA H100 Tensor Core GPU Architecture white paper v1.04, tables 3 and 4",
    "sm_count": 132, "clock_mhz": 1980, "fp32_lanes_per_sm": 128, "dram_gb_s": 3352.0, "l2_bytes": 50 * MIB,
    "shared_per_block": 227 * KIB, "shared_per_sm": 228 * KIB, "reserved_shared_bytes": KIB,
    "max_threads_per_sm": 2048, "max_blocks_per_sm": 32,
    "tensor_clock_mhz": 1830, "tensor_macs": _macs(2048, 2048, 1024, 4096), "mma_share": 0.62,
}  # fmt: skip
_B200 = {
    "product": "NVIDIA B200",
    # The data sheet's 18 PFLOPS of fp16 (dense, 8 GPUs) are 4,096 multiply-adds per clock at 1,850 MHz.
    "source": "NVIDIA HGX B200 data sheet (75 TFLOPS fp32 and 7.7 TB/s per GPU) and Blackwell tuning guide (126 MB L2)",
    "sm_count": 148, "clock_mhz": 1965, "fp32_lanes_per_sm": 128, "dram_gb_s": 7700.0, "l2_bytes": 126 * MIB,
    "shared_per_block": 227 * KIB, "shared_per_sm": 228 * KIB, "reserved_shared_bytes": KIB,
    "max_threads_per_sm": 2048, "max_blocks_per_sm": 32,
    "tensor_clock_mhz": 1850, "tensor_macs": _macs(4096, 4096, 2048, 8192), "mma_share": 0.31,
}  # fmt: skip
_SHEETS: dict[str, dict[str, Any]] = {
    "sm_75": {
        "product": "NVIDIA T4",
        "source": "NVIDIA T4 data sheet; NVIDIA Turing GPU Architecture white paper WP-09183-001, appendix on TU104",
        "sm_count": 40, "clock_mhz": 1590, "fp32_lanes_per_sm": 64, "dram_gb_s": 320.0, "l2_bytes": 4 * MIB,
        "shared_per_block": 64 * KIB, "shared_per_sm": 64 * KIB, "reserved_shared_bytes": 0,
        "max_threads_per_sm": 1024, "max_blocks_per_sm": 16,
        "tensor_clock_mhz": 1590, "tensor_macs": _macs(512, 0, 0, 1024),
    },
    "sm_80": {
        "product": "NVIDIA A100 SXM4 80GB",
        "source": "NVIDIA A100 Tensor Core GPU Architecture white paper, table 4; A100 80GB data sheet (2,039 GB/s)",
        "sm_count": 108, "clock_mhz": 1410, "fp32_lanes_per_sm": 64, "dram_gb_s": 2039.0, "l2_bytes": 40 * MIB,
        "shared_per_block": 163 * KIB, "shared_per_sm": 164 * KIB, "reserved_shared_bytes": KIB,
        "max_threads_per_sm": 2048, "max_blocks_per_sm": 32,
        "tensor_clock_mhz": 1410, "tensor_macs": _macs(1024, 1024, 512, 2048),
    },
    "sm_86": {
        "product": "NVIDIA RTX A6000",
        "source": "NVIDIA Ampere GA102 GPU Architecture white paper v2.0, table on the RTX A6000",
        "sm_count": 84, "clock_mhz": 1800, "fp32_lanes_per_sm": 128, "dram_gb_s": 768.0, "l2_bytes": 6 * MIB,
        "shared_per_block": 99 * KIB, "shared_per_sm": 100 * KIB, "reserved_shared_bytes": KIB,
        "max_threads_per_sm": 1536, "max_blocks_per_sm": 16,
        "tensor_clock_mhz": 1800, "tensor_macs": _macs(512, 512, 256, 1024),
    },
    "sm_87": {
        "product": "NVIDIA Jetson AGX Orin 64GB",
        "source": "NVIDIA Jetson AGX Orin Series technical brief v1.2, table 1",
        "sm_count": 16, "clock_mhz": 1300, "fp32_lanes_per_sm": 128, "dram_gb_s": 204.8, "l2_bytes": 4 * MIB,
        "shared_per_block": 163 * KIB, "shared_per_sm": 164 * KIB, "reserved_shared_bytes": KIB,
        "max_threads_per_sm": 1536, "max_blocks_per_sm": 16,
        "tensor_clock_mhz": 1300, "tensor_macs": _macs(1024, 1024, 512, 2048),
    },
    "sm_89": {
        "product": "NVIDIA L40S",
        "source": "NVIDIA L40S data sheet (91.6 TFLOPS fp32, 864 GB/s); Ada GPU Architecture white paper v2.1 on AD102",
        "sm_count": 142, "clock_mhz": 2520, "fp32_lanes_per_sm": 128, "dram_gb_s": 864.0, "l2_bytes": 96 * MIB,
        "shared_per_block": 99 * KIB, "shared_per_sm": 100 * KIB, "reserved_shared_bytes": KIB,
        "max_threads_per_sm": 1536, "max_blocks_per_sm": 24,
        "tensor_clock_mhz": 2520, "tensor_macs": _macs(512, 512, 256, 1024),
    },
    "sm_90": _H100,
    "sm_90a": _H100,
    "sm_100": _B200,
    "sm_100a": _B200,
    "sm_120": {
        "product": "NVIDIA GeForce RTX 5090",
        "source": "NVIDIA RTX Blackwell GPU Architecture white paper v1.1, appendix on GB202",
        "sm_count": 170, "clock_mhz": 2407, "fp32_lanes_per_sm": 128, "dram_gb_s": 1792.0, "l2_bytes": 96 * MIB,
        "shared_per_block": 99 * KIB, "shared_per_sm": 100 * KIB, "reserved_shared_bytes": KIB,
        "max_threads_per_sm": 1536, "max_blocks_per_sm": 24,
        "tensor_clock_mhz": 2407, "tensor_macs": _macs(256, 256, 128, 1024),
    },
}  # fmt: skip
_TARGETS = {name: Target(name=name, **sheet) for name, sheet in _SHEETS.items()}


def targets() -> dict[str, Target]:
    """All known targets by name."""
    return dict(_TARGETS)


def target(name: str) -> Target:
    """The data sheet of an architecture; raises UnknownTarget, which lists what is allowed."""
    sheet = _TARGETS.get(name)
    if sheet is None:
        allowed = sorted(_TARGETS)
        raise UnknownTarget(
            f"unknown target {name[:40]!r}; allowed: {', '.join(allowed)}", field="target", allowed=allowed
        )
    return sheet
