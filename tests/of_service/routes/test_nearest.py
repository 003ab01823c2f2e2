"""Lookups with `on_miss: nearest`: kernels of a neighbour, right for the problem, until its own are tuned."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from codegen.identity import winner_key
from codegen.kernel import Candidate, Kernel
from codegen.lower import lower
from codegen.operators import operator
from codegen.plan.verification_plan import Case, Run
from codegen.search.search import Search
from codegen.targets import target
from codegen.text.winner_text import winner_library_id
from cukiln.types import FrontEntry, Launch, WinnerRecord
from storage.entities.libraries import add_library, find_library
from storage.entities.winners import get_winners, publish_winner, withdraw_winner
from tests.support.fixtures.compile import LIMITS
from tests.support.fixtures.library import Child, calls, launches
from tests.support.kernels.compile_cache import CachingProcesses
from tests.support.run.each_run import one_each_run
from tests.support.service.worked_api import WorkedApi
from workers.compile.toolchain import Toolchain
from workers.cpu.build import build_cpu
from workers.cpu.cpu_check import KernelTest
from workers.cpu.library import CpuLibrary
from workers.steps.winner_library import plan_launch

TARGET = "sm_80"
SHEET = target(TARGET)
RESOURCES = {
    "registers": 64, "static_shared_bytes": 0, "spill_load_bytes": 0, "spill_store_bytes": 0, "stack_bytes": 0,
    "barriers": 1,
}  # fmt: skip
MATMUL: dict[str, Any] = {"operator": "matmul", "m": 96, "n": 64, "k": 48, "layout": "nn", "dtype": "float32"}
SIMT = {
    "tile_m": 32, "tile_n": 32, "tile_k": 8, "thread_m": 4, "thread_n": 4, "warp_m": 4, "stages": 1, "fragments": 1,
    "padding": 0, "unroll_k": 4, "min_blocks": 1,
}  # fmt: skip
IMAGE: dict[str, Any] = {
    "operator": "conv2d", "n": 1, "c": 8, "h": 9, "w": 9, "k": 16, "r": 3, "s": 3, "layout": "nhwc", "dtype": "float32",
}  # fmt: skip
ATTENTION: dict[str, Any] = {
    "operator": "attention", "batch": 1, "heads_q": 2, "seq_q": 40, "seq_kv": 40, "head_dim_qk": 32, "dtype": "float16",
}  # fmt: skip
NEIGHBOURS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "matmul": (MATMUL, {"m": 41, "n": 100, "k": 52}),
    "conv2d": (IMAGE, {"n": 2, "h": 7, "w": 10}),
    "softmax": ({"operator": "softmax", "shape": [12, 64], "dtype": "float32"}, {"shape": [5, 44]}),
    "attention": (ATTENTION, {"heads_q": 1, "seq_q": 41, "seq_kv": 57}),
}
"""By operator: what is tuned, and how the problem that is looked up differs."""


class Place(WorkedApi):
    """A service of which neighbours are asked."""

    def look_up(self, *problems: dict[str, Any], on_miss: str = "nearest", **fields: Any) -> Any:
        body = {"target": TARGET, "problems": problems, "search": {"schedules": [SIMT]}, "on_miss": on_miss, **fields}
        answer = self.api.client.post("/v1/lookups", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def nearest(self, problem: dict[str, Any], **fields: Any) -> WinnerRecord | None:
        record = self.look_up(problem, **fields)["results"][0]["record"]
        return None if record is None else WinnerRecord.model_validate(record)

    def publish(self, problem: dict[str, Any], *candidates: Candidate, **more: Any) -> WinnerRecord:
        """A record as the finish step leaves it, of libraries whose bytes nothing here reads."""
        parsed = operator(problem["operator"]).parse(problem)
        device_class = more.pop("device_class", f"predicted:{TARGET}")
        key = winner_key(parsed.digest, TARGET, device_class)
        chosen = candidates or (first(problem),)
        with self.api.database.write() as session:
            front = []
            for candidate in chosen:
                named = winner_library_id(candidate, SHEET, self.toolchain.digest)
                add_library(
                    session, id=named, kernel=candidate.kernel.id, toolchain=self.toolchain.digest, code_digest=named,
                    resources=RESOURCES, library=named, cubin=named, source=named, ptx=None, sass=None,
                )  # fmt: skip
                built = find_library(session, named)  # by the test of the whole way, say
                assert built is not None
                front.append(self._entry(candidate, more.get("library", built.library), more.get("measured_us")))
            record = WinnerRecord(
                key=key, revision=0, operator=parsed.operator, problem=parsed.canonical(), target=TARGET,
                device_class=device_class, ranked_by="predicted" if "measured_us" not in more else "measured",
                front=front, searches=[], updated_at=time.time(),
            )  # fmt: skip
            publish_winner(session, record, attempt=uuid.uuid4().hex)
            return get_winners(session, [key])[key]

    def _entry(self, candidate: Candidate, library: str, measured_us: float | None) -> FrontEntry:
        own = operator(candidate.kernel.operator)
        needed = own.cost(candidate.problem, candidate.schedule).workspace_bytes
        launch = Launch(operands=[], extents={}, launch={}, scalars=[], functions=[], workspace_bytes=needed)
        return FrontEntry(
            candidate=candidate.id, schedule=candidate.schedule.as_dict(), kernel=candidate.kernel.id,
            so_sha256=library, cubin_sha256=library, source_sha256=library, code_digest=library,
            toolchain=self.toolchain.digest, launch=launch, workspace_bytes=needed,
            deterministic=own.deterministic(candidate.kernel), verified="cpu", verdict={"venue": "cpu"},
            resources=RESOURCES, predicted_us=7.0, prediction=None, measured_us=measured_us,
        )  # fmt: skip


def first(problem: dict[str, Any], **schedule: Any) -> Candidate:
    """Of the schedule, else of level 0."""
    search = Search(schedules=[schedule]) if schedule else Search(level=0)
    lowered = lower(operator(problem["operator"]).parse(problem), SHEET, search)
    assert lowered.candidates, lowered.why_empty
    return lowered.candidates[0]


def simt(problem: dict[str, Any], **schedule: Any) -> Candidate:
    return first(problem, **{**SIMT, **schedule})


@pytest.fixture(scope="module")
def service(
    tmp_path_factory: pytest.TempPathFactory, caching_processes: CachingProcesses, toolchain: Toolchain
) -> Iterator[Place]:
    with Place.over(tmp_path_factory.mktemp("nearest"), caching_processes, toolchain) as place:
        yield place


@pytest.fixture
def place(service: Place) -> Iterator[Place]:
    """With no records but those of the test."""
    yield service
    with service.api.database.write() as session:
        for key in [row[0] for row in session.connection().exec_driver_sql("SELECT key FROM winners").all()]:
            withdraw_winner(session, key, uuid.uuid4().hex)
    for job in service.api.client.get("/v1/jobs").json()["jobs"]:
        service.api.client.delete(f"/v1/jobs/{job['job']}")
    service.api.service.winners.entries.clear()


@one_each_run("nearest", 0)
def test_a_miss_gets_a_neighbours_kernel_now_and_its_own_winner_later(
    place: Place, folder: Path, fake_driver: Path
) -> None:
    """The whole way, with a library that was really built."""
    near = {**MATMUL, "m": 100, "n": 132}
    job = place.api.submit(MATMUL, target=TARGET, search={"schedules": [{**SIMT, "split": "workspace", "split_k": 3}]})
    assert job.status_code == 202, job.text
    place.work()
    tuned = place.nearest(MATMUL, on_miss="none")
    assert tuned is not None and tuned.tuned_for is None and place.look_up(near, on_miss="none")["hits"] == 0

    answer = place.look_up(near)
    (result,) = answer["results"]
    record = WinnerRecord.model_validate(result["record"])
    assert (answer["hits"], answer["misses"], result["tuning"]["state"]) == (0, 1, "queued")
    assert result["key"] == record.key == winner_key(operator("matmul").parse(near).digest, TARGET, "predicted:sm_80")
    assert record.problem == operator("matmul").parse(near).canonical() and record.revision == 0
    assert record.tuned_for is not None
    assert (record.tuned_for.key, record.tuned_for.problem) == (tuned.key, tuned.problem)
    (entry,), (theirs,) = record.front, tuned.front
    assert (entry.so_sha256, entry.verdict, entry.verified) == (theirs.so_sha256, theirs.verdict, theirs.verified)
    assert entry.predicted_us != theirs.predicted_us and record.ranked_by == "predicted"

    candidate = operator("matmul").candidate(
        operator("matmul").parse(near), simt(near, split="workspace", split_k=3).schedule
    )
    planned = plan_launch(candidate, place.toolchain, place.processes, LIMITS)
    assert entry.candidate == candidate.id
    assert entry.launch == planned.model_copy(update={"functions": []})
    assert entry.workspace_bytes == planned.workspace_bytes == 4 * 3 * 100 * 132
    (folder / "near.so").write_bytes(place.api.client.get(f"/v1/blobs/sha256/{entry.so_sha256}").content)
    body = f"""
    extents = {list(entry.launch.extents.values())}
    run = attempt("run", T((100, 48)), T((48, 132)), T((100, 132)), 0x60000000)
    answer = [attempt("workspace_bytes", *extents), run]
    """
    outcome, log = Child(folder, place.processes)(calls(folder / "near.so", body), driver=fake_driver)
    assert outcome == [entry.workspace_bytes, None]
    assert [(launch["grid"], launch["block"], launch["shared"]) for launch in launches(log)] == [
        (function.grid, function.block, function.shared_bytes) for function in planned.functions
    ]

    place.work()  # what the lookup queued
    own = place.look_up(near)["results"][0]
    assert own["record"]["tuned_for"] is None and own["record"]["revision"] == 1 and "tuning" not in own
    assert own["key"] == record.key


@pytest.fixture(scope="module")
def emulated(service: Place, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, CpuLibrary]:
    """By kernel: one file has all."""
    kernels = [first(problem).kernel for problem, _ in NEIGHBOURS.values()]
    build = build_cpu(kernels, service.toolchain, service.processes, LIMITS, folder=tmp_path_factory.mktemp("emulated"))
    assert not build.errors
    return {kernel.id: CpuLibrary(path) for path, some in build.libraries for kernel in some}


class AsRecorded:
    """An operator, but that what a call gets is what the record says."""

    def __init__(self, record: WinnerRecord) -> None:
        self._own, self._launch = operator(record.operator), record.front[0].launch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def integers(self, problem: Any) -> list[int]:
        return [*self._launch.extents.values(), *self._launch.attributes.values()]

    def scalars(self, problem: Any) -> list[float]:
        return self._launch.scalars


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_the_kernel_computes_the_problem_with_the_records_call(
    name: str, place: Place, emulated: Mapping[str, CpuLibrary]
) -> None:
    tuned, change = NEIGHBOURS[name]
    theirs = place.publish(tuned)
    record = place.nearest({**tuned, **change})
    assert record is not None and record.tuned_for is not None and record.tuned_for.key == theirs.key
    entry = record.front[0]
    problem = operator(name).parse({**tuned, **change})
    described = [(o.name, tuple(o.shape), tuple(o.strides)) for o in entry.launch.operands]
    assert described == [(o.name, o.shape, o.strides) for o in operator(name).operands(problem)]
    kernel: Kernel = first(tuned).kernel
    library, values = emulated[kernel.id], tuple(entry.launch.launch.values())
    scratch = library.workspace(kernel.namespace, AsRecorded(record).integers(problem), values)
    assert entry.workspace_bytes == (0 if scratch is None else scratch.size)
    library.free()
    cases = [
        Case(problem, kind, False, 7, (Run("seeded", values, 7), Run("descending", values, 8)))
        for kind in ("integer", "normal")
    ]
    test = KernelTest(library, kernel.namespace, AsRecorded(record), cases, repeats=True, cpu_seconds=60)
    assert test.failure() is None


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"layout": "nt"},
        {"n": 65},  # rows of b and of the output begin at no multiple of 16 bytes
        {"epilogue": [{"op": "relu"}]},
        {"out_dtype": "float16"},
        {"target": "sm_90a"},
    ],
    ids=str,
)
def test_what_has_another_kernel_is_no_neighbour(change: dict[str, Any], place: Place) -> None:
    place.publish(MATMUL, simt(MATMUL))
    assert place.nearest({**MATMUL, "m": 33}) is not None
    assert place.nearest({**MATMUL, "m": 33, **change}) is None


def test_a_schedule_that_the_problem_cannot_have_is_left_out(place: Place) -> None:
    whole = first({**MATMUL, "dtype": "float16", "k": 64}, **TENSOR, static_k=64)
    place.publish({**MATMUL, "dtype": "float16", "k": 64}, whole)
    assert place.nearest({**MATMUL, "dtype": "float16", "k": 64, "m": 64}) is not None
    assert place.nearest({**MATMUL, "dtype": "float16", "k": 128}) is None  # its kernel has 64 compiled into it
    with place.api.database.write() as session:
        withdraw_winner(session, winner_key(whole.problem.digest, TARGET, f"predicted:{TARGET}"), "x")
    place.publish(MATMUL, simt(MATMUL, split="workspace", split_k=3))
    assert place.nearest({**MATMUL, "k": 24}) is not None
    assert place.nearest({**MATMUL, "k": 8}) is None  # two of three slices would be empty


TENSOR = {
    "tile_m": 32, "tile_n": 32, "tile_k": 32, "warps_m": 2, "warps_n": 1, "stages": 2, "fragments": 1,
    "copy": "cp_async", "epilogue_path": "direct", "split": "none",
}  # fmt: skip


def test_the_policy_of_the_lookup_holds_for_neighbours(place: Place) -> None:
    split = simt(MATMUL, split="workspace", split_k=2)
    atomic = simt(MATMUL, split="atomic", split_k=2)
    place.publish(MATMUL, split, atomic)
    near = {**MATMUL, "m": 128}
    needed = 4 * 2 * 128 * 64
    of_limit = [place.nearest(near, workspace_limit_bytes=limit) for limit in (needed, needed - 1)]
    kept = [[entry.schedule["split"] for entry in record.front] if record else [] for record in of_limit]
    assert "workspace" in kept[0] and "workspace" not in kept[1]
    same_bits = place.nearest(near, deterministic=True)
    assert same_bits is not None and [entry.schedule["split"] for entry in same_bits.front] == ["workspace"]
    assert place.nearest(near, deterministic=True, workspace_limit_bytes=0) is None


def test_a_library_of_another_source_is_no_neighbours(place: Place) -> None:
    """The record is of an earlier release, say: today's rules say nothing of its kernel."""
    place.publish(MATMUL, simt(MATMUL, unroll_k=8), library="0" * 64)
    assert place.nearest({**MATMUL, "m": 33}) is None


def test_a_record_without_resources_lends_nothing(place: Place) -> None:
    """Its time cannot be predicted for another problem."""
    bare = place.publish(MATMUL, simt(MATMUL))
    with place.api.database.write() as session:
        front = [entry.model_copy(update={"resources": {}}) for entry in bare.front]
        publish_winner(session, bare.model_copy(update={"front": front}), attempt=uuid.uuid4().hex)
    assert place.nearest({**MATMUL, "m": 33}) is None


def test_offsets_beyond_31_bits_need_a_neighbour_that_has_them(place: Place) -> None:
    far = {**MATMUL, "m": 2**20, "k": 1024}  # a has 4 GiB
    near = {**far, "m": 2**18}
    place.publish(near, simt(near))
    assert place.nearest({**far, "m": 2**19 - 8}) is not None
    assert place.nearest(far) is None
    place.publish({**far, "m": 2**21}, simt({**far, "m": 2**21}))
    answered = place.nearest(far)
    assert answered is not None and answered.tuned_for is not None and answered.tuned_for.problem["m"] == 2**21


def test_so_does_a_workspace_beyond_31_bits(place: Place) -> None:
    """Of Winograd, whose transformed image is larger than the image."""

    def tuned(n: int) -> tuple[dict[str, Any], Candidate]:
        problem = {**IMAGE, "n": n, "h": 112, "w": 112, "c": 64, "k": 64, "padding": 1, "winograd": "f2"}
        search = Search(tunables={"algorithm": ["winograd"]}, limit=1)
        return problem, lower(operator("conv2d").parse(problem), SHEET, search).candidates[0]

    far, candidate = tuned(128)
    assert operator("conv2d").cost(candidate.problem, candidate.schedule).workspace_bytes > 2**31
    place.publish(*tuned(32))
    assert place.nearest(tuned(48)[0]) is not None
    assert place.nearest(far) is None
    place.publish(*tuned(160))
    assert place.nearest(far) is not None


def test_the_nearest_by_the_ratio_of_its_extents_answers(place: Place) -> None:
    for m in (32, 96, 3000):
        place.publish({**MATMUL, "m": m}, simt({**MATMUL, "m": m}))
    for m, nearest in ((50, 32), (60, 96), (200, 96), (900, 3000)):
        record = place.nearest({**MATMUL, "m": m})
        assert record is not None and record.tuned_for is not None and record.tuned_for.problem["m"] == nearest
    assert record.tuned_for.distance == pytest.approx(2 * 1.736966, abs=1e-5)  # m is an extent of a and of the output


def test_the_next_nearest_answers_where_the_nearest_cannot(place: Place) -> None:
    place.publish({**MATMUL, "k": 56}, simt({**MATMUL, "k": 56}, split="workspace", split_k=7))
    plain = place.publish({**MATMUL, "k": 1024}, simt({**MATMUL, "k": 1024}))
    record = place.nearest({**MATMUL, "k": 40})
    assert record is not None and record.tuned_for is not None and record.tuned_for.key == plain.key


def test_what_was_measured_of_the_neighbour_is_not_said_of_the_problem(place: Place) -> None:
    theirs = place.publish(MATMUL, simt(MATMUL), device_class="NVIDIA A100", measured_us=3.0)
    record = place.nearest({**MATMUL, "m": 48})
    assert record is not None and record.tuned_for is not None
    assert record.tuned_for.device_class == theirs.device_class and record.device_class == f"predicted:{TARGET}"
    entry = record.front[0]
    assert (record.ranked_by, entry.measured_us, entry.measurement, entry.measured_on) == (
        "predicted",
        None,
        None,
        None,
    )
    assert record.vendor is None and record.runner_up is None and record.searches == []


def test_fields_are_those_of_a_neighbours_record_too(place: Place) -> None:
    place.publish(MATMUL, simt(MATMUL))
    answer = place.look_up({**MATMUL, "m": 33}, fields=["tuned_for", "front.so_sha256"])["results"][0]["record"]
    assert answer["tuned_for"]["problem"]["m"] == 96 and list(answer["front"][0]) == ["so_sha256"]


def test_a_record_that_was_withdrawn_is_no_neighbour(place: Place) -> None:
    theirs = place.publish(MATMUL, simt(MATMUL))
    with place.api.database.write() as session:
        withdraw_winner(session, theirs.key, "token")
    assert place.nearest({**MATMUL, "m": 33}) is None
