"""Run everything that shows how kernels do on this machine's GPU, most valuable first, until a budget ends.

`measure_there.py` starts it from what was carried. Primitives, measuring checks, workspaces, ceilings, then candidates
and the vendor's library in turns (`workers.offline.parts`), each in a process of its own under a limit of its own. What
is to be brought back stands in INTO/back from the first part on. Exit status: 0 nothing is left; 1 something failed or
is left; 2 wrong use; 130 interrupted.
"""

import argparse
import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import IO

from storage.config.limits import MEASURE_SECONDS
from workers.gpu.engine import probe
from workers.gpu.interface import DEFAULT_MODULE, Device, DriverTooOld, GpuMissing, choose_device
from workers.offline.brought_back import BACK, StateDamaged, bring_back, restore
from workers.offline.ceilings import LIMITS
from workers.offline.children import CUPY_CACHE, PID_NAMESPACES, allows_namespaces, own_processes
from workers.offline.measure_all import say
from workers.offline.measure_bundle import DONE, INTERRUPTED, LEFT, WRONG_USE, positive, stopping
from workers.offline.parts import BUNDLE, NOT_RUN, NOTHING_TO_USE, Ended, Part, Progress, cards_of, parts_of
from workers.offline.work import BundleError, read_bundle, require_fitting
from workers.processes.die_with_parent import tethered
from workers.processes.processes import ProcessError

DEFAULT_BUDGET, MOST_BUDGET = 500.0, 540.0  # of one call: such a machine ends a command after ten minutes
END_SECONDS = 8.0  # of a budget: a run that ends in order writes its results, then they are packed
GRACE_SECONDS = 5.0  # between the two signals that end a part
BACK_SECONDS = 20.0  # between two states of INTO/back while a part runs
_LOOK_SECONDS = 0.2
PROBE_LIMITS = replace(LIMITS, wall_seconds=120.0, cpu_seconds=120.0)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    into: Path = options.into.absolute()
    into.mkdir(parents=True, exist_ok=True)
    lock = (into / "lock").open("ab")  # held until this process has ended
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.stderr.write(f"measure_there: another run uses {into}; wait for it, or name another folder with --into\n")
        return WRONG_USE
    installed = options.installed.absolute()
    try:
        namespaces = allows_namespaces() and not options.no_pid_namespaces
        card, namespaces = _card(options.gpu_module, options.device, namespaces)
        if card is not None:
            require_fitting(read_bundle(installed / BUNDLE), card)
        into = _folder_of(card, into)
        if options.continue_from is not None and card is not None:
            say(restore(options.continue_from.absolute(), into, card))
    except (DriverTooOld, BundleError, StateDamaged, ProcessError) as error:
        sys.stderr.write(f"measure_there: {error}\n")
        return WRONG_USE
    deadline = options.began + options.budget - END_SECONDS
    module, seconds = options.gpu_module, options.seconds
    device = options.device if card is None else card.uuid
    parts = parts_of(installed, into, gpu_module=module, device=device, seconds=seconds)
    progress = Progress(into, options.installed.name, card)
    with stopping() as stopped:
        for part in parts:
            limit = progress.next_limit(part, options.budget, deadline - time.monotonic())
            if limit is not None and not stopped:
                ended = run_part(part, progress, limit, into, parts, stopped, namespaces=namespaces)
                say(f"{part.name}: {'cut off' if ended.cut_off else ended.status} after {ended.seconds:.1f} s")
    files = bring_back(into, progress, parts)
    for name, state in progress.described(parts):
        say(f"{name}: {state}")
    say(f"{into / BACK}: {len(files)} files, {sum(files.values()) / 1e6:.2f} MB; `cukiln import-results` takes them")
    if stopped:
        return INTERRUPTED
    return DONE if all(part.name in progress.ended and progress.ended[part.name].is_well for part in parts) else LEFT


def _card(module: str, name: str, namespaces: bool) -> tuple[Device | None, bool]:
    """The card that is measured on, and whether it is used in PID namespaces; None, said, where there is none: each
    part then says so, too. Raises DriverTooOld."""
    try:
        devices, namespaces = _devices(module, namespaces)
        card = choose_device(devices, name)
    except DriverTooOld:
        raise
    except (GpuMissing, ProcessError) as error:
        say(f"no GPU to use: {error}")
        return None, namespaces
    say(f"{card.name}, {card.uuid}, driver {card.driver}")
    return card, namespaces


def _devices(module: str, namespaces: bool) -> tuple[list[Device], bool]:
    """Asked in a PID namespace where they are allowed, and where the driver does not answer in one, outside; then all
    parts stay outside. Raises GpuMissing, ProcessError."""
    with closing(own_processes(namespaces=namespaces)) as processes:
        try:
            if (devices := probe(module, processes, PROBE_LIMITS)) or not processes.means.namespaces:
                return devices, namespaces
            why = "no GPU is listed"
        except DriverTooOld:
            raise
        except (GpuMissing, ProcessError) as error:
            if not processes.means.namespaces:
                raise
            why = str(error)
    with closing(own_processes(namespaces=False)) as processes:
        devices = probe(module, processes, PROBE_LIMITS)
    if devices:
        say(f"the GPU answers outside of PID namespaces alone, where all parts stay now ({why})")
    return devices, namespaces and not devices


def _folder_of(card: Device | None, into: Path) -> Path:
    """Where another card's run stands, a folder of its own below."""
    if card is None or not (cards := cards_of(into)) or cards[-1].uuid == card.uuid:
        return into
    own = into / card.uuid
    own.mkdir(exist_ok=True)
    say(f"{into} holds a run on another card, {cards[-1].name}, {cards[-1].uuid}: this one is kept apart, in {own}")
    return own


def run_part(
    part: Part,
    progress: Progress,
    limit: float,
    into: Path,
    parts: Sequence[Part],
    stopped: Sequence[int],
    *,
    namespaces: bool,
) -> Ended:
    """In a process that ends with this one; its output goes into a file of its own."""
    command = [*part.command, *(["--budget", f"{max(1.0, limit - GRACE_SECONDS):.1f}"] if part.takes_rest else [])]
    progress.begin(part)
    say(f"{part.name}: at most {limit:.0f} s")
    began = written = time.monotonic()
    with (into / part.log).open("ab") as log:
        process = _started(command, into, log, namespaces)
        while process.poll() is None and time.monotonic() - began < limit and not stopped:
            time.sleep(_LOOK_SECONDS)
            if time.monotonic() - written > BACK_SECONDS:
                bring_back(into, progress, parts)
                written = time.monotonic()
        cut_off = _ended(process)
    why = _last_line(into / part.log) if process.returncode in (NOT_RUN, NOTHING_TO_USE) else ""
    ended = Ended(process.returncode, time.monotonic() - began, limit, cut_off or bool(stopped), why)
    progress.end(part, ended)
    bring_back(into, progress, parts)
    return ended


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return next((line.strip()[:300] for line in reversed(lines) if line.strip()), "")


def _started(command: Sequence[str], into: Path, log: IO[bytes], namespaces: bool) -> subprocess.Popen[bytes]:
    # Without a file the buffers of a part would be lost where it is killed.
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", CUPY_CACHE: str(into / "cache")}
    environment |= {} if namespaces else {PID_NAMESPACES: "false"}
    return subprocess.Popen(
        tethered(command),
        cwd=into,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def _ended(process: subprocess.Popen[bytes]) -> bool:
    """End it where it still runs, in order if it can; whether it did."""
    if process.poll() is not None:
        return False
    process.terminate()
    try:
        process.wait(GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return True


def _budget(text: str) -> float:
    value = positive(text)
    if value > MOST_BUDGET:
        raise argparse.ArgumentTypeError(f"{text} is over {MOST_BUDGET:.0f} seconds; the same command continues")
    return value


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="measure_there.py", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("installed", type=Path, help=argparse.SUPPRESS)
    # What unpacking took is of the budget too; by time.monotonic(), which is one clock for all processes.
    parser.add_argument("--began", type=float, default=time.monotonic(), help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, required=True, help="folder of everything (cukiln-measured)")
    parser.add_argument("--budget", type=_budget, default=DEFAULT_BUDGET, metavar="SECONDS", help="of this call (500)")
    parser.add_argument("--continue-from", type=Path, metavar="BACK", help="what an earlier machine's run brought back")
    parser.add_argument("--device", default="0", help="UUID or number of the GPU; default: the first")
    parser.add_argument("--seconds", type=positive, default=MEASURE_SECONDS, help="of one candidate's samples at most")
    parser.add_argument("--gpu-module", default=DEFAULT_MODULE, help="what drives the GPU")
    parser.add_argument("--no-pid-namespaces", action="store_true", help="where the driver does not work in one")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
