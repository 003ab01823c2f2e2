"""docs/writing-a-kernel.md shows the example's own text, and what its commands print is what they print."""

from __future__ import annotations

import re
import shlex
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from codegen.kernel import Kernel
from codegen.primitives import primitives
from codegen.search.schedule import Schedule
from codegen.text.render_group import slice_text
from tests.support.fixtures.compile import LIMITS, probe
from tests.support.kernels.compile_cache import CachingProcesses
from tests.support.kernels.cpu_helpers import loaded
from tests.support.run.each_run import some_each_run
from tests.support.run.places import ROOT
from tests.support.run.run_here import run_forked
from workers.compile.toolchain import Toolchain
from workers.cpu.build import build_cpu

EXAMPLE = ROOT / "examples" / "rowsum"
PAGE = (ROOT / "docs" / "writing-a-kernel.md").read_text()
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SECONDS = re.compile(r"\d+\.\d\d CPU seconds")


@dataclass(frozen=True)
class Shown:
    """A command of the page with what it prints; `changes` is the diff of the kernel that its section begins with."""

    section: str
    command: str
    output: str
    changes: str


def shown_commands() -> list[Shown]:
    found = []
    for section in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        blocks = FENCE.findall(section)
        changes = next((text for language, text in blocks if language == "diff"), "")
        for language, text in blocks:
            if not language and text.startswith("$ "):
                command, _, output = text.removeprefix("$ ").partition("\n")
                found.append(Shown(section.partition("\n")[0], command, output, changes))
    return found


def snippets(language: str) -> list[str]:
    return [text for each, text in FENCE.findall(PAGE) if each == language]


def apply_changes(changes: str, file: Path) -> None:
    lines = changes.splitlines()
    before, after = ("\n".join(line[1:] for line in lines if line[0] in kept) for kept in (" -", " +"))
    text = file.read_text()
    assert text.count(before) == 1, f"the page changes what the example does not have: {before}"
    file.write_text(text.replace(before, after))


def normalised(output: str) -> str:
    return SECONDS.sub("some CPU seconds", output).rstrip()


def test_the_page_shows_every_kind_of_fault_that_it_promises() -> None:
    titles = [command.section for command in shown_commands()]
    wanted = (
        "Verify it",
        "Print from one lane",
        "A race",
        "A missing wait",
        "A divergent collective",
        "Bank conflicts",
    )
    assert set(titles) == set(wanted)


@pytest.fixture(scope="module")
def runtime(
    toolchain: Toolchain, caching_processes: CachingProcesses, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """What runs kernels is compiled: a fork of this process need not do it again."""
    build_cpu([probe()], toolchain, caching_processes, LIMITS, folder=tmp_path_factory.mktemp("runtime"))


@pytest.mark.parametrize(
    "shown", some_each_run(shown_commands(), 2), ids=lambda each: f"{each.section} {each.command.partition('.json')[2]}"
)
def test_a_command_prints_what_the_page_says(shown: Shown, tmp_path: Path, runtime: None) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "examples" / "rowsum", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(EXAMPLE.with_suffix(".json"), tmp_path / "examples")
    if shown.changes:
        apply_changes(shown.changes, tmp_path / "examples" / "rowsum" / "kernel.cuh")
    words = shlex.split(shown.command)
    variables = dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word))
    program, *arguments = words[len(variables) :]
    assert program == ".venv/bin/cukiln"
    done = run_forked("cukiln", *arguments, cwd=tmp_path, env=variables)
    assert done.stderr == ""
    assert normalised(done.stdout) == normalised(shown.output)
    assert done.returncode == (1 if re.search(r"^  (incorrect|runtime_error),", done.stdout, re.MULTILINE) else 0)


@pytest.mark.parametrize(("language", "file"), [("cpp", "kernel.cuh"), ("python", "__init__.py")])
def test_the_pages_code_is_the_examples(language: str, file: str) -> None:
    with loaded([EXAMPLE]):
        generated = slice_text(Kernel.of("rowsum", {"dtype": "float32"}, Schedule.of({"pitch": 36})))
    text = (EXAMPLE / file).read_text()
    assert snippets(language)
    assert [snippet for snippet in snippets(language) if snippet not in text and snippet.strip() not in generated] == []


def test_the_page_names_every_primitive() -> None:
    named = set(re.findall(r"`(\w+)(?:\(\))?`", PAGE))
    assert primitives() <= named
