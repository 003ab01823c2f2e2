"""What a fenced child may touch: the one list of files behind Landlock's rules and covered folders.

A compiler, or a kernel on the CPU, reads the system's programs and libraries, this Python, this project's code and the
folders that its call names; it writes into its own folders and /dev/null. A process that uses a GPU needs what its
driver needs: it may touch everything but what is kept from all.
"""

from __future__ import annotations

import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from workers.processes.fence import landlock
from workers.processes.fence.landlock import LISTS, READS, WRITES

if TYPE_CHECKING:
    from storage.config.settings import Settings

ROOT = Path(__file__).resolve().parents[3]
# Where distributions keep programs, what a loader and libc read, and what sizes a pool of threads. Of /etc by name:
# its passwords are root's to read.
SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt", "/nix/store", "/gnu/store"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/ld.so.preload", "/etc/alternatives"),
    *(
        "/etc/passwd",
        "/etc/group",
        "/etc/nsswitch.conf",
        "/etc/localtime",
        "/etc/ssl/openssl.cnf",
        "/etc/crypto-policies",
    ),
    *("/dev/zero", "/dev/random", "/dev/urandom", "/sys/devices/system/cpu", "/sys/fs/cgroup"),
)

_PASSWORDS = ("/etc/shadow", "/etc/shadow-", "/etc/gshadow", "/etc/gshadow-")


@dataclass(frozen=True)
class Access:
    """`rules`: paths with their rights. `covers`: folders that are seen empty, but for the paths of each, where mounts
    can do that. `is_open`: what is needed lets other users in."""

    rules: tuple[tuple[str, int], ...]
    covers: dict[str, tuple[str, ...]]
    is_open: bool = True


def secrets_of(settings: Settings) -> tuple[Path, ...]:
    """What no child may touch: the data folder, a database and a queue elsewhere, a container's secrets."""
    paths = [settings.data_dir, Path("/run/secrets")]
    if settings.is_database_embedded:
        database = settings.database_url.removeprefix("sqlite:///")
        paths += [Path(database + ending) for ending in ("", "-wal", "-shm", "-journal")]
    if (settings.redis_url or "").startswith("unix://"):
        paths.append(Path(str(settings.redis_url).removeprefix("unix://").partition("?")[0]))
    return tuple(path.absolute() for path in paths)


def tool_access(
    program: Path,
    *,
    secrets: Sequence[Path],
    reads: Iterable[Path],
    writes: Sequence[Path],
    python: bool,
    own_proc: bool,
    own_user: bool,
    hide: bool,
) -> Access:
    """Of a compiler or a kernel on the CPU. `python`: it is, or starts, this Python. `own_user`: it is not the caller,
    so folders on the way that are closed to others are covered by open ones. `hide`: cover the secrets as well, where
    no rule keeps them."""
    needed = [*([Path(sys.base_prefix)] if python else []), *reads]
    allowed, closed = _allowed(program, tuple(secrets), (*needed,))
    rules = [(str(path), READS) for path in allowed] + [(str(path), WRITES) for path in writes]
    rules += [
        ("/proc" if own_proc else "/proc/self", READS),
        *((device, landlock.ALL) for device in ("/dev/null", "/dev/full")),
        (str(ROOT), LISTS),
    ]
    covers: dict[str, list[Path]] = {str(path): [] for path in secrets if hide and path.exists()}
    if own_user:
        for path, folder in [*closed, *((path, outermost_closed(path)) for path in writes)]:
            if folder is not None:
                covers.setdefault(str(folder), []).append(path)
    others = [path for path in (program, *homes_of(program), *needed) if not any(map(path.is_relative_to, writes))]
    is_open = all(map(_is_open, others))  # what it writes into is handed over
    return Access(tuple(rules), _whole(covers, writes), is_open)


def device_access(*, secrets: Sequence[Path], writes: Sequence[Path], hide: bool) -> Access:
    """Of a process that uses a GPU."""
    closed = (*secrets, *map(Path, _PASSWORDS))
    rules = [(str(path), landlock.ALL) for path in (*without(Path("/"), closed), *writes)]
    rules.append((str(ROOT), LISTS))  # Python lists what it imports from, also where the data folder lies in it
    return Access(tuple(rules), _whole({str(path): [] for path in secrets if hide and path.exists()}, writes))


@cache
def _allowed(
    program: Path, secrets: tuple[Path, ...], reads: tuple[Path, ...]
) -> tuple[tuple[Path, ...], tuple[tuple[Path, Path | None], ...]]:
    """What a tool may read; of each path the folder on the way that is closed to others."""
    named = [*map(Path, SYSTEM), Path(sys.prefix), ROOT, *homes_of(program), *reads]
    allowed = tuple(part for path in dict.fromkeys(named) for part in without(path, secrets))
    return allowed, tuple((path, outermost_closed(path)) for path in allowed)


def homes_of(program: Path) -> Iterator[Path]:
    """Where a program and what belongs to it lie: its folder, or that above `bin`, of it and of what a link names."""
    for path in (program.absolute(), program.resolve()):
        is_in_bin = path.parent.name == "bin" and path.parent.parent.name != ".local"  # not a person's own files
        yield path.parent.parent if is_in_bin else path.parent


def without(folder: Path, secrets: Sequence[Path]) -> Iterator[Path]:
    """`folder`, or where secrets lie in it those parts of it that hold none, and no link that leads into one."""
    kept = [secret.resolve() for secret in secrets]
    above = {parent for secret in kept for parent in secret.parents}
    walked: set[Path] = set()

    def parts(path: Path, real: Path) -> Iterator[Path]:
        if any(real.is_relative_to(secret) for secret in kept):
            return
        if real not in above:
            yield path
        elif real not in walked:  # a link may lead back
            walked.add(real)
            for entry in real.iterdir():
                if not entry.is_symlink():
                    yield from parts(entry, entry)
                elif entry.exists():
                    yield from parts(entry, entry.resolve())

    if folder.exists():
        yield from parts(folder, folder.resolve())


def outermost_closed(path: Path) -> Path | None:
    """Of the folders on the way to `path`, the first that others may not enter."""
    for folder in reversed(path.parents):
        if not folder.stat().st_mode & stat.S_IXOTH:
            return folder
    return None


def _is_open(path: Path) -> bool:
    return path.stat().st_mode & (stat.S_IROTH | stat.S_IXOTH) == stat.S_IROTH | stat.S_IXOTH


def _whole(covers: dict[str, list[Path]], writes: Sequence[Path]) -> dict[str, tuple[str, ...]]:
    """The outermost alone: what they do not show needs no cover. What is written is shown in each."""
    outer = {
        folder: shown
        for folder, shown in covers.items()
        if not any(other != folder and Path(folder).is_relative_to(other) for other in covers)
    }
    return {
        folder: tuple(map(str, dict.fromkeys([*shown, *(path for path in writes if path.is_relative_to(folder))])))
        for folder, shown in outer.items()
    }
