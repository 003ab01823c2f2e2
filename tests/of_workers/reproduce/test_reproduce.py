"""`cukiln reproduce`: one folder, run in an environment that has NumPy and nothing of ours, says what agrees."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from codegen.kernel import Candidate
from codegen.operators import operator
from codegen.targets import target
from cukiln.cli.main import app
from cukiln.types import CandidateFacts
from storage.config.own_modules import NotSelfContained, module_files
from tests.support.fixtures.api import Api
from tests.support.fixtures.candidate import facts as usual_facts
from tests.support.fixtures.codegen import default_candidate, matmul
from tests.support.kernels.cpu_helpers import LIMITS, processes, toolchain, verify
from tests.support.run.places import ROOT
from tests.support.service.stored_candidate import store_candidate
from workers.compile.compile_group import compile_group
from workers.compile.toolchain import Nvrtc, Toolchain, find_toolchain
from workers.reproduce.write_folder import CannotReproduce, is_written, write_folder

ARCH = "sm_90a"
Run = Callable[..., subprocess.CompletedProcess[str]]


def facts_of(candidate: Candidate, tools: Toolchain | None = None, **changes: Any) -> CandidateFacts:
    """What the service would know of it: compiled by nvcc, verified on the CPU."""
    outcome = compile_group([candidate.kernel], target(ARCH), tools or toolchain(), processes(), LIMITS)
    built = outcome.outcomes[candidate.kernel.id]
    (verdict,) = verify([candidate.kernel], seed=7)
    assert (built.status, verdict.verdict) == ("ok", "ok")
    known = {
        "job": "0" * 32,
        "code_digest": built.code_digest,
        "toolchain": (tools or toolchain()).describe(),
        "details": {"venue": "cpu", "plan_version": "x", **verdict.details},
    }
    return usual_facts(candidate, ARCH, **{**known, **changes})


@pytest.fixture(scope="module")
def candidate() -> Candidate:
    """Its kernel has three functions: the code digest is made of theirs."""
    epilogue = [{"op": "bias", "axis": "n"}, {"op": "gelu"}]
    return default_candidate(matmul(m=256, k=256, epilogue=epilogue), ARCH, split="workspace", split_k=2)


@pytest.fixture(scope="module")
def facts(candidate: Candidate) -> CandidateFacts:
    return facts_of(candidate)


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter with NumPy alone."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    installed = Path(np.__file__).parents[1]
    for name in ("numpy", "numpy.libs"):
        (packages / name).symlink_to(installed / name)
    return folder / "bin" / "python"


# What a compiler makes of equal arguments and files of a folder it makes once; $0.of holds what it made.
ONCE = """#!/bin/sh
for word; do
  if [ "$before" = -o ]; then made=$word; elif [ -f "$word" ]; then read="$read $word"; fi
  before=$word
done
[ -n "$made" ] || exec "{compiler}" "$@"
key=$0.of/$( (echo "$@"; cat $read group.cubin 2>&1) | sha256sum | cut -c1-64)
if [ ! -f "$key" ]; then
  "{compiler}" "$@" || exit
  cp "$made" "$key"
fi
cp "$key" "$made"
"""


@pytest.fixture(scope="module")
def compilers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """nvcc and g++ for tests of what is said about them: each compiles equal files once."""
    folder = tmp_path_factory.mktemp("once")
    named = {"NVCC": ("nvcc", toolchain().device_compiler.path), "CXX": ("g++", toolchain().host_compiler)}
    for name, compiler in named.values():
        (folder / name).write_text(ONCE.format(compiler=compiler))
        (folder / name).chmod(0o755)
        (folder / f"{name}.of").mkdir()
    return {variable: str(folder / name) for variable, (name, _) in named.items()}


@pytest.fixture
def run(bare_python: Path, compilers: dict[str, str], tmp_path: Path) -> Run:
    """Runs a folder's run.py; `without` makes a compiler absent, `changes` are of the environment."""

    def start(folder: Path, *arguments: str, without: str = "", **changes: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "LANG": "C.UTF-8"}
        environment |= compilers
        if without:
            environment[without] = f"no-such-{without.lower()}"
        environment |= changes
        argv = [str(bare_python), str(folder / "run.py"), *arguments]
        return subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)

    return start


@pytest.fixture(scope="module")
def written(facts: CandidateFacts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("out") / "folder"
    write_folder(facts, folder)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy to be spoilt."""
    yield Path(shutil.copytree(written, tmp_path / "copy"))


def counted(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines that count, up to the first colon."""
    return [line.partition(":")[0] for line in done.stdout.splitlines() if line[:1] not in ("", " ") and ":" in line]


def test_a_candidate_of_target_cpu_is_built_for_what_that_emulates(facts: CandidateFacts, tmp_path: Path) -> None:
    write_folder(facts.model_copy(update={"target": "cpu", "device_class": "predicted:cpu"}), tmp_path / "folder")
    commands = (tmp_path / "folder" / "build.sh").read_text()
    assert "arch=compute_80,code=sm_80" in commands
    assert "| target | cpu |" in (tmp_path / "folder" / "README.md").read_text()


def test_the_bare_environment_has_nothing_of_ours(bare_python: Path, tmp_path: Path) -> None:
    for name in ("cukiln", "codegen", "workers", "pydantic", "ml_dtypes", "rfc8785"):
        done = subprocess.run([bare_python, "-c", f"import {name}"], cwd=tmp_path, capture_output=True, check=False)
        assert b"ModuleNotFoundError" in done.stderr, name


def test_what_was_recorded_is_found_again_outside_the_repository(folder: Path, run: Run, facts: CandidateFacts) -> None:
    done = run(folder, NVCC=str(toolchain().device_compiler.path), CXX=str(toolchain().host_compiler))

    assert (done.returncode, done.stderr) == (0, "")
    assert counted(done) == ["AGREES  code digest", "AGREES  verdict"]
    assert f"code digest: {facts.code_digest}" in done.stdout
    assert "integer inputs" in done.stdout and "normal inputs" in done.stdout


def test_a_changed_digit_of_the_kernel_is_another_code_digest(folder: Path, run: Run) -> None:
    text = (folder / "kernel.cu").read_text()
    assert ("max_registers" not in text and "tile_k = 16" in text) or "tile_k = 32" in text
    old = next(words for words in ("tile_k = 16;", "tile_k = 32;", "tile_k = 8;") if words in text)
    (folder / "kernel.cu").write_text(text.replace(old, "tile_k = 64;" if "64" not in old else "tile_k = 32;"))
    done = run(folder)

    assert done.returncode == 1
    assert counted(done)[0] == "DIFFERS code digest"
    assert "AGREES  verdict" in counted(done), "the CPU's text was left alone"


def test_a_changed_sum_is_another_verdict(folder: Path, run: Run) -> None:
    path = folder / "cases" / "cpu-integer" / "expected.npy"
    expected = np.load(path)
    expected.flat[3] += 1
    np.save(path, expected)
    done = run(folder, without="NVCC")

    assert done.returncode == 1
    assert counted(done) == ["CANNOT  code digest", "DIFFERS verdict"]
    assert "incorrect on the CPU: 1 of" in done.stdout and "recorded is ok on the CPU" in done.stdout


def test_a_changed_text_of_the_cpu_s_kernel_is_another_verdict(folder: Path, run: Run) -> None:
    text = (folder / "kernel_cpu.cpp").read_text()
    assert text.count("row * ldc") >= 1
    (folder / "kernel_cpu.cpp").write_text(text.replace("row * ldc", "row * ldb"))
    done = run(folder, without="NVCC")

    assert done.returncode == 1
    assert counted(done) == ["CANNOT  code digest", "DIFFERS verdict"]


def test_text_that_does_not_compile_differs_and_shows_the_compiler_s_words(folder: Path, run: Run) -> None:
    with (folder / "kernel.cu").open("a") as file:
        file.write("int broken = ;\n")
    done = run(folder)

    assert done.returncode == 1
    assert "expected an expression" in done.stdout


def test_without_nvcc_that_is_said_and_the_rest_continues(folder: Path, run: Run) -> None:
    done = run(folder, without="NVCC")

    assert done.returncode == 2
    assert counted(done) == ["CANNOT  code digest", "AGREES  verdict"]
    assert "there is no no-such-nvcc here" in done.stdout and "NVCC=" in done.stdout


@pytest.fixture
def other_nvcc(tmp_path: Path, compilers: dict[str, str]) -> Path:
    """A folder with the nvcc of these tests, which says that it is another version."""
    folder = tmp_path / "cuda" / "bin"
    folder.mkdir(parents=True)
    (folder / "nvcc").write_text(
        '#!/bin/sh\n[ "$1" = --version ] && { echo "Cuda compilation tools, release 13.0, V13.0.48"; exit 0; }\n'
        f'exec "{compilers["NVCC"]}" "$@" $CUKILN_TEST_FLAGS\n'
    )
    (folder / "nvcc").chmod(0o755)
    return folder


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder of packages whose one is nvcc's."""
    packages = tmp_path / "packages"
    packages.mkdir()
    found = next(folder for folder in toolchain().device_compiler.path.parents if folder.name == "nvidia")
    (packages / "nvidia").symlink_to(found)
    return packages


def test_another_version_of_nvcc_is_said_and_nothing_differs(
    folder: Path, run: Run, other_nvcc: Path, facts: CandidateFacts
) -> None:
    text = (folder / "kernel.cu").read_text()
    old = next(words for words in ("tile_k = 16;", "tile_k = 32;", "tile_k = 8;") if words in text)
    (folder / "kernel.cu").write_text(text.replace(old, "tile_k = 64;"))  # stands for the other code of the other nvcc
    done = run(folder, NVCC="", PATH=f"{other_nvcc}:/usr/bin:/bin")

    assert (done.returncode, counted(done)) == (2, ["CANNOT  code digest", "AGREES  verdict"]), done.stdout
    recorded = dict(toolchain().versions)["nvcc"]
    words = f"compiler differs: recorded nvcc {recorded}, found 13.0.48 in PATH ({other_nvcc / 'nvcc'})"
    assert f"{words}; the code cannot be compared; set NVCC=" in done.stdout


def test_another_version_of_nvcc_that_makes_the_same_code_agrees_and_its_name_goes_before_wheels(
    folder: Path, run: Run, other_nvcc: Path, wheels: Path
) -> None:
    done = run(folder, NVCC=str(other_nvcc / "nvcc"), PYTHONPATH=str(wheels))

    assert (done.returncode, counted(done)) == (0, ["AGREES  code digest", "AGREES  verdict"]), done.stdout
    assert f"here: {other_nvcc / 'nvcc'}, named by NVCC: " in done.stdout


@pytest.mark.parametrize("broken", [False, True])
def test_another_version_of_nvcc_says_nothing_of_a_compile_error(
    broken: bool, facts: CandidateFacts, tmp_path: Path, run: Run, other_nvcc: Path
) -> None:
    failed = facts.model_copy(update={"verdict": "compile_error", "code_digest": None, "details": None})
    write_folder(failed, tmp_path / "folder")
    if broken:
        with (tmp_path / "folder" / "kernel.cu").open("a") as file:
            file.write("int broken = ;\n")
    done = run(tmp_path / "folder", NVCC=str(other_nvcc / "nvcc"))

    assert (done.returncode, counted(done)) == (2, ["CANNOT  verdict"])


def test_text_that_another_version_of_nvcc_refuses_does_not_differ(folder: Path, run: Run, other_nvcc: Path) -> None:
    done = run(folder, NVCC=str(other_nvcc / "nvcc"), CUKILN_TEST_FLAGS="--no-such-flag")

    assert done.returncode == 2
    assert counted(done)[0] == "CANNOT  code digest" and counted(done)[-1] == "AGREES  verdict", done.stdout
    assert "it does not compile kernel.cu" in done.stdout and "no-such-flag" in done.stdout
    assert "found 13.0.48 named by NVCC" in done.stdout


def test_the_nvcc_of_this_python_s_wheels_goes_before_the_one_in_path(
    folder: Path, run: Run, other_nvcc: Path, wheels: Path
) -> None:
    path = f"{other_nvcc}:/usr/bin:/bin"
    done = run(folder, NVCC="", PATH=path, PYTHONPATH=str(wheels))

    assert (done.returncode, counted(done)) == (0, ["AGREES  code digest", "AGREES  verdict"]), done.stdout
    assert "in this Python's wheels" in done.stdout


def test_what_nvrtc_compiled_is_compiled_by_it_again(candidate: Candidate, tmp_path: Path, run: Run) -> None:
    tools = find_toolchain(processes(), cuda=12)
    compiler = tools.device_compiler
    if not isinstance(compiler, Nvrtc):
        pytest.skip(f"this machine compiles by {compiler.path}")
    write_folder(facts_of(candidate, tools), tmp_path / "folder")
    there = {"NVRTC": str(compiler.path), "PTXAS": str(compiler.ptxas), "NVCC": ""}
    done = run(tmp_path / "folder", **there)

    assert (done.returncode, counted(done)) == (0, ["AGREES  code digest", "AGREES  verdict"]), (
        done.stdout + done.stderr
    )
    assert "recorded with nvrtc 12.9.86, ptxas 12.9.86" in done.stdout
    without = run(tmp_path / "folder", NVCC="")  # its Python has NumPy alone
    assert (without.returncode, counted(without)[0]) == (2, "CANNOT  code digest"), without.stdout
    assert "pip install nvidia-cuda-nvrtc-cu12" in without.stdout


def test_without_a_host_compiler_the_verdict_cannot_be_looked_at(folder: Path, run: Run) -> None:
    done = run(folder, without="CXX")

    assert done.returncode in (1, 2)  # nvcc needs it too, where it is asked for
    assert "CANNOT  verdict" in counted(done)


def test_without_a_gpu_that_is_one_clean_sentence(folder: Path, run: Run) -> None:
    done = run(folder, "--gpu")

    assert done.returncode == 2
    assert counted(done) == ["AGREES  code digest", "CANNOT  verdict on the GPU"]
    assert "pip install cupy-cuda13x" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr
    assert (folder / "build" / "library.so").is_file(), "the winner's library is built all the same"


def test_bfloat16_needs_no_package_for_it(tmp_path: Path, run: Run) -> None:
    problem = matmul(m=64, n=64, k=64, dtype="bfloat16", out_dtype="bfloat16", layout="nt")
    write_folder(facts_of(default_candidate(problem, ARCH)), tmp_path / "folder")
    done = run(tmp_path / "folder")

    assert (done.returncode, counted(done)) == (0, ["AGREES  code digest", "AGREES  verdict"]), done.stdout
    assert np.load(tmp_path / "folder" / "cases" / "cpu-normal" / "a.npy").dtype == np.uint16


def test_a_recorded_compile_error_agrees_where_the_kernel_still_does_not_compile(
    facts: CandidateFacts, tmp_path: Path, run: Run
) -> None:
    failed = facts.model_copy(update={"verdict": "compile_error", "code_digest": None, "details": None})
    write_folder(failed, tmp_path / "folder")
    assert counted(run(tmp_path / "folder")) == ["DIFFERS verdict"]
    with (tmp_path / "folder" / "kernel.cu").open("a") as file:
        file.write("int broken = ;\n")
    done = run(tmp_path / "folder")

    assert (done.returncode, counted(done)) == (0, ["AGREES  verdict"])


def test_the_folder_names_no_path_of_this_machine(written: Path) -> None:
    here = {str(Path.home()), str(ROOT), sys.prefix, str(toolchain().device_compiler.path), str(written)}
    for path in written.rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            assert not [each for each in here if each != "/" and each.encode() in data], path


def test_the_inputs_are_those_of_the_recorded_seed(written: Path, candidate: Candidate) -> None:
    own = operator("matmul")
    case = json.loads((written / "cases" / "cpu-normal" / "case.json").read_text())
    facts_cases = json.loads((written / "facts.json").read_text())["details"]["cases"]
    recorded = [case for case in facts_cases if not case["exact"]][1]
    assert (case["seed"], case["extents"]) == (recorded["seed"], recorded["extents"])
    problem = own.test_problems(candidate.kernel)[1]
    inputs = own.make_inputs(problem, "normal", np.random.default_rng(case["seed"]))
    assert np.array_equal(inputs["a"], np.load(written / "cases" / "cpu-normal" / "a.npy"))


def test_of_a_wrong_kernel_the_case_that_showed_it_is_written(facts: CandidateFacts, tmp_path: Path) -> None:
    details = dict(facts.details or {})
    details["cases"] = details["cases"][:4]  # the fourth, a random one, was wrong
    write_folder(facts.model_copy(update={"verdict": "incorrect", "details": details}), tmp_path / "folder")
    case = json.loads((tmp_path / "folder" / "cases" / "cpu-normal" / "case.json").read_text())

    assert (case["seed"], case["extents"]) == (details["cases"][3]["seed"], details["cases"][3]["extents"])


def test_large_problems_are_not_written_whole(written: Path, candidate: Candidate) -> None:
    large = default_candidate(matmul(m=4096, n=4096, k=4096), ARCH)
    assert is_written(operator("matmul"), candidate) and not is_written(operator("matmul"), large)
    assert (written / "cases" / "gpu-whole" / "expected.npy").is_file()


def test_another_generator_is_said_and_nothing_is_written(
    facts: CandidateFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = facts.model_copy(update={"slice": "0" * 64})
    with pytest.raises(CannotReproduce, match=r"another slice digest.*recorded 0000.*checkout of that version"):
        write_folder(other, tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_other_flags_are_said(facts: CandidateFacts, tmp_path: Path) -> None:
    made_by = {**(facts.toolchain or {}), "flags": {"device": ["-O1"]}}
    with pytest.raises(CannotReproduce, match=r"other flags .*-O1"):
        write_folder(facts.model_copy(update={"toolchain": made_by}), tmp_path / "folder")


def test_a_folder_that_is_not_empty_is_refused_and_an_empty_one_used(facts: CandidateFacts, tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    with pytest.raises(CannotReproduce, match="not an empty folder"):
        write_folder(facts, tmp_path / "full")
    (tmp_path / "empty").mkdir()
    write_folder(facts, tmp_path / "empty")

    assert [path.name for path in (tmp_path / "full").iterdir()] == ["mine"]
    assert (tmp_path / "empty" / "run.py").is_file()


def test_a_folder_that_cannot_be_completed_leaves_nothing(
    facts: CandidateFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workers.reproduce.write_folder._write_case", full)
    with pytest.raises(CannotReproduce, match="No space left"):
        write_folder(facts, tmp_path / "folder")
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_carried_along_is_refused() -> None:
    with pytest.raises(NotSelfContained, match="pydantic"):
        module_files(["codegen.problem"])


def test_the_command_asks_the_service_and_writes_the_folder(
    api: Api, facts: CandidateFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store_candidate(api.database, facts)
    monkeypatch.setenv("CUKILN_URL", api.url)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["reproduce", facts.candidate[:8]])

    assert done.exit_code == 0, done.output
    found = CandidateFacts.model_validate_json(
        (tmp_path / f"candidate-{facts.candidate[:16]}" / "facts.json").read_text()
    )
    assert found.model_dump(exclude={"job", "details"}) == facts.model_dump(exclude={"job", "details"})
    assert found.details is not None and found.details["seed"] == 7
    again = CliRunner().invoke(app, ["reproduce", facts.candidate[:8]])
    assert again.exit_code == 2
