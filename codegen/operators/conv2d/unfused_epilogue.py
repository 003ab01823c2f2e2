"""The epilogue in launches of its own, as a framework without fusion has it: a candidate that shows what fusing saves.

`run` ends with the sums, then a launch for each node reads and writes them. Between the launches they are in fp32, as
in the fused kernel, so that values are rounded as often and the bounds of the verification hold as they are: in out
where out is float32, else in a workspace. A framework keeps 16-bit values between its launches: it moves half of the
bytes there, and rounds once more with every node.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from codegen.alignment import needs_cuda_cores, widest
from codegen.counts import LaunchCounts, load, merged, store
from codegen.dtypes import dtype
from codegen.epilogue import node_of, words_of_mask
from codegen.operator import Work
from codegen.operators.convolution.problem import Convolution
from codegen.operators.matmul import counts, traffic
from codegen.operators.matmul.problem import MatmulProblem
from codegen.search.rules import Rejected, check_workspace
from codegen.search.schedule import Schedule, Value
from codegen.search.space import Tunable
from codegen.targets import Target

P = TypeVar("P", bound=Convolution)
NAME = "epilogue"
TUNABLE = Tunable(
    NAME, ("fused", "separate"), False,
    "whether the kernel of the sums also applies the epilogue, or a launch for each node follows",
    "fused", constant=False,
)  # fmt: skip
SUM = "float32"
# CPU seconds of nvcc for a node's function; an estimate: `clear` and `reduce` of a split are 0.04.
NODE_SECONDS = 0.02


def is_separate(tunables: Mapping[str, Any]) -> bool:
    return tunables.get(NAME) == "separate"


def alone(default: Schedule) -> Schedule:
    """The one schedule of its kind that levels 1 and 2 try: the default's, undivided."""
    changed: dict[str, Value] = {"split": "none", "split_k": 1, "stream_blocks": 0, NAME: "separate"}
    return Schedule.of({name: changed.get(name, value) for name, value in default.as_dict().items()})


def sums(problem: P) -> P:
    """What `run` computes."""
    return problem.model_copy(update={"epilogue": (), "out_dtype": SUM})


def out_align(signature: Mapping[str, Any], tunables: Mapping[str, Any]) -> int:
    """Elements of a store of `run`: sums alone have the widest vectors that out has, too."""
    if not is_separate(tunables):
        return int(signature["align_out"])
    quads = needs_cuda_cores(signature["dtype"], signature["allow_tf32"])
    return widest(SUM, signature["align_out"], quads=quads)


def workspace_bytes(problem: Convolution) -> int:
    """Exactly what `workspace_bytes` in kernel.cuh says."""
    return 0 if problem.out_dtype == SUM else dtype(SUM).bytes * problem.pixels * problem.k


def rules(problem: Convolution, tunables: Mapping[str, Any], workspace_limit: int | None) -> Rejected | None:
    if not problem.epilogue:
        return Rejected(NAME, "there is no epilogue that could be separate")
    if tunables.get("split", "none") != "none":
        return Rejected(NAME, "sums that are divided have their epilogue in `reduce`, which is a launch of its own")
    return check_workspace(workspace_bytes(problem), workspace_limit)


def launches(problem: Convolution, width: int, target: Target) -> tuple[Work, ...]:
    """A node's launch reads and writes every sum, and reads its operand. What the launch before it has left in the L2
    is not read from DRAM. `width`: sums of an access."""
    p, outputs = problem, float(problem.pixels * problem.k)
    moved = dtype(SUM).bytes * outputs
    beyond_l2 = 0.0 if moved <= traffic.L2_SHARE * target.l2_bytes else 1.0
    works = []
    for number, node in enumerate(p.epilogue):
        element = node.operand_dtype(p.out_dtype)
        count = p.k if node.op == "bias" else words_of_mask(p.pixels * p.k) if node.packed_mask else outputs
        operand = count * dtype(element).bytes if element is not None else 0.0
        last = number == len(p.epilogue) - 1
        written = dtype(p.out_dtype).bytes * outputs if last else moved
        works.append(
            traffic.items(
                outputs / width,
                instructions=3.0 * outputs,
                l2_bytes=moved + written + operand,
                dram_bytes=beyond_l2 * moved + operand + (written if last else beyond_l2 * written),
                steps=1,
            )
        )
    return tuple(works)


def counted_launches(product: MatmulProblem, width: int) -> tuple[LaunchCounts, ...]:
    """What each node's launch does. `product`: with the chain of its outputs; `width`: sums of an access."""
    outputs, size, chain = product.batch * product.m * product.n, dtype(SUM).bytes, product.epilogue
    made = []
    for number, node in enumerate(chain):
        written = dtype(product.out_dtype).bytes if number == len(chain) - 1 else size
        parts = [
            load(outputs * size, width * size),
            *counts.epilogue_reads((node,), product.out_dtype, outputs, width),
            *counts.epilogue_products(product.model_copy(update={"epilogue": (node,)}), outputs, truncated=0),
            store(outputs * written, width * written),
        ]
        made.append(LaunchCounts(f"node{number}", merged(parts)))
    return tuple(made)


def compile_seconds(epilogue: Sequence[str]) -> float:
    return sum(NODE_SECONDS * (1 if node_of(part).exact else 2) for part in epilogue)
