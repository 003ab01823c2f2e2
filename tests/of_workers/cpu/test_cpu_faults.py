"""Whatever a kernel does wrong, the CPU execution says so in words that lead there, and verifies every other kernel."""

from __future__ import annotations

import contextlib
import json
import platform
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from codegen.operators import operator
from tests.support.kernels.cpu_helpers import LIMITS, faulty_kernel, loaded, processes, toolchain, verify
from tests.support.run.places import FAULTY
from workers.cpu import verify as cpu_verify
from workers.cpu.build import CpuBuild, build_cpu
from workers.cpu.run import run_kernels
from workers.cpu.verify import CpuVerdict
from workers.processes import process_stream
from workers.processes.processes import Finished, InfrastructureError, Processes

pytestmark = pytest.mark.usefixtures("faulty_operator")


@dataclass(frozen=True)
class Fault:
    number: int  # of tests/support/kernels/operators/faulty/kernel.cuh
    verdict: str
    words: str  # regular expression that the message must match

    def line(self) -> int:
        """Where kernel.cuh does it."""
        text = (FAULTY / "kernel.cuh").read_text().splitlines()
        return next(i for i, line in enumerate(text, 1) if f"C::fault == {self.number})" in line)


FAULTS = {
    "missing barrier": Fault(
        1,
        "runtime_error",
        r"race on shared memory at offset 128 \(4 bytes\): thread 0 read at faulty/kernel.cuh:\d+, thread 32 wrote at "
        r"faulty/kernel.cuh:\d+, no barrier between \(block 0,0,0\)",
    ),
    "divergent barrier": Fault(
        2,
        "runtime_error",
        r"divergent barrier in block 0,0,0: threads 0-31 wait at faulty/kernel.cuh:\d+; threads 32-63 wait",
    ),
    "early exit": Fault(3, "runtime_error", r"threads 0-31 wait at faulty/kernel.cuh:\d+; threads 32-63 have exited"),
    "read outside of a buffer": Fault(
        4, "runtime_error", r"read of 4 bytes at offset 1048 of in \(1036 bytes\): outside"
    ),
    "write before a buffer": Fault(
        5, "runtime_error", r"write of 4 bytes at offset -4 of out \(1036 bytes\): outside of it"
    ),
    "unchecked read outside": Fault(
        6, "runtime_error", r"segmentation fault: unchecked access at offset 1064 of in .*thread 0,0,0"
    ),
    "unchecked write before": Fault(
        7, "runtime_error", r"unchecked write at offset -\d+ of out \(1036 bytes\), outside of it"
    ),
    "misaligned read": Fault(8, "runtime_error", r"read of 8 bytes at offset \d of in .*: misaligned"),
    "shared memory overflow": Fault(
        9, "runtime_error", r"write of 4 bytes at offset 256 of shared memory: outside of its 256"
    ),
    "misaligned shared write": Fault(
        10, "runtime_error", r"write of 16 bytes at offset 4 of shared memory: misaligned"
    ),
    "shared memory that was never written": Fault(
        11, "incorrect", r"8 of 256 elements are wrong; the first is out\[0, 8\] = nan"
    ),
    "endless loop": Fault(12, "run_timeout", r"still running after 0.3 CPU seconds \(block 0,0,0 thread 0,0,0"),
    "endless loop of barriers": Fault(13, "run_timeout", r"still running after 0.3 CPU seconds"),
    "output not written": Fault(14, "incorrect", r"2 of 256 elements are wrong; the first is out\[0, 127\] = nan"),
    "input overwritten": Fault(15, "runtime_error", r"write of 4 bytes at offset 0 of in .*: it is an input"),
    "unchecked write to input": Fault(
        16, "runtime_error", r"unchecked access at offset 0 of in \(1036 bytes\), an input"
    ),
    "division by zero": Fault(17, "runtime_error", r"arithmetic fault"),
    "stack overflow": Fault(18, "runtime_error", r"the thread's stack of \d+ bytes overflowed"),
    "null pointer": Fault(19, "runtime_error", r"segmentation fault: unchecked access at address"),
    "result depends on the order": Fault(21, "incorrect", r"elements are wrong"),
    "bits depend on the order": Fault(
        22, "incorrect", r"\d+ of 256 elements differ between two runs on the same inputs"
    ),
    "lanes of a warp in step": Fault(
        32, "runtime_error", r"thread 0 wrote at .*, thread 1 read at .*, no barrier between"
    ),
    "write between rows": Fault(23, "incorrect", r"wrote between the rows of out, at element 128"),
    "read between rows": Fault(24, "incorrect", r"2 of 256 elements are wrong; the first is out\[0, 0\] = nan"),
    "impossible launch": Fault(25, "runtime_error", r"invalid launch: block.x is 2048, allowed is 1 to 1024"),
    "does not compile": Fault(26, "compile_error", r"'no_such_field' is not a member of"),
    "trap": Fault(27, "runtime_error", r"an illegal instruction|trap"),
    "an element outside of a fragment": Fault(36, "runtime_error", r"an element outside of an array of its own|trap"),
    "ends the process": Fault(28, "runtime_error", r"the process ended with exit status 3"),
    "forges an answer": Fault(33, "runtime_error", r"wrote into the pipe to its parent: '\{\"kernel\": 0\}'"),
    "approximate only": Fault(30, "incorrect", r"expected -?\d.* within 1e-05 \[normal inputs"),
}
RIGHT = (0, 60, 61)  # first, in the middle and last of a group: whatever happens around them, they are ok


@pytest.fixture(scope="module")
def faulty_operator() -> Iterator[None]:
    with loaded([FAULTY]):
        yield


@pytest.fixture(scope="module")
def verdicts(faulty_operator: None) -> Mapping[int, CpuVerdict]:
    """All faults and the right kernels in one group, one verification."""
    numbers = [fault.number for fault in FAULTS.values()]
    half = len(numbers) // 2
    numbers = [RIGHT[0], *numbers[:half], RIGHT[1], *numbers[half:], RIGHT[2]]
    verdicts = verify([faulty_kernel(number) for number in numbers], kernel_cpu_seconds=0.3)
    return dict(zip(numbers, verdicts, strict=True))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_gets_its_verdict_and_words_that_lead_to_it(name: str, verdicts: Mapping[int, CpuVerdict]) -> None:
    fault = FAULTS[name]
    if name == "division by zero" and platform.machine() == "aarch64":
        pytest.skip("aarch64 divides by zero without a trap")
    verdict = verdicts[fault.number]
    assert verdict.verdict == fault.verdict, verdict.message
    assert re.search(fault.words, verdict.message)


def test_bits_may_depend_on_the_order_of_warps_where_the_operator_says_so(faulty_operator: None) -> None:
    silent, declared = verify([faulty_kernel(34), faulty_kernel(35)])
    assert silent.verdict == "incorrect"
    assert re.search(r"elements differ between two runs on the same inputs \[normal inputs", silent.message)
    assert declared.verdict == "ok", declared.message
    assert operator("faulty").deterministic(faulty_kernel(34)) and not operator("faulty").deterministic(
        faulty_kernel(35)
    )


@pytest.mark.parametrize(
    "name", ["read outside of a buffer", "misaligned read", "shared memory overflow", "input overwritten"]
)
def test_a_refused_access_names_its_line(name: str, verdicts: Mapping[int, CpuVerdict]) -> None:
    fault = FAULTS[name]
    assert f"faulty/kernel.cuh:{fault.line()}: " in verdicts[fault.number].message


def test_a_failure_says_with_which_inputs_and_order_it_happened(verdicts: Mapping[int, CpuVerdict]) -> None:
    message = verdicts[FAULTS["missing barrier"].number].message
    assert message.endswith("[integer inputs, extents [2, 128, 131], launch [], ascending warps]")


@pytest.mark.parametrize("number", RIGHT)
def test_right_kernels_of_the_same_group_are_ok(number: int, verdicts: Mapping[int, CpuVerdict]) -> None:
    assert (verdicts[number].verdict, verdicts[number].message) == ("ok", "")


def test_a_verdict_records_what_was_run_and_what_it_cost(verdicts: Mapping[int, CpuVerdict]) -> None:
    verdict = verdicts[0]
    assert verdict.kernel_id == faulty_kernel(0).id
    assert verdict.details["seed"] == 1
    cases = verdict.details["cases"]
    assert [(case["extents"], case["kind"], case["exact"]) for case in cases] == [
        ([2, 128, 131], "integer", True),
        ([2, 128, 131], "normal", False),
        ([3, 97, 98], "integer", True),
        ([3, 97, 98], "normal", False),
    ]
    assert [run["order"] for run in cases[0]["runs"]] == ["ascending", "descending", "seeded"]
    assert cases[0]["max_error"] == 0.0
    assert 0.0 < cases[1]["max_ratio"] < 1.0
    share = verdict.details["build_seconds"]
    assert verdict.cpu_seconds > share["cpu"] > 0
    assert verdict.wall_seconds > share["wall"] > 0


def test_a_verdict_records_the_accesses_to_shared_memory(verdicts: Mapping[int, CpuVerdict]) -> None:
    text = (FAULTY / "kernel.cuh").read_text().splitlines()
    (writes,) = (i for i, line in enumerate(text, 1) if "C::fault != 11" in line)
    (reads,) = (i for i, line in enumerate(text, 1) if "Vector<float, 1> sum{{load_shared" in line)
    counts = ("warp_accesses", "wavefronts", "ideal")
    # Two blocks in each of 2 and of 3 rows, two warps in each; each problem is race-checked once.
    assert verdicts[0].details["shared_memory"] == [
        {"site": f"faulty/kernel.cuh:{line}", "kind": kind, "bytes": 4, **dict.fromkeys(counts, number)}
        for line, kind, number in ((writes, "write", 20), (reads, "read", 40))
    ]


def test_a_wrong_output_is_recorded_in_numbers(verdicts: Mapping[int, CpuVerdict]) -> None:
    wrong = verdicts[FAULTS["approximate only"].number].details["cases"][1]
    assert wrong["wrong"] == 256
    first = wrong["first_wrong"]
    assert first["index"] == [0, 0]
    assert first["got"] - first["expected"] == pytest.approx(1e-3, rel=1e-2)
    assert first["bound"] == 1e-5


def test_results_are_reported_one_by_one_and_returned_in_the_order_asked() -> None:
    reported: list[str] = []
    kernels = [faulty_kernel(number) for number in (60, 26, 28, 0)]
    verdicts = verify(kernels, on_result=lambda verdict: reported.append(verdict.kernel_id))
    assert [verdict.kernel_id for verdict in verdicts] == [kernel.id for kernel in kernels]
    assert sorted(reported) == sorted(kernel.id for kernel in kernels)
    assert reported[0] == kernels[1].id  # what does not compile is reported first


def test_a_set_cancel_keeps_what_was_verified_and_starts_nothing_more() -> None:
    cancel = threading.Event()
    verdicts = verify([faulty_kernel(n) for n in (28, 0)], cancel=cancel, on_result=lambda verdict: cancel.set())
    assert [verdict.verdict for verdict in verdicts] == ["runtime_error"]
    assert verify([faulty_kernel(0)], cancel=cancel) == []


def test_a_kernel_that_hangs_beyond_its_own_timer_loses_itself_only(monkeypatch: pytest.MonkeyPatch) -> None:
    # The kernel's CPU limit is too long here, so the parent must notice the silence and replace the child. However
    # little of a core the other tests leave to it, it counts as busy.
    monkeypatch.setattr(process_stream, "BUSY_SHARE", 0.01)
    verdicts = verify([faulty_kernel(n) for n in (60, 12, 0)], kernel_cpu_seconds=60, kernel_wall_seconds=3)
    assert [verdict.verdict for verdict in verdicts] == ["ok", "run_timeout", "ok"]


def test_where_a_compiler_names_no_kernel_halves_are_compiled() -> None:
    kernels = [faulty_kernel(n) for n in (0, 60, 61)]

    class Crashing(Processes):
        def run(self, argv: Any, **options: Any) -> Finished:
            sources = [
                Path(options["cwd"], word) for word in argv if word.startswith("group_") and word.endswith(".cpp")
            ]
            if not any(kernels[1].namespace in source.read_text() for source in sources):
                return super().run(argv, **options)
            words = b"internal compiler error: Segmentation fault"
            return Finished(tuple(argv), 1, b"", words, 0.1, 0.1, 1, None)

    verdicts = verify(kernels, runner=Crashing())
    assert [verdict.verdict for verdict in verdicts] == ["ok", "compile_error", "ok"]
    assert "internal compiler error" in verdicts[1].message


@pytest.mark.parametrize(
    ("name", "field", "least"), [("cpu", "cpu_seconds", 0.01), ("memory", "memory_bytes", 1 << 20)]
)
def test_a_compiler_that_reached_a_limit_of_ours_is_remembered_with_it(name: str, field: str, least: float) -> None:
    (verdict,) = verify([faulty_kernel(0)], limits=replace(LIMITS, **{field: least}))
    assert verdict.verdict == "compile_error"
    assert f"limit on {name}" in verdict.message
    assert verdict.details["limit"] == {name: least}


def test_a_test_plan_that_fails_is_no_verdict(tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    text = "".join(operator("faulty").kernel_texts.values())
    (folder / "kernel.cuh").write_text(text.replace("namespace faulty", "namespace broken"))
    (folder / "__init__.py").write_text(
        "import importlib.util\nimport sys\nfrom pathlib import Path\n\n"
        f"spec = importlib.util.spec_from_file_location('faulty_again', {str(FAULTY / '__init__.py')!r})\n"
        "sys.modules['faulty_again'] = faulty = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(faulty)\n\n\n"
        "class Broken(faulty.Faulty):\n    name = 'broken'\n    folder = Path(__file__).parent\n\n"
        "    def reference(self, problem, inputs, exact=False):\n"
        "        raise ArithmeticError('no reference today')\n\n\n"
        "OPERATOR = Broken()\n"
    )
    with loaded([folder]), pytest.raises(InfrastructureError, match="no reference today"):
        verify([replace(faulty_kernel(0), operator="broken")])


SANITIZED = {
    "unchecked write before": (7, r"AddressSanitizer: use-after-poison"),
    "local array overflow": (29, r"index 4 out of bounds for type 'float \[4\]'"),
    "divergent barrier": (2, r"divergent barrier"),
    "missing barrier": (1, r"race on shared memory"),
}


@pytest.fixture(scope="module")
def sanitized(faulty_operator: None) -> Mapping[int, CpuVerdict]:
    numbers = [0, *(number for number, _ in SANITIZED.values()), 60]
    verdicts = verify([faulty_kernel(number) for number in numbers], sanitize=True)
    return dict(zip(numbers, verdicts, strict=True))


@pytest.mark.parametrize("name", SANITIZED)
def test_the_sanitized_build_reports_too_and_sees_more(name: str, sanitized: Mapping[int, CpuVerdict]) -> None:
    number, words = SANITIZED[name]
    assert sanitized[number].verdict in ("runtime_error", "incorrect")
    assert re.search(words, sanitized[number].message)


def test_right_kernels_are_ok_in_the_sanitized_build(sanitized: Mapping[int, CpuVerdict]) -> None:
    assert [sanitized[number].verdict for number in (0, 60)] == ["ok", "ok"]


def test_the_child_tells_each_start_and_verdict_and_stops_once_it_may_be_damaged(
    tmp_path: Path,
) -> None:
    kernels = [faulty_kernel(number) for number in (0, 14, 30, 22, 25, 7, 60)]
    build = build_cpu(kernels, toolchain(), processes(), LIMITS, folder=tmp_path)
    ((library, _),) = build.libraries
    request = {
        "library": str(library),
        "kernels": [kernel.to_json() for kernel in kernels],
        "operators": {"faulty": str(FAULTY)},
        "seed": 3,
        "cpu_seconds": 5.0,
    }
    said: list[dict[str, Any]] = []
    run_kernels(request, said.append)
    assert [line["start"] for line in said[::2]] == [kernel.id for kernel in kernels[:-1]]
    assert [(line["kernel"], line["verdict"]) for line in said[1::2]] == [
        (kernels[0].id, "ok"),
        (kernels[1].id, "incorrect"),
        (kernels[2].id, "incorrect"),
        (kernels[3].id, "incorrect"),
        (kernels[4].id, "runtime_error"),
        (kernels[5].id, "runtime_error"),  # wrote where it must not: the next kernel might suffer from it
    ]
    assert said[3]["details"]["cases"][0]["max_error"] is None  # NaN, which JSON does not have


class _Said:
    """Stands in for the processes of children: one that says these lines, all of them in one read."""

    def __init__(self, *lines: bytes) -> None:
        self._lines = lines
        self.finished = Finished(("child",), -9, b"", b"", 0.1, 0.1, 0, "cancelled")

    def private_folder(self, name: str) -> contextlib.AbstractContextManager[Path]:
        return contextlib.nullcontext(Path(tempfile.mkdtemp()))

    def stream(self, argv: object, **named: object) -> contextlib.AbstractContextManager[_Said]:
        return contextlib.nullcontext(self)

    def lines(self, silence: float) -> Iterator[bytes]:
        yield from self._lines

    def kill(self) -> None:
        """The lines are there already."""


def test_what_a_child_says_in_one_breath_with_garbage_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = faulty_kernel(1)
    verdict = {"kernel": kernel.id, "verdict": "ok", "message": "", "wall_seconds": 0.1, "cpu_seconds": 0.1}
    said: Any = _Said(json.dumps({"start": kernel.id}).encode(), b"garbage", json.dumps(verdict).encode())
    monkeypatch.setattr(cpu_verify, "new_key", lambda: b"")  # such lines bear no mark
    monkeypatch.setattr(
        cpu_verify, "build_cpu", lambda kernels, *_, folder, **__: CpuBuild([(folder / "k.so", kernels)])
    )
    (verdict,) = cpu_verify.verify_on_cpu([kernel], toolchain(), said, LIMITS, seed=1)
    assert (verdict.verdict, verdict.message) == ("runtime_error", "wrote into the pipe to its parent: 'garbage'")
