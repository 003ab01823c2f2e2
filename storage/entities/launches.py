"""How a candidate is called, as its winner record says it: what Python computes, beside the launches themselves."""

from collections.abc import Sequence

from codegen.kernel import Candidate
from codegen.operators import operator
from cukiln.types import Launch, LaunchFunction, LaunchTransform
from cukiln.types import Operand as OperandAnswer


def launch_of(candidate: Candidate, functions: Sequence[LaunchFunction], workspace_bytes: int) -> Launch:
    """`functions` and `workspace_bytes`: as the launch code has them."""
    op, problem = operator(candidate.kernel.operator), candidate.problem
    operands = [
        OperandAnswer(name=o.name, dtype=o.dtype, role=o.role, shape=list(o.shape), strides=list(o.strides))
        for o in op.operands(problem)
    ]
    return Launch(
        operands=operands,
        extents=dict(zip(op.extent_names, op.extents(problem), strict=True)),
        attributes=dict(zip(op.attribute_names, op.attributes(problem), strict=True)),
        launch=dict(zip(op.launch_tunables, op.launch_values(candidate.schedule), strict=True)),
        scalars=op.scalars(problem),
        functions=list(functions),
        workspace_bytes=workspace_bytes,
        transform=_transform(candidate),
    )


def _transform(candidate: Candidate) -> LaunchTransform | None:
    op = operator(candidate.kernel.operator)
    operand = op.transformed(candidate.kernel)
    needed = op.transformed_bytes(candidate.problem, candidate.schedule)
    return LaunchTransform(operand=operand, bytes=needed) if operand else None
