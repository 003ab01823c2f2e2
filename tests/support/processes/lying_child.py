"""Stands in for the child that owns a GPU and says what a test sets, with the marks of the real one.

`says` in the file that NVIDIA_SIMULATED_GPU names is a list for each process that is started: objects are said, numbers
are pauses in seconds, strings are lines that other code writes into the pipe.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from workers.processes.child_protocol import Saying

if __name__ == "__main__":
    say = Saying()
    path = Path(os.environ["NVIDIA_SIMULATED_GPU"])
    counter = path.with_suffix(".opens")
    number = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(number + 1))
    for each in json.loads(path.read_text())["says"][number]:
        if isinstance(each, dict):
            say(each)
        elif isinstance(each, str):
            os.write(say.pipe, each.encode() + b"\n")
        else:
            time.sleep(each)
