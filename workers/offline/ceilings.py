"""What the GPU reaches, measured once for each card and driver: `python -m workers.offline.ceilings --out FOLDER`. Exit
status: 0 it is in FOLDER/ceilings.json, 1 it could not be measured, 2 there is no GPU."""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from storage.config.limits import MEASURE_LIMITS
from workers.gpu.engine import probe
from workers.gpu.interface import DEFAULT_MODULE, Device, GpuMissing, choose_device, open_gpu
from workers.gpu.lease import lease_file, take_lease
from workers.gpu.measure_on_gpu import child_environment
from workers.offline.children import compiled_folder, own_processes
from workers.offline.measure_all import say
from workers.offline.measure_bundle import lock_folder
from workers.offline.measured import write_whole
from workers.processes.processes import ProcessError, Processes

CEILINGS_FILE = "ceilings.json"
LIMITS = replace(MEASURE_LIMITS, wall_seconds=300.0, cpu_seconds=300.0)
DONE, FAILED, NO_GPU = 0, 1, 2


def ceilings_of(module: str, device: Device, out: Path, processes: Processes) -> dict[str, float]:
    """Those of an earlier run under the same driver, or measured now; empty where they cannot be."""
    path = out / CEILINGS_FILE
    if path.is_file():
        try:
            earlier = json.loads(path.read_bytes())
            if (earlier["uuid"], earlier["driver"]) == (device.uuid, device.driver):
                return {str(name): float(rate) for name, rate in earlier["ceilings"].items()}
        except (ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            say(f"{path} is damaged ({type(error).__name__}: {error}): the ceilings are measured again")
    lease, cache = lease_file(lock_folder(), device.uuid), compiled_folder(out)
    with processes.private_folder("ceilings") as folder:
        # In a process of its own: it holds the GPU's context.
        command = [sys.executable, "-m", "workers.offline.ceilings", "--child", module, device.uuid, str(lease)]
        finished = processes.run(command, cwd=folder, limits=LIMITS, env=child_environment(cache), device=True)
    if not finished.ok:
        say(f"no ceilings of this device: {finished.text().strip()[-500:]}")
        return {}
    ceilings: dict[str, float] = json.loads(finished.stdout.splitlines()[-1])
    of = {"device": device.name, "uuid": device.uuid, "driver": device.driver}
    write_whole(path, json.dumps({**of, "ceilings": ceilings}).encode())
    say("ceilings: " + ", ".join(f"{name} {rate:.0f}" for name, rate in ceilings.items()))
    return ceilings


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split(":")[0])
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the result")
    parser.add_argument("--device", default="0", help="UUID or number of the GPU; default: the first")
    parser.add_argument("--gpu-module", default=DEFAULT_MODULE, help="what drives the GPU")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        module, uuid, lease = options.child
        take_lease(Path(lease), "measures what the device reaches", lambda holder: None)
        sys.stdout.write(json.dumps(open_gpu(module, uuid).ceilings()) + "\n")
        return DONE
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    try:
        with closing(own_processes()) as processes:
            device = choose_device(probe(options.gpu_module, processes, LIMITS), options.device)
            return DONE if ceilings_of(options.gpu_module, device, out, processes) else FAILED
    except GpuMissing as error:
        sys.stderr.write(f"ceilings: {error}\n")
        return NO_GPU
    except (OSError, ProcessError) as error:
        sys.stderr.write(f"ceilings: {error}\n")
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
