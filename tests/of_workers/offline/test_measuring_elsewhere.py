"""The three commands: what is carried, a run on a bare machine that is killed and continued, what is brought back."""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from cukiln.cli.elsewhere import compile_bundle, import_results, packing, size_of, winner_library
from cukiln.client import Client
from cukiln.errors import UsageError
from cukiln.types import ENDED, Job
from tests.gpu import confirm_primitives
from tests.gpu.check_workspaces import split_kernel
from tests.support.fixtures.bare_machine import PYTHON, BareMachine, make_wheels
from tests.support.fixtures.elsewhere import FAKE_GPU, REQUEST, ROOT, installed_for, lines_of, results_in
from tests.support.fixtures.queue import wait_for
from tests.support.gpu import fake_gpu
from workers.gpu.interface import Device
from workers.gpu.task import CandidateResult
from workers.offline import brought_back, there
from workers.offline.brought_back import MOST_BYTES, MOST_FILES, bring_back, restore
from workers.offline.carry import MOST_BYTES as MOST_CARRIED
from workers.offline.carry import NotCarried, pack
from workers.offline.measure_there import DEFAULT_INTO
from workers.offline.measured import Conditions, Journal, append_line, write_results
from workers.offline.parts import CUTS, LEFT_OPEN, Ended, Part, Progress, parts_of

PART_BYTES = 1 << 20


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels") / "wheels"
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    make_wheels((Requirement(line).name for line in groups["elsewhere"]), folder)
    return folder


@pytest.fixture(scope="module")
def bundle(exported: Path, compiling: Client) -> Path:
    """With a library for the check of workspaces: here any winner's."""
    request = {"target": "sm_90a", **REQUEST, "problems": REQUEST["problems"][1:]}  # type: ignore[index]
    (exported / "workspaces.so").write_bytes(winner_library(compiling, request))
    return exported


@pytest.fixture(scope="module")
def carried(bundle: Path, wheels: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("carried") / "carried"
    pack(bundle, folder, wheels=wheels, part_bytes=PART_BYTES)
    return folder


@pytest.fixture
def machine(carried: Path, tmp_path: Path) -> BareMachine:
    return BareMachine(tmp_path, carried)


MOST_CALLS = 5  # a slow machine needs more than one budget


def killed(machine: BareMachine, when: Callable[[], Any], *words: str) -> None:
    """Run until then, and kill it as the end of a lease does; where its budget ends before, call it again."""

    def is_over(running: subprocess.Popen[bytes]) -> bool:
        return running.poll() is not None

    for _ in range(MOST_CALLS):
        running = machine.start(*words)
        wait_for(lambda running=running: when() or is_over(running), seconds=240, what="the moment to kill it")
        if not is_over(running):
            break
    running.send_signal(signal.SIGKILL)
    assert running.wait() == -signal.SIGKILL, (machine.folder / "log").read_text()


def ended_well(machine: BareMachine, *words: str) -> str:
    """Call until nothing is left to measure; what the last call said."""
    for _ in range(MOST_CALLS):
        ended = machine.run(*words)
        report = json.loads((machine.back / "report.json").read_bytes())
        if report["parts"]["candidates and vendor"].startswith("exit status 0"):
            break
    return ended.stdout + ended.stderr


def rehearse(machine: BareMachine, client: Client, count: int, problems: int) -> None:
    """Killed three times, each time later, then run to its end; `count`: of candidates."""
    journal = machine.into / "measured" / "measured.jsonl"
    moments: list[Callable[[], Any]] = [
        lambda: (machine.into / ".installing").is_dir(),
        lambda: lines_of(journal, "result"),
        lambda: lines_of(journal, "compared"),
    ]
    before: list[list[dict[str, Any]]] = []
    for moment in moments:
        killed(machine, moment, "--budget", "120")
        before.append(lines_of(journal, "result"))
    first = [client.wait(job) for job in import_results(client, machine.into / "measured")]
    assert all(job.state in ENDED for job in first), "a partial result is imported"
    said = ended_well(machine, "--budget", "120")
    results, compared = lines_of(journal, "result"), lines_of(journal, "compared")
    assert len(results) == len({result["candidate"] for result in results}) == count, said
    assert len(compared) == len(set(map(tuple, compared))) >= problems
    assert [result["verdict"] for result in results] == ["ok"] * count
    for some in before:
        assert results[: len(some)] == some, "nothing that was measured is lost"
    tries = lines_of(machine.into / "parts.jsonl", "ended")
    # What is not there is looked for again; the ceilings were measured once.
    assert sum(1 for each in parts_ended(machine) if each == "ceilings") == 1 and tries[-1]["status"] == 0
    files = {path.name: path.stat().st_size for path in machine.back.iterdir()}
    assert len(files) <= MOST_FILES and max(files.values()) <= MOST_BYTES
    report = json.loads((machine.back / "report.json").read_bytes())
    assert report["parts"]["candidates and vendor"].startswith("exit status 0")
    assert report["parts"]["primitives"].startswith("not run: no compiler: ")
    assert report["parts"]["workspaces"].startswith("not run: simulated_gpu does not drive CuPy")
    assert not report["parts"]["measuring checks"].startswith(("exit status 1", "exit status 2"))
    assert "missing" in report["libraries"]["CuPy"] and "is" in report["libraries"]["NumPy"]
    jobs = [client.wait(job) for job in import_results(client, machine.back)]
    assert [job.state for job in jobs] == ["done"]
    again = import_results(client, machine.back)
    assert [job.job for job in again] == [job.job for job in jobs] and len(jobs[0].problems) == problems
    for problem in jobs[0].problems:
        assert problem.winner is not None and problem.winner.ranked_by == "measured"


def parts_ended(machine: BareMachine) -> list[str]:
    lines = [json.loads(line) for line in (machine.into / "parts.jsonl").read_text().splitlines()]
    return [line["part"] for line in lines if "ended" in line]


# A killed run: `test_a_killed_run_loses_nothing_that_was_measured`; what is carried runs where nothing else is:
# `test_in_a_checkout_the_carried_modules_run_and_not_those_of_the_folder`, `test_offline_wheels.py`; another card:
# `test_another_card_is_noticed_named_and_kept_apart`.
@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_run_without_a_network_that_is_killed_three_times_loses_nothing_and_measures_nothing_twice(
    machine: BareMachine, compiling: Client
) -> None:
    rehearse(machine, compiling, count=6, problems=2)
    # Another machine with such a card continues from what was brought back: nothing is left to measure there, but what
    # that card itself reaches.
    other = BareMachine(machine.folder / "other", machine.carried, uuid=OTHER.uuid)
    other.folder.mkdir()
    ended = other.run("--budget", "120", "--continue-from", machine.back)
    assert f"continues what {fake_gpu.NAME}, {fake_gpu.UUID}, began" in ended.stdout + ended.stderr
    assert "candidates and vendor: at most" not in ended.stdout and "ceilings: at most" in ended.stdout
    assert json.loads((other.back / "ceilings.json").read_bytes())["uuid"] == OTHER.uuid
    assert lines_of(other.into / "measured" / "measured.jsonl", "result") == lines_of(
        machine.into / "measured" / "measured.jsonl", "result"
    )


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_three_commands_as_they_are_typed(tmp_path: Path, compiling: Client) -> None:
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    problems: list[dict[str, Any]] = [
        *REQUEST["problems"],  # type: ignore[misc]
        {"name": "rows", "operator": "softmax", "shape": [64, 100], "dtype": "float32"},
        {"name": "total", "operator": "reduce", "shape": [64, 96], "axes": [1], "dtype": "float16"},
    ]
    (tmp_path / "model.json").write_text(json.dumps({"search": {"level": 1, "limit": 3}, "problems": problems}))
    words = ["carry", f"OUT={tmp_path / 'made'}", f"REQUEST={tmp_path / 'model.json'}"]
    words += ["TARGET=sm_90a", "PART_BYTES=4M", f"PYTHON={version}", f"OFFLINE={tmp_path / 'wheels'}"]
    made = subprocess.run(["make", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    carried = tmp_path / "made" / "carried"
    sizes = {path.name: path.stat().st_size for path in carried.iterdir()}
    assert sum(sizes.values()) <= MOST_CARRIED and max(sizes.values()) <= 4 << 20
    assert split_kernel((tmp_path / "made" / "workspaces.so").read_bytes()), "what the check of workspaces calls"
    machine = BareMachine(tmp_path / "machine", carried)
    machine.folder.mkdir()
    bundled = json.loads((tmp_path / "made" / "bundle.json").read_bytes())["problems"]
    rehearse(machine, compiling, sum(len(problem["candidates"]) for problem in bundled), len(problems))


# --- what is carried


def test_parts_have_the_size_that_is_asked_for_and_one_that_is_damaged_is_named(
    carried: Path, tmp_path: Path, machine: BareMachine
) -> None:
    sizes = [path.stat().st_size for path in sorted(carried.glob("carried.zip.*"))]
    assert len(sizes) > 2 and set(sizes[:1]) == {PART_BYTES} and max(sizes) == PART_BYTES
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in carried.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (copy / "carried.zip.2").write_bytes(b"?")
    ended = BareMachine(machine.folder, copy).run()
    assert ended.returncode == 2 and "carried.zip.2 is damaged" in ended.stderr
    assert not list(machine.into.glob("installed-*"))


def test_packages_for_another_python_are_refused_with_the_right_one(carried: Path, tmp_path: Path) -> None:
    (tmp_path / "measure_there.py").write_bytes((carried / "measure_there.py").read_bytes())
    described = json.loads((carried / "carried.json").read_bytes())
    (tmp_path / "carried.json").write_text(json.dumps({**described, "python": "3.99"}))
    ended = BareMachine(tmp_path, tmp_path).run()
    assert ended.returncode == 2 and "the packages are for Python 3.99, this is 3." in ended.stderr


def test_a_python_without_numpy_is_refused_before_anything_is_installed(carried: Path, tmp_path: Path) -> None:
    command = [PYTHON, "-S", str(carried / "measure_there.py")]
    ended = subprocess.run(command, cwd=tmp_path, env={}, capture_output=True, text=True, check=False)
    assert ended.returncode == 2 and "has no NumPy" in ended.stderr and "Traceback" not in ended.stderr
    assert not list((tmp_path / DEFAULT_INTO).iterdir())


def test_a_folder_that_cannot_be_made_is_said(machine: BareMachine) -> None:
    (machine.folder / "taken").write_text("")
    ended = machine.run("--into", machine.folder / "taken" / "folder")
    assert ended.returncode == 2 and "cannot install into" in ended.stderr and "Traceback" not in ended.stderr


def test_what_cannot_be_packed_is_said(
    bundle: Path, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NotCarried, match="make offline-wheels"):
        pack(bundle, tmp_path / "carried", wheels=tmp_path, part_bytes=PART_BYTES)
    monkeypatch.setattr("workers.offline.carry.MOST_BYTES", 1000)
    with pytest.raises(NotCarried, match=r"MB are to be carried, and 0 may be"):
        pack(bundle, tmp_path / "carried", wheels=wheels, part_bytes=PART_BYTES)
    assert not (tmp_path / "carried").exists()


def test_a_folder_of_another_request_is_not_continued(compiling: Client, tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text(json.dumps({"request": "0" * 64, "job": "1" * 32}))
    with pytest.raises(UsageError, match="holds the bundle of another request: name another folder with --out"):
        compile_bundle(compiling, REQUEST, tmp_path)


def test_a_request_that_was_begun_is_continued_by_its_job(compiling: Client, exported_job: Job, tmp_path: Path) -> None:
    digest = hashlib.sha256(json.dumps(REQUEST, sort_keys=True).encode()).hexdigest()
    (tmp_path / "job.json").write_text(json.dumps({"request": digest, "job": exported_job.job}))
    _, bundle = compile_bundle(compiling, REQUEST, tmp_path, seconds=60.0)
    assert bundle["job"] == exported_job.job and (tmp_path / "bundle.json").is_file()


@pytest.mark.parametrize(("text", "size"), [("16M", 16 << 20), ("1000", 1000), ("2K", 2048), ("1G", 1 << 30)])
def test_a_size_is_bytes_or_has_a_unit(text: str, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "0", "16MB", "-1", "1.5M"])
def test_what_is_no_size_is_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="is no size: give bytes, or a number with K, M or G"):
        size_of(text)


def test_what_cannot_be_packed_is_said_before_anything_is_compiled(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="make offline-wheels"):
        packing(tmp_path, "16M")
    with pytest.raises(UsageError, match="is no size"):
        packing(wheels, "16 MB")
    name, request = packing(wheels, "16M").beside("sm_90a")
    assert name == "workspaces.so" and request["target"] == "sm_90a" and len(request["problems"]) == 1


# --- which part is next


CHECK, LAST = Part("check", ("m",), 100), Part("last", ("m",), float("inf"), continues=True, takes_rest=True)


@pytest.mark.parametrize(
    ("ended", "budget", "left", "limit"),
    [
        (None, 500.0, 400.0, 100.0),
        (None, 120.0, 100.0, 30.0),  # a part of the budget
        (None, 500.0, 50.0, 50.0),
        (None, 500.0, 1.0, None),
        (Ended(0, 9.0, 100.0, False), 500.0, 400.0, None),
        (Ended(1, 9.0, 100.0, False), 500.0, 400.0, None),
        (Ended(2, 9.0, 100.0, False), 500.0, 400.0, 100.0),  # no GPU was there
        (Ended(-15, 30.0, 30.0, True), 500.0, 400.0, 100.0),
        (Ended(-15, 100.0, 100.0, True), 500.0, 400.0, None),  # it would have no more
        (Ended(-11, 9.0, 100.0, False), 500.0, 400.0, None),  # it would crash again
        (Ended(LEFT_OPEN, 9.0, 100.0, False), 500.0, 400.0, None),
    ],
)
def test_a_part_has_its_own_limit_and_is_run_again_only_where_that_may_help(
    ended: Ended | None, budget: float, left: float, limit: float | None, tmp_path: Path
) -> None:
    progress = Progress(tmp_path)
    if ended is not None:
        progress.begin(CHECK)
        progress.end(CHECK, ended)
    assert Progress(tmp_path).next_limit(CHECK, budget, left) == limit


def test_a_part_that_continues_where_it_was_cut_off_has_as_much_again_but_not_for_ever(tmp_path: Path) -> None:
    goes_on = replace(CHECK, continues=True)
    goes_on_until_it_is_in_vain(goes_on, Ended(-15, 100.0, 100.0, True), tmp_path)
    assert Progress(tmp_path).next_limit(replace(goes_on, seconds=120.0), 500.0, 400.0) == 120.0, "it has more"


@pytest.mark.parametrize("status", [-signal.SIGSEGV, confirm_primitives.LEFT_OPEN])
def test_a_part_that_continues_does_so_behind_a_crash_and_what_it_left_open(status: int, tmp_path: Path) -> None:
    goes_on_until_it_is_in_vain(replace(CHECK, continues=True), Ended(status, 9.0, 100.0, False), tmp_path)
    Progress(tmp_path).end(CHECK, Ended(1, 9.0, 100.0, False))
    assert Progress(tmp_path).next_limit(replace(CHECK, continues=True), 500.0, 400.0) is None, "all of it was done"


def goes_on_until_it_is_in_vain(goes_on: Part, ended: Ended, tmp_path: Path) -> None:
    tries = 0
    while (limit := Progress(tmp_path).next_limit(goes_on, 500.0, 400.0)) is not None:
        assert limit == 100.0
        Progress(tmp_path).begin(goes_on)
        Progress(tmp_path).end(goes_on, ended)
        tries += 1
    assert tries == CUTS


def test_a_part_with_which_the_run_ended_twice_is_left_out_but_not_the_last(tmp_path: Path) -> None:
    for _ in range(2):
        assert Progress(tmp_path).next_limit(CHECK, 500.0, 400.0) == 100.0
        Progress(tmp_path).begin(CHECK)
        Progress(tmp_path).begin(LAST)
    progress = Progress(tmp_path)
    assert progress.next_limit(CHECK, 500.0, 400.0) is None
    assert progress.next_limit(LAST, 500.0, 400.0) == 400.0
    assert dict(progress.described([CHECK])) == {"check": "the run ended with it, 2 times"}
    progress.end(LAST, Ended(1, 300.0, 400.0, False))
    assert progress.next_limit(LAST, 500.0, 400.0) == 400.0, "something is left"
    progress.end(LAST, Ended(0, 300.0, 400.0, False))
    assert progress.next_limit(LAST, 500.0, 400.0) is None


HANGS = """import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_part_that_hangs_is_ended_at_its_limit_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    log = tmp_path / "hangs.log"

    def clock() -> float:
        """The limit is reached when the part has started what it starts."""
        return 1000.0 if log.is_file() and log.read_text().endswith("\n") else 0.0

    monkeypatch.setattr(there, "time", SimpleNamespace(monotonic=clock, sleep=time.sleep, time=time.time))
    monkeypatch.setattr(there, "GRACE_SECONDS", 0.2)
    part = Part("hangs", ("hangs",), 600)
    ended = there.run_part(part, Progress(tmp_path), 600.0, tmp_path, [part], [], namespaces=True)
    assert ended.cut_off and ended.status == -signal.SIGKILL
    wait_for(lambda: not is_running(int(log.read_text())), seconds=60, what="the end of what the part started")
    assert Progress(tmp_path).ended["hangs"] == ended


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.is_file() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_another_bundle_has_its_parts_run_again(tmp_path: Path) -> None:
    first = Progress(tmp_path, "installed-1")
    first.begin(LAST)
    first.end(LAST, Ended(0, 300.0, 400.0, False))
    assert Progress(tmp_path, "installed-1").next_limit(LAST, 500.0, 400.0) is None
    assert Progress(tmp_path, "installed-2").next_limit(LAST, 500.0, 400.0) == 400.0


# --- which card


CARD = Device("Simulated GPU", "GPU-1", (9, 0), "1.0", 4, 1 << 16, 1 << 30)
OTHER = replace(CARD, uuid="GPU-2")


def test_what_depends_on_a_card_is_run_again_on_another_and_what_depends_on_its_product_on_another_product(
    tmp_path: Path,
) -> None:
    parts = parts_of(tmp_path, tmp_path, gpu_module="m", device="0", seconds=0.3)

    def left(card: Device | None) -> list[str]:
        progress = Progress(tmp_path, "installed", card)
        return [part.name for part in parts if progress.next_limit(part, 500.0, 400.0) is not None]

    progress = Progress(tmp_path, "installed", CARD)
    for part in parts:
        progress.begin(part)
        progress.end(part, Ended(0, 1.0, 2.0, False))
    of_product = ["primitives", "workspaces", "candidates and vendor"]
    assert left(CARD) == []
    assert left(OTHER) == ["measuring checks", "ceilings"]
    assert sorted(left(replace(CARD, driver="2.0"))) == sorted([*left(OTHER), *of_product])
    assert sorted(left(replace(CARD, name="Another"))) == sorted([*left(OTHER), *of_product])
    assert left(CARD) == [], "what another did in between takes nothing away"
    assert Progress(tmp_path, "installed", CARD).cards[-1] == CARD


SEES = "import os, sys; open('seen', 'a').write(sys.argv[1] + chr(10))"


def test_another_card_is_noticed_named_and_kept_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sees.py").write_text(SEES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv(fake_gpu.VARIABLE, fake_gpu.configure(tmp_path / "gpu.json", devices=[{}, {"uuid": OTHER.uuid}]))

    def parts(installed: Path, into: Path, *, device: str, **_: Any) -> list[Part]:
        return [Part("sees", ("sees", device), 60.0, depends_on="card")]

    monkeypatch.setattr(there, "parts_of", parts)
    into, installed = tmp_path / "into", installed_for(tmp_path)

    def run(device: str) -> str:
        words = [str(installed), "--into", str(into), "--device", device, "--gpu-module", FAKE_GPU]
        assert there.main(words) == there.DONE
        return "".join(capsys.readouterr())

    run("0")
    said = run("1")
    apart = into / OTHER.uuid
    first = f"another card, {fake_gpu.NAME}, {fake_gpu.UUID}"
    assert f"{into} holds a run on {first}: this one is kept apart, in {apart}" in said
    run("1")
    run(fake_gpu.UUID)
    for folder, uuid in ((into, fake_gpu.UUID), (apart, OTHER.uuid)):
        assert (folder / "seen").read_text().split() == [uuid]
        report = json.loads((folder / "back" / "report.json").read_bytes())
        assert [card["uuid"] for card in report["cards"]] == [uuid]
    second = tmp_path / "second"  # on another machine with the other card
    words = [str(installed), "--into", str(second), "--device", "1", "--gpu-module", FAKE_GPU]
    assert there.main([*words, "--continue-from", str(into / "back")]) == there.DONE
    assert f"continues what {fake_gpu.NAME}, {fake_gpu.UUID}, began" in "".join(capsys.readouterr())
    assert (second / "seen").read_text().split() == [OTHER.uuid], "what tells of a card is run again"


NOT_HERE = "import sys; print('first'); print('not run: no compiler: no nvcc'); sys.exit(3)"


def test_a_part_that_this_machine_cannot_run_says_why_and_leaves_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "not_here.py").write_text(NOT_HERE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    part = Part("primitives", ("not_here",), 60.0, depends_on="product")
    monkeypatch.setattr(there, "parts_of", lambda *_, **__: [part])
    into = tmp_path / "into"
    assert there.main([str(installed_for(tmp_path)), "--into", str(into), "--gpu-module", FAKE_GPU]) == there.DONE
    report = json.loads((into / "back" / "report.json").read_bytes())
    assert report["parts"] == {"primitives": "not run: no compiler: no nvcc"}
    # A compiler that is there the next time is used.
    assert Progress(into, "installed", fake_gpu.list_devices()[0]).next_limit(part, 500.0, 400.0) == 60.0


def test_two_runs_in_a_folder_are_one_too_many(machine: BareMachine) -> None:
    machine.into.mkdir()
    with (machine.into / "lock").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        ended = machine.run()
    assert ended.returncode == 2 and "another run uses" in ended.stderr
    assert not (machine.into / "parts.jsonl").exists()


def test_the_parts_come_in_the_order_of_their_worth(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, tmp_path, gpu_module="m", device="0", seconds=0.3)
    names = ["libraries", "primitives", "measuring checks", "workspaces", "ceilings", "candidates and vendor"]
    assert [part.name for part in parts] == names


def test_every_part_whose_program_takes_a_device_has_the_chosen_one(tmp_path: Path) -> None:
    parts = parts_of(tmp_path, tmp_path, gpu_module="m", device="GPU-7", seconds=0.3)
    programs = {part.name: Path(ROOT, *part.arguments[0].split(".")).with_suffix(".py").read_text() for part in parts}
    takes = {name for name, text in programs.items() if '"--device"' in text and '"--gpu-module"' in text}
    assert takes == programs.keys() - {"libraries"}
    assert takes == {part.name for part in parts if "--gpu-module m --device GPU-7" in " ".join(part.arguments)}


def test_in_a_checkout_the_carried_modules_run_and_not_those_of_the_folder(tmp_path: Path) -> None:
    carried, checkout = tmp_path / "carried", tmp_path / "checkout"
    for folder in (carried, checkout / "workers"):
        folder.mkdir(parents=True)
    (checkout / "workers" / "__init__.py").write_text("raise SystemExit('the workers of the folder')")
    with zipfile.ZipFile(carried / "carried.zip.0", "w") as archive:
        archive.mkdir("wheels")
        for name in ("workers/__init__.py", "workers/offline/__init__.py"):
            archive.writestr(f"source/{name}", "")
        archive.writestr("source/workers/offline/there.py", "print('the carried workers')")
    digest = hashlib.sha256((carried / "carried.zip.0").read_bytes()).hexdigest()
    parts = [{"name": "carried.zip.0", "sha256": digest}]
    (carried / "carried.json").write_text(json.dumps({"python": None, "sha256": digest, "parts": parts}))
    script = (ROOT / "workers/offline/measure_there.py").read_bytes()
    (carried / "measure_there.py").write_bytes(script)
    command = [sys.executable, str(carried / "measure_there.py")]
    ended = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "the carried workers\n", "")
    assert Part("check", ("module",), 1.0).command[1:] == ["-P", "-m", "module"]


def test_a_budget_over_nine_minutes_is_refused(machine: BareMachine) -> None:
    ended = machine.run("--budget", "600")
    assert ended.returncode == 2 and "600 is over 540 seconds; the same command continues" in ended.stderr


# --- what is brought back


def test_results_that_are_too_large_for_a_file_go_into_several(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = results_in(measured)
    (tmp_path / "measured").mkdir()
    write_results(tmp_path / "measured", results)
    whole = len(gzip.compress(json.dumps(results, separators=(",", ":")).encode()))
    monkeypatch.setattr(brought_back, "MOST_BYTES", int(whole * 0.9))
    append_line(tmp_path / "parts.jsonl", {"of": "", "part": "check", "began": 1.0})
    files = bring_back(tmp_path, Progress(tmp_path), [CHECK])
    assert {"results-1.json.gz", "results-2.json.gz"} <= files.keys()
    names = [
        problem["name"]
        for number in (1, 2)
        for problem in json.loads(gzip.decompress((tmp_path / "back" / f"results-{number}.json.gz").read_bytes()))[
            "problems"
        ]
    ]
    assert names == [problem["name"] for problem in results["problems"]]
    monkeypatch.setattr(brought_back, "MOST_BYTES", 10)
    assert bring_back(tmp_path, Progress(tmp_path), [CHECK]).keys() == {"report.json", "logs.txt"}
    report = json.loads((tmp_path / "back" / "report.json").read_bytes())
    assert report["left_out"].keys() == {"state.zip", "results.json"}
    assert "wide: " in report["left_out"]["results.json"] or "small: " in report["left_out"]["results.json"]


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """What a run on CARD brought back: one candidate was measured."""
    first = tmp_path / "first"
    first.mkdir()
    progress = Progress(first, "", CARD)
    progress.begin(CHECK)
    progress.end(CHECK, Ended(0, 1.0, 2.0, False))
    measured_on(first, CARD).add(CandidateResult("c", "ok", "", {}, None, 0.1, 0.1, 0.2, 0.2), "code")
    bring_back(first, progress, [CHECK])
    return first / "back"


def measured_on(folder: Path, card: Device) -> Journal:
    return Journal(folder / "measured", Conditions(card, {"matmul": "plan"}))


def test_what_was_brought_back_is_restored_only_into_a_folder_that_has_not_begun(earlier: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    assert restore(earlier, second, CARD) == "continues what Simulated GPU, GPU-1, began"
    assert Progress(second, "", CARD).ended.keys() == {"check"}
    append_line(second / "parts.jsonl", {"of": "", "part": "other", "began": 1.0})
    lines = (second / "parts.jsonl").read_bytes()
    assert "has begun: nothing of" in restore(earlier, second, CARD)
    assert (second / "parts.jsonl").read_bytes() == lines


def test_a_call_that_found_no_gpu_has_not_begun(earlier: Path, tmp_path: Path) -> None:
    second = tmp_path / "second"
    second.mkdir()
    without = Progress(second, "", None)
    without.begin(CHECK)
    without.end(CHECK, Ended(2, 1.0, 2.0, False))
    assert restore(earlier, second, CARD) == "continues what Simulated GPU, GPU-1, began"
    assert Progress(second, "", CARD).ended == {"check": Ended(0, 1.0, 2.0, False)}


def test_of_an_older_release_the_card_is_that_of_its_last_measurements(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    append_line(first / "parts.jsonl", {"of": "", "part": "check", "began": 1.0})
    measured_on(first, CARD).add(CandidateResult("c", "ok", "", {}, None, 0.1, 0.1, 0.2, 0.2), "code")
    bring_back(first, Progress(first), [CHECK])
    said = restore(first / "back", second, replace(OTHER, driver="2.0"))
    assert "is of Simulated GPU, GPU-1, driver 1.0: nothing" in said and not second.exists()
    assert restore(first / "back", second, OTHER) == "continues what Simulated GPU, GPU-1, began"
    assert measured_on(second, OTHER).result("c", "code") is not None
    assert "has begun: nothing of" in restore(first / "back", second, OTHER)


def test_a_card_of_the_same_product_continues_what_was_brought_back(earlier: Path, tmp_path: Path) -> None:
    assert restore(earlier, tmp_path / "second", OTHER) == "continues what Simulated GPU, GPU-1, began"
    journal = measured_on(tmp_path / "second", OTHER)
    assert journal.result("c", "code") is not None
    assert (journal.counted, journal.others) == ({CARD.uuid}, set())


def test_a_line_of_the_parts_that_a_kill_cut_short_does_not_keep_a_run_from_being_continued(
    tmp_path: Path,
) -> None:
    first = tmp_path / "first"
    first.mkdir()
    progress = Progress(first, "", CARD)
    (first / "parts.jsonl").write_bytes((first / "parts.jsonl").read_bytes() + b'{"part": "che')
    progress.begin(CHECK)
    progress.end(CHECK, Ended(0, 1.0, 2.0, False))
    bring_back(first, progress, [CHECK])
    assert restore(first / "back", tmp_path / "second", CARD) == "continues what Simulated GPU, GPU-1, began"
    assert Progress(tmp_path / "second", "", CARD).ended.keys() == {"check"}


@pytest.mark.parametrize("change", [{"name": "Another"}, {"driver": "2.0"}])
def test_nothing_of_another_product_or_driver_is_continued(
    change: dict[str, str], earlier: Path, tmp_path: Path
) -> None:
    said = restore(earlier, tmp_path / "second", replace(OTHER, **change))  # type: ignore[arg-type]
    assert f"{earlier} is of Simulated GPU, GPU-1, driver 1.0: nothing of it counts for" in said
    assert not (tmp_path / "second").exists()


def test_what_another_card_measured_in_the_same_folder_does_not_count_and_stays(earlier: Path) -> None:
    folder = earlier.parent
    journal = measured_on(folder, OTHER)
    assert journal.result("c", "code") is None
    assert journal.others == {("Simulated GPU", CARD.uuid)}
    assert measured_on(folder, CARD).result("c", "code") is not None


def test_nothing_that_is_measured_is_no_import(compiling: Client, tmp_path: Path, measured: Path) -> None:
    results = results_in(measured)
    for problem in results["problems"]:
        problem["candidates"] = [{**each, "verdict": "skipped"} for each in problem["candidates"]]
    write_results(tmp_path, results)
    with pytest.raises(UsageError, match="nothing is measured yet"):
        import_results(compiling, tmp_path)


def test_a_run_that_measured_nothing_is_no_import_and_says_where_the_reason_is(
    compiling: Client, tmp_path: Path
) -> None:
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(UsageError, match=r"nothing is measured yet; report\.json and logs\.txt in it say why"):
        import_results(compiling, tmp_path)


def test_a_file_that_was_damaged_on_its_way_is_named(compiling: Client, tmp_path: Path) -> None:
    data = gzip.compress(os.urandom(1000))
    (tmp_path / "results-1.json.gz").write_bytes(data[:500])
    with pytest.raises(UsageError, match=r"results-1\.json\.gz is damaged"):
        import_results(compiling, tmp_path)
