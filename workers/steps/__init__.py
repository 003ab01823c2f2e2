"""The steps of a job, one module each, in the order that a task goes through them."""

from workers.steps.compile import compile_kernels
from workers.steps.context import Step
from workers.steps.finish import finish
from workers.steps.measure import compare, measure
from workers.steps.plan import plan
from workers.steps.verify import verify

STEPS: dict[str, Step] = {
    "plan": plan,
    "compile": compile_kernels,
    "verify": verify,
    "measure": measure,
    "compare": compare,
    "finish": finish,
}
