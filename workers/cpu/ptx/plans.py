"""The version of what judges PTX, by operator: a verdict of another version is judged again."""

from functools import cache
from importlib import resources
from pathlib import Path

from codegen.canonical import digest
from codegen.identity import PlanVersions
from codegen.plan import ptx_plan
from codegen.primitives import TURING_SUMS
from codegen.text import render_ptx
from storage.config.own_modules import texts_of
from workers.cpu.verify import cpu_plans

_OURS = ("translate", "read")  # of `codegen.ptx`; they import the rules
_HERE = ("build.py", "ptx_check.py", "verify.py")


def ptx_plans(sums: int = TURING_SUMS) -> PlanVersions:
    """The digest of the translator, of what its instructions do, and of how the text is built and run, with the
    version of the CPU's plan for the operator. `sums`: whose tensor cores add (`Target.tensor_sums`)."""
    judge = _judge()
    return {
        name: digest("ptx_plan", ptx_plan.PLAN_SCHEMA, cpu_plan=version, judge=judge)
        for name, version in cpu_plans(sums=sums).items()
    }


@cache
def _judge() -> str:
    device = resources.files("codegen") / "device" / "ptx"
    texts = {path.name: path.read_text(encoding="utf-8") for path in device.iterdir() if path.name.endswith(".h")}
    modules = (*(f"codegen.ptx.{name}" for name in _OURS), ptx_plan.__name__, render_ptx.__name__)
    texts |= texts_of(*modules, packages=("codegen",))
    texts |= {f"ptx/{name}": Path(__file__).with_name(name).read_text(encoding="utf-8") for name in _HERE}
    return digest("ptx_judge", ptx_plan.PLAN_SCHEMA, texts=texts)
