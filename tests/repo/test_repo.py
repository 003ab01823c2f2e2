"""The repository's own promises: what its pages name exists, what it installs is pinned, its imports are allowed."""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import grimp
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.run.again_alone import may_run_again
from tests.support.run.each_run import BY_TURNS
from tests.support.run.places import ROOT
from tests.support.run.run_here import run_here
from tests.support.run.schedule import LONGEST, TOGETHER

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PACKAGES = ("codegen", "storage", "workers", "service", "cukiln")
FENCES = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
# What a framework brings itself, in the release that it wants.
UNPINNED = {"torch", "jax"}


def run(*argv: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120, check=False
    )


def pyproject() -> dict[str, object]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def requirements() -> list[Requirement]:
    """Everything that pyproject.toml names: dependencies, extras, groups, the build system's."""
    data: dict = pyproject()  # type: ignore[type-arg]
    lists = [
        data["build-system"]["requires"],
        data["project"]["dependencies"],
        *data["project"]["optional-dependencies"].values(),
        *data["dependency-groups"].values(),
    ]
    # A group may name another one, whose requirements are its own.
    return [Requirement(line) for each in lists for line in each if isinstance(line, str)]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def tracked_files() -> list[Path]:
    """What git has or would take; in an unpacked archive, all files outside hidden folders."""
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    if listed.returncode == 0 and listed.stdout:
        files = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        files = [path for path in ROOT.rglob("*") if not any(part[0] == "." for part in path.relative_to(ROOT).parts)]
    return sorted(path for path in files if path.is_file())


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


# ---- what the pages name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", FENCES.sub("", page.read_text()))
    for link in links:
        if "://" not in link and not link.startswith("#"):
            assert (page.parent / link.partition("#")[0]).exists(), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_make_target_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)(?=[`\s])", page.read_text(), re.MULTILINE))
    assert named <= make_targets(), f"{page.name} names targets that the Makefile lacks"


def test_make_alone_lists_every_target() -> None:
    listed = run("make", "--no-print-directory").stdout
    assert {line.split()[1] for line in listed.splitlines()} == make_targets() - {"host", "collected"}


def test_the_readme_shows_both_commands_on_its_first_screen() -> None:
    first_screen = (ROOT / "README.md").read_text().splitlines()[:45]
    assert any(line.startswith("make run") for line in first_screen)
    assert any(line.startswith("make test") for line in first_screen)


def test_the_test_files_that_begin_first_or_run_together_exist() -> None:
    assert [name for name in (*LONGEST, *TOGETHER) if not (ROOT / "tests" / name).exists()] == []


def test_the_tests_that_take_turns_exist() -> None:
    shared = "".join(path.read_text() for path in ROOT.glob("tests/operators/harness/*.py"))
    names = [name.partition("::") for name in sorted(BY_TURNS)]
    left = [
        f"{file}::{test}"
        for file, _, test in names
        if not re.search(rf"\bdef {test}\b", (ROOT / "tests" / file).read_text() + shared)
    ]
    assert left == []


def test_each_run_has_one_test_of_each_subject_that_has_several() -> None:
    numbers: dict[str, set[int]] = {}
    for file in ROOT.glob("tests/**/test_*.py"):
        for subject, number in re.findall(r'@one_each_run\("([^"]+)", (\d)\)', file.read_text()):
            numbers.setdefault(subject, set()).add(int(number))
    assert numbers
    assert [subject for subject, those in numbers.items() if those != {0, 1}] == []


def test_every_benchmark_the_makefile_runs_exists() -> None:
    modules = re.findall(r"-m (benchmarks\.\w+)", (ROOT / "Makefile").read_text())
    assert len(modules) == len([target for target in make_targets() if target.startswith("bench-")])
    for module in modules:
        assert (ROOT / f"{module.replace('.', '/')}.py").is_file(), module


def commands_of(pages: list[Path]) -> set[str]:
    """The words after `cukiln` in code: a prose line may begin with the name too."""
    codes = [code for page in pages for code in re.findall(r"^```.*?^```|`[^`]+`", page.read_text(), re.DOTALL | re.M)]
    return {name for code in codes for name in re.findall(r"^(?:`|\S+/)?cukiln ([a-z][a-z-]*)", code, re.MULTILINE)}


@pytest.mark.parametrize("command", sorted(commands_of(PAGES) | {"quickstart", "serve"}))
def test_every_command_a_page_names_exists(command: str) -> None:
    done = run_here("cukiln", command, "--help")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_a_page_names_exists(page: Path) -> None:
    top = "client|codegen|storage|workers|service|docker|docs|examples|benchmarks|tests"
    for name in re.findall(rf"`((?:{top})/[\w./-]*)`", FENCES.sub("", page.read_text())):
        assert (ROOT / name).exists(), f"{page.name} names {name}"


# ---- docs/architecture.md


def architecture() -> str:
    return (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("package", ["codegen", "storage", "workers", "service"])
def test_the_architecture_page_names_every_room(package: str) -> None:
    page = architecture()
    inside = [path for path in (ROOT / package).iterdir() if path.name not in ("__init__.py", "__pycache__")]
    rooms = [f"{path.relative_to(ROOT)}/" for path in inside if path.is_dir()]
    modules = [str(path.relative_to(ROOT)) for path in inside if path.suffix == ".py"]
    assert rooms
    assert not [name for name in (*rooms, *modules) if f"`{name}`" not in page]


# ---- docs/operations.md


def test_the_settings_table_is_that_of_the_code() -> None:
    from storage.config.settings import Settings

    page = (ROOT / "docs" / "operations.md").read_text()
    table = page.partition("<!-- settings -->")[2].partition("<!-- /settings -->")[0]
    rows = dict(re.findall(r"^\| `([A-Z_]+)` \| (.*?) \|", table, re.MULTILINE))
    fields = {str(field.alias): field.default for field in Settings.model_fields.values()}
    assert set(rows) == set(fields)
    computed = {"CUKILN_WORKERS", "CUKILN_API_KEY", "CUKILN_GPU_LOCKS"}
    computed.update(name for name, default in fields.items() if not default)
    for name in set(fields) - computed:
        default = str(fields[name]).lower() if isinstance(fields[name], bool) else fields[name]
        assert rows[name] == f"`{default}`", f"{name}: {rows[name]}, but the code says {default}"


# ---- what is installed


def test_every_requirement_is_pinned_to_a_release_that_it_allows() -> None:
    pinned = pins()
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        if name not in UNPINNED:
            assert name in pinned, f"{name} is not in constraints.txt"
            assert requirement.specifier.contains(pinned[name], prereleases=True), f"{requirement} but {pinned[name]}"


@pytest.mark.parametrize("group", ["server", "elsewhere"])
def test_what_a_server_installs_is_imported(group: str) -> None:
    """Or is needed by something that is: what only tests and benchmarks import is not for servers."""
    data: dict = pyproject()  # type: ignore[type-arg]
    groups: dict[str, list[str]] = data["dependency-groups"] | data["project"]["optional-dependencies"]
    names = {canonicalize_name(Requirement(line).name) for line in groups[group]}
    folders = ("client", "codegen", "service", "storage", "workers")
    texts = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    imported = {top for text in texts for top in re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)}
    owners = metadata.packages_distributions()
    used = {canonicalize_name(owner) for top in imported for owner in owners.get(top, ())}
    for name in sorted(used):  # uvicorn loads uvloop by its name; the others are requirements
        used |= {canonicalize_name(Requirement(line).name) for line in metadata.requires(name) or []}
    assert {name for name in names - used if name != "nvidia-cudnn-frontend"} == set()  # it may be not installed


def test_constraints_hold_names_and_releases_only() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9-]*==[0-9][0-9a-z.+!]*", line) for line in lines)
    assert lines == sorted(set(lines), key=lambda line: line.split("==")[0])


def test_this_environment_has_the_pinned_releases() -> None:
    pinned = pins()
    for requirement in requirements():
        name = canonicalize_name(requirement.name)
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # an extra or the gpu group
        if name in pinned:
            assert installed == pinned[name], name


@pytest.mark.parametrize(
    "name", ["pyproject.toml", "constraints.txt", "Makefile", ".ci/run", ".pre-commit-config.yaml"]
)
def test_what_installs_names_no_address(name: str) -> None:
    assert not re.findall(r"\w+://\S+", (ROOT / name).read_text())


def test_no_tracked_file_names_a_path_of_a_machine() -> None:
    homes = r"/(?:root|Users|home/(?!runner\b)[a-z]\w*)/[\w.]"
    here = [str(path) for path in (ROOT, Path(sys.base_prefix)) if len(path.parts) > 2 and path != Path("/usr/local")]
    pattern = re.compile("|".join([homes, *(re.escape(path) + r"\b" for path in here)]))
    for path in tracked_files():
        text = path.read_bytes().decode(errors="replace")
        found = [match.group() for match in pattern.finditer(text) if path != Path(__file__).resolve()]
        assert not found, f"{path.relative_to(ROOT)}: {found[:3]}"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_holds_the_client_only(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (about,) = [archive.read(name).decode() for name in names if name.endswith("METADATA")]
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"cukiln"}
    assert "cukiln/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    page = about.partition("\n\n")[2]
    assert page == (ROOT / "client" / "README.md").read_text()
    assert all(re.match(r"https://", link) for link in re.findall(r"\]\(([^)]*)\)", page))  # it is shown elsewhere


def test_the_sdist_holds_the_client_and_builds_the_same_wheel(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    of_client = {str(path.relative_to(ROOT)) for path in tracked_files() if path.is_relative_to(ROOT / "client")}
    assert names == of_client | {".gitignore", "CHANGELOG.md", "LICENSE", "PKG-INFO", "pyproject.toml"}


# ---- the allowed imports


def test_no_module_beside_the_operators_imports_one() -> None:
    """They are found by their folders: what two of them share is no part of either."""
    for path in sorted((ROOT / "codegen").glob("*.py")):
        tree = ast.parse(path.read_text())
        found = [each.module or "" for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)]
        assert not [name for name in found if name.startswith("codegen.operators.")], path.name


def test_the_imports_are_the_allowed_ones() -> None:
    done = run(sys.executable, "-c", LINT_IMPORTS)
    assert done.returncode == 0, done.stdout


LINT_IMPORTS = "from importlinter.cli import lint_imports_command as main; main(['--no-cache'])"


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    left = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    while ends := [module for module, imported in left.items() if imported.isdisjoint(left)]:
        for module in ends:
            del left[module]
    assert not left


def test_tests_import_no_private_names() -> None:
    imports = re.compile(rf"^ *from ({'|'.join(PACKAGES)})[.\w]* import (\([^)]*\)|.*)", re.MULTILINE)
    private = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in sorted(ROOT.glob("tests/**/*.py"))
        for found in imports.finditer(path.read_text())
        if re.search(r"(?<!as )\b_(?!_)\w", found[2])
    ]
    assert private == []


def test_no_test_imports_names_of_a_file_of_tests() -> None:
    """What several need is in a module beside them, or in `tests/support`."""
    imports = re.compile(r"^ *(?:from|import) tests\.[\w.]*\btest_\w+", re.MULTILINE)
    assert [str(path) for path in sorted(ROOT.glob("tests/**/*.py")) if imports.search(path.read_text())] == []


FORBIDDEN = [
    ("codegen", "storage.database.tables"),
    ("codegen", "subprocess"),
    ("client/cukiln", "codegen.problem"),
    ("storage", "workers.wake_ups"),
    ("storage", "cukiln.client"),
    ("workers", "service.http.errors"),
    ("workers", "sqlalchemy"),
    ("service", "workers.processes.processes"),
    ("service", "sqlalchemy"),
]


def test_forbidden_imports_are_found(tmp_path: Path) -> None:
    """Each by a module of its own."""
    for package in ("codegen", "storage", "workers", "service", "client"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    named = set()
    for number, (folder, imported) in enumerate(FORBIDDEN):
        (tmp_path / folder / f"intruder_{number}.py").write_text(f"import {imported}\n")
        named.add(f"{Path(folder).name}.intruder_{number} -> {imported} (l.1)")
    done = run(sys.executable, "-c", LINT_IMPORTS, cwd=tmp_path, PYTHONPATH=f"{tmp_path}:{tmp_path / 'client'}")
    assert done.returncode == 1, done.stdout
    assert {name for name in named if name not in done.stdout} == set(), done.stdout


# ---- make, CI and the hooks, on machines that lack something


def script(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + body + "\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def bare_machine(folder: Path, *tools: str) -> str:
    """A PATH with these of this machine's tools and no other."""
    (folder / "bin").mkdir()
    for tool in tools:
        path = shutil.which(tool)
        assert path, tool
        (folder / "bin" / tool).symlink_to(path)
    return str(folder / "bin")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that make reads, alone in a folder."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.mark.parametrize(
    ("tools", "python", "says"),
    [
        (("touch",), "", "apt install g++"),
        (("touch", "g++"), "", "cukiln needs Python 3.11 or later"),
        (("touch", "g++"), "without-venv", "apt install python3-venv"),
    ],
)
def test_make_says_what_is_missing(
    tools: tuple[str, ...], python: str, says: str, checkout: Path, tmp_path: Path
) -> None:
    path = bare_machine(tmp_path, *tools)
    script(tmp_path / "bin" / "without-venv", "[[ $2 != *ensurepip* ]]")
    done = run(shutil.which("make") or "make", "run", f"PYTHON={python}", cwd=checkout, PATH=path)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_second_make_run_installs_nothing(checkout: Path, tmp_path: Path) -> None:
    venv = checkout / ".venv"
    script(venv / "bin" / "cukiln", 'echo "cukiln $*"')
    script(venv / "bin" / "python", "echo installing; exit 1")
    for stamp in (".made", ".installed", ".installed-gpu"):
        (venv / stamp).touch()
    done = run("make", "--no-print-directory", "run", cwd=checkout)
    assert (done.returncode, done.stdout) == (0, "cukiln quickstart\n"), done.stderr


def test_changed_pins_are_installed(checkout: Path) -> None:
    venv = checkout / ".venv"
    for stamp in (".made", ".installed", ".installed-gpu"):
        venv.mkdir(exist_ok=True)
        (venv / stamp).touch()
    newer = (venv / ".made").stat().st_mtime + 10
    os.utime(checkout / "constraints.txt", (newer, newer))
    assert "pip" in run("make", "--dry-run", "run", cwd=checkout).stdout


CI_TOOLS = ("g++", "curl", "aarch64-linux-gnu-g++", "qemu-aarch64-static", "chromium")


@pytest.mark.parametrize(
    ("absent", "package"),
    [
        (None, None),
        *zip(
            CI_TOOLS,
            ("g++", "curl", "g++-aarch64-linux-gnu", "qemu-user-static", "chromium"),
            strict=True,
        ),
    ],
)
def test_ci_installs_what_is_missing_and_nothing_else(absent: str | None, package: str | None, tmp_path: Path) -> None:
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    path = bare_machine(tmp_path, "bash", "dirname", "env", "id")
    for tool in CI_TOOLS:
        if tool != absent:
            script(tmp_path / "bin" / tool, "exit 0")
    for tool in ("python3", "sudo", "apt-get", "make"):
        script(tmp_path / "bin" / tool, f'echo "{tool} $*" >> "{tmp_path}/calls"')
    script(tmp_path / "bin" / "sudo", '"$@"')
    done = run(str(tmp_path / ".ci" / "run"), PATH=path)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    installs = [call for call in calls if call.startswith("apt-get install")]
    assert [call.partition("--no-install-recommends ")[2] for call in installs] == ([package] if package else [])
    assert calls[-1] == "make test"


def test_the_hooks_run_out_of_the_environment_without_the_network() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    assert [repo["repo"] for repo in config["repos"]] == ["local"]
    for hook in config["repos"][0]["hooks"]:
        assert hook["language"] == "system"
        program = Path(hook["entry"].split()[0])
        assert program.parent == Path(".venv/bin")
        assert (Path(sys.executable).parent / program.name).exists()


@pytest.mark.parametrize(
    ("failed", "again"),
    [
        (["tests/integration/test_serve.py::test_a", "tests/integration/test_faults.py::test_b[1]"], True),
        ([], False),
        (["tests/integration/test_serve.py"], False),  # it could not be imported
        ([f"tests/integration/test_serve.py::test_{number}" for number in range(4)], False),
    ],
)
def test_only_a_few_tests_get_a_second_run(failed: list[str], again: bool) -> None:
    assert may_run_again(failed) is again
