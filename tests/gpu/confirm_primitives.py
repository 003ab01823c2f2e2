"""Runs every primitive on the GPU and in its CPU emulation and records which gave the same results: `make test-gpu`.

Needs Python, NumPy, CuPy, nvcc and g++, and no package of the service; of another GPU module its function
`primitives_gpu`, and for a GPU's UUID the module's list of them.
Exit status: 0 all primitives that this GPU has are confirmed, 1 one differs, or its kernels do not compile, 2 there is
no GPU, 3 nothing was run: there is no compiler, or the GPU module runs no such kernels, 4 some could not be checked,
for this machine or behind a lost context: with --journal the same command goes on with them.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from codegen.primitives import CONFIRMED, primitive_digest, primitives, tensor_sums
from tests.gpu.check_journal import CheckJournal, Outcome
from tests.gpu.primitive_checks import CHECKS, Check, Comparison
from tests.gpu.run_check import described
from tests.gpu.run_primitives import (
    ORDERS,
    BuildFailed,
    ContextLost,
    CpuEmulations,
    CupyGpu,
    Gpu,
    NoCompiler,
    RunFailed,
    build_cubin,
    nvcc_version,
    runs_on,
    why_no_kernel_loads,
)

CONFIRMS, DIFFERS, NO_GPU, NOT_RUN, LEFT_OPEN = 0, 1, 2, 3, 4
CUPY_MODULE = "workers.cuda.cupy_gpu"  # what `CupyGpu` stands for here


class NotRun(Exception):
    """The primitives cannot be run that way; the message says why."""


def random_of(check: Check) -> np.random.Generator:
    """Each check's inputs are the same in every run and do not depend on the other checks."""
    return np.random.default_rng(list(check.name.encode()))


def say_difference(check: Check, comparison: Comparison) -> str:
    """The first difference for a person: "" where there is none."""
    if (difference := comparison.difference) is None:
        return ""
    place = f"block {difference.block}, word {difference.word} of {check.words_out}"
    return f"{place}: the GPU gives 0x{difference.gpu:08x}, the CPU emulation 0x{difference.cpu:08x}"


def check_on_cpu(check: Check, emulations: CpuEmulations) -> Outcome:
    """The emulation alone: it runs, and its results do not depend on the order of the warps."""
    words = check.inputs(random_of(check))
    try:
        results = [emulations.run(check, words, order) for order in ORDERS]
    except RunFailed as error:
        return Outcome(check, 0, 0.0, str(error))
    same = all(np.array_equal(results[0], result) for result in results[1:])
    return Outcome(check, results[0].size, 0.0, "" if same else "its results depend on the order of the warps")


def check_on_gpu(check: Check, emulations: CpuEmulations, gpu: Gpu) -> Outcome:
    """GPU and emulation on the same inputs."""
    words = check.inputs(random_of(check))
    try:
        comparison = check.compare(
            words, gpu.run(check, words), emulations.run(check, words), lambda other: emulations.run(check, other)
        )
    except RunFailed as error:
        words = str(error) if error.is_verdict else f"not checked: {error}"
        return Outcome(check, 0, 0.0, words, error.is_verdict, isinstance(error, ContextLost))
    except Exception as error:  # noqa: BLE001 - whatever CuPy raises, such as for headers that it does not find
        return Outcome(check, 0, 0.0, f"not checked: {described(error)}", is_verdict=False)
    return Outcome(check, comparison.values, comparison.worst, say_difference(check, comparison))


def confirmation(
    outcomes: Sequence[Outcome], wanted: Sequence[Check], gpu: Gpu, cuda: str, before: dict[str, Any]
) -> dict[str, Any]:
    """The new content of the result file: the primitives all of whose `wanted` checks passed, the first difference of
    those that failed, and what the file said before of primitives that this GPU has not, or that are not done."""
    date = datetime.now(UTC).isoformat(timespec="seconds")
    source = {**gpu.description, "cuda": cuda, "date": date}
    failed = {
        name: f"{outcome.check.name}: {outcome.failure}"
        for outcome in reversed(outcomes)
        if outcome.failure and outcome.is_verdict
        for name in outcome.check.primitives
    }
    compared = {outcome.check.name for outcome in outcomes if outcome.is_verdict}
    # Of some of its checks alone nothing is known of a primitive, but that it differs.
    open_ = {name for check in wanted if check.name not in compared for name in check.primitives}
    tried = {name for check in wanted for name in check.primitives} - (open_ - failed.keys())
    confirmed = {name: entry for name, entry in before.get("primitives", {}).items() if name not in tried}
    for name in tried - failed.keys():
        own = [outcome for outcome in outcomes if name in outcome.check.primitives]
        confirmed[name] = {
            "digest": primitive_digest(name),
            "values": sum(outcome.values for outcome in own),
            "worst": round(max(outcome.worst for outcome in own), 4),
            **source,
        }
    retained = {name: confirmed[name] for name in sorted(confirmed) if name in primitives()}
    texts = {name: primitive_digest(name) for name in sorted(failed)}
    return {**source, "primitives": retained, "failed": dict(sorted(failed.items())), "failed_digests": texts}


def confirm(
    gpu: Gpu,
    emulations: CpuEmulations,
    cuda: str,
    target: Path,
    checks: Sequence[Check] = CHECKS,
    journal: Path | None = None,
) -> int:
    """Runs all checks that the GPU can run, but those that `journal` has, writes `target` after each, and returns the
    exit status."""
    before = confirmed_before(target)
    wanted = [check for check in checks if runs_on(check, gpu.arch)]
    done = CheckJournal(journal, {**gpu.description, "cuda": cuda})
    outcomes: list[Outcome] = []
    record = confirmation(outcomes, wanted, gpu, cuda, before)
    for check in done.ordered(wanted):
        outcome = done.outcome_of(check) or done.add(check, partial(check_on_gpu, check, emulations, gpu))
        report([outcome])
        outcomes.append(outcome)
        record = confirmation(outcomes, wanted, gpu, cuda, before)
        write_whole(target, json.dumps(record, indent=1) + "\n")
        if outcome.ends:
            print("the context is lost: the checks after this one were not run")
            break
    print(f"{len(record['primitives'])} of {len(primitives())} primitives are confirmed: {target}")
    if len(outcomes) < len(wanted) or not all(outcome.is_verdict for outcome in outcomes):
        return LEFT_OPEN
    return DIFFERS if any(outcome.failure for outcome in outcomes) else CONFIRMS


def write_whole(path: Path, text: str) -> None:
    """A run that is killed meanwhile leaves what was there."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(text, encoding="utf-8")
    beside.replace(path)


def confirmed_before(target: Path) -> dict[str, Any]:
    """What stands in the file; raises SystemExit for one that is damaged."""
    try:
        before = json.loads(target.read_text(encoding="utf-8")) if target.is_file() else {}
    except (ValueError, RecursionError) as error:
        raise SystemExit(f"{target} is damaged ({error}): remove it, and all is confirmed anew") from error
    if not isinstance(before, dict) or not isinstance(before.get("primitives", {}), dict):
        raise SystemExit(f"{target} holds no confirmed primitives: remove it, and all is confirmed anew")
    return before


def take(elsewhere: Path, target: Path) -> int:
    """What a run on another machine found, into `target`: of primitives of the same text alone; those that differed
    there are not confirmed any more, nor are those of an older file, which does not say of which text. The exit status.
    """
    try:
        brought = json.loads(elsewhere.read_text(encoding="utf-8"))
        digests = {name: entry["digest"] for name, entry in brought["primitives"].items()}
        digests |= {name: primitive_digest(name) for name in brought.get("failed", {}) if name in primitives()}
        digests |= brought.get("failed_digests", {})
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        print(f"{elsewhere} is no confirmed.json of a run elsewhere: {error}; nothing is taken", file=sys.stderr)
        return DIFFERS
    record = confirmed_before(target)
    here = {name for name, digest in digests.items() if name in primitives() and digest == primitive_digest(name)}
    same = {name: entry for name, entry in brought["primitives"].items() if name in here}
    failed = {name: words for name, words in brought.get("failed", {}).items() if name in here}
    others = sorted(digests.keys() - here)
    before = {name: entry for name, entry in record.get("primitives", {}).items() if name not in failed}
    source = {name: brought[name] for name in ("device", "driver", "arch", "cuda", "date") if name in brought}
    merged = dict(sorted({**before, **same}.items()))
    text = json.dumps({**source, "primitives": merged, "failed": failed}, indent=1)
    write_whole(target, text + "\n")
    print(f"{len(same)} primitives are taken from {elsewhere}")
    print(f"{len(merged)} of {len(primitives())} primitives are confirmed: {target}")
    for name in others:
        print(f"{name}: left out, its text here is another one than there")
    for name, words in failed.items():
        print(f"{name}: differed there: {words}")
    return DIFFERS if failed else CONFIRMS


def report(outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        agrees = f"agree, at most {outcome.worst:.0%} of what is allowed apart" if outcome.worst else "agree"
        wrong = "" if outcome.is_verdict else "WRONG: "
        print(f"{outcome.check.name}: {wrong}{outcome.failure or f'{outcome.values} values {agrees}'}", flush=True)


def open_gpu(module: str, device: str) -> Any:
    """A GPU that also has `load`, for a cubin, and `cuda`, as of its driver. Raises RunFailed, NotRun."""
    if module == CUPY_MODULE and device.isdigit():
        return CupyGpu(int(device))
    # Only here: the rest runs where the server's packages are not.
    from workers.gpu.interface import GpuMissing, choose_device, list_devices

    try:
        devices = list_devices(module)
        chosen = choose_device(devices, device)
    except GpuMissing as error:
        raise RunFailed(str(error)) from error
    if module == CUPY_MODULE:
        return CupyGpu(devices.index(chosen))
    if (primitives_gpu := getattr(importlib.import_module(module), "primitives_gpu", None)) is None:
        raise NotRun(f"{module} has no function primitives_gpu, which runs the primitives' kernels")
    return primitives_gpu(chosen.uuid)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cpu-only", action="store_true", help="run the CPU emulation alone; confirms nothing")
    parser.add_argument("--result", type=Path, default=CONFIRMED, help="the file to write")
    parser.add_argument(
        "--take", type=Path, metavar="FILE", help="a result from elsewhere, into --result; runs nothing"
    )
    parser.add_argument(
        "--journal", type=Path, metavar="FILE", help="of what is done: the same command goes on behind it"
    )
    parser.add_argument("--device", default="0", help="UUID or number of the GPU; default: the first")
    parser.add_argument("--gpu-module", default=CUPY_MODULE, help="what drives the GPU")
    chosen = parser.parse_args(arguments)
    if chosen.take is not None:
        return take(chosen.take, chosen.result)
    with tempfile.TemporaryDirectory(prefix="cukiln_primitives_") as name:
        folder = Path(name)
        try:
            if chosen.cpu_only:
                emulations = CpuEmulations(CHECKS, folder)
                outcomes = [check_on_cpu(check, emulations) for check in CHECKS]
                report(outcomes)
                return DIFFERS if any(outcome.failure for outcome in outcomes) else CONFIRMS
            try:
                gpu = open_gpu(chosen.gpu_module, chosen.device)
            except NotRun as error:
                print(f"not run: {error}; nothing is confirmed", file=sys.stderr)
                return NOT_RUN
            except RunFailed as error:
                print(f"{error}; nothing is confirmed. --cpu-only runs the CPU emulation alone", file=sys.stderr)
                return NO_GPU
            if why := why_no_kernel_loads(gpu.cuda, nvcc_version()):
                print(f"{why}; nothing is confirmed", file=sys.stderr)
                return NO_GPU
            gpu.load(build_cubin([check for check in CHECKS if runs_on(check, gpu.arch)], gpu.arch, folder))
            emulations = CpuEmulations(CHECKS, folder, sums=tensor_sums(gpu.arch))
            return confirm(gpu, emulations, nvcc_version(), chosen.result, CHECKS, chosen.journal)
        except NoCompiler as error:
            print(f"not run: no compiler: {error}; nothing is confirmed", file=sys.stderr)
            return NOT_RUN
        except BuildFailed as error:
            print(error, file=sys.stderr)
            return DIFFERS
        except Exception as error:  # noqa: BLE001 - whatever CuPy and the driver raise
            print(f"WRONG: {described(error)}; no more is confirmed", file=sys.stderr)
            return DIFFERS


if __name__ == "__main__":
    sys.exit(main())
