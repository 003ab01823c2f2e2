"""What a GPU reaches at most, measured by its module under the GPU's lease: one JSON object of rates.

`python -m benchmarks.device_ceilings MODULE UUID LEASE`, in a process of its own: it holds the GPU's context.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from workers.gpu.interface import open_gpu
from workers.gpu.lease import take_lease


def main() -> None:
    module, device, lease = sys.argv[1:]
    taken = take_lease(Path(lease), "measures what the device reaches", lambda holder: None)
    print(json.dumps(open_gpu(module, device).ceilings()))
    taken.release()


if __name__ == "__main__":
    main()
