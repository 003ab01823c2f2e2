"""Variables of the environment that begin as cukiln's and are no settings: misspelt ones, which are said once."""

import logging
import re
from collections.abc import Collection
from functools import cache

from cukiln.printable import printable

LOG = logging.getLogger("cukiln")
_PREFIX, _OF_TESTS = "CUKILN_", "CUKILN_TEST_"
_OF_CLIENT = "API_KEY CACHE CACHE_BYTES CONFIG LOCK OFFLINE URL"
# A machine may have a service's settings too: storage/config/settings.py.
_OF_SERVICE = """
BLOBS_URL COMPILE_CPU_SECONDS COMPILE_MEMORY_BYTES COMPILE_OUTPUT_BYTES COMPILE_WALL_SECONDS CUDA CXX DATA
EVENT_STREAM_LENGTH GPUS GPU_LOCKS GPU_MODULE GROUP_KERNELS GROUP_MEMORY_BYTES HOST KEEP_BYTES KEEP_DAYS
LEASE_SECONDS LOG_LEVEL LOWER_CPU_SECONDS MAX_ATTEMPTS MAX_BODY_BYTES MAX_CANDIDATES_PER_JOB
MAX_CANDIDATES_PER_PROBLEM MAX_CONNECTIONS MAX_JSON_DEPTH MAX_PROBLEMS MAX_QUEUED_JOBS MAX_SPACE
MEASURE_CPU_SECONDS MEASURE_MEMORY_BYTES MEASURE_OUTPUT_BYTES MEASURE_SECONDS MEASURE_WALL_SECONDS NVCC
PID_NAMESPACES POLL_SECONDS PORT PROMISES TARGET TOOLCHAIN_LIVE_SECONDS TOOL_FOLDERS VERIFY_CPU_SECONDS
VERIFY_MEMORY_BYTES VERIFY_OUTPUT_BYTES VERIFY_PTX VERIFY_SANITIZE VERIFY_WALL_SECONDS WORKERS
"""
_NAMES = (*_OF_CLIENT.split(), *_OF_SERVICE.split())
VARIABLES = frozenset(_PREFIX + name for name in _NAMES)
# What Kubernetes sets in every container for a service whose name begins as cukiln's (docs: "Environment variables").
_OF_KUBERNETES = re.compile(r"CUKILN_(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")


def warn_of_misspelt(environment: Collection[str]) -> None:
    """Name each variable that has no effect, with the setting that it is nearest to."""
    for name in environment:
        if not name.startswith(_PREFIX) or name in VARIABLES:
            continue
        if not name.startswith(_OF_TESTS) and not _is_of_kubernetes(name, environment):
            _warn(name)


@cache  # once in a process
def _warn(name: str) -> None:
    from difflib import get_close_matches  # a program without misspelt variables does not pay for it

    nearest = get_close_matches(name.removeprefix(_PREFIX).upper(), _NAMES, 1)
    hint = f"the nearest one is {_PREFIX}{nearest[0]}" if nearest else "none is called nearly so"
    LOG.warning("%s is set, and is no setting of cukiln, so that it has no effect: %s", printable(name), hint)


def _is_of_kubernetes(name: str, environment: Collection[str]) -> bool:
    of_service = name.removesuffix("_PORT")  # CUKILN_API_PORT, of a service cukiln-api
    is_port = of_service != name and f"{of_service}_SERVICE_HOST" in environment
    return is_port or _OF_KUBERNETES.fullmatch(name) is not None
