"""`python -m tests.faults [--jobs N] [--kills N] [--seed N] [--postgres]`: stderr has a line for each
fault: its number, the kind that follows from the seed, and what it was. The last line is one JSON object; the status
is 1 where something is wrong."""

from __future__ import annotations

import argparse
import json
import sys

from tests.faults.random_kills import random_kills, reference


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description="Kill a service's processes at random.")
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--postgres", action="store_true", help="on a PostgreSQL of its own, which is crashed too")
    parser.add_argument("--contract", type=int, default=10, help="examples of each call for schemathesis (default: 10)")
    arguments = parser.parse_args()
    outcome = random_kills(
        reference(arguments.jobs),
        arguments.kills,
        arguments.seed,
        on_postgres=arguments.postgres,
        contract=arguments.contract,
    )
    for fault in outcome.faults:
        sys.stderr.write(f"{fault}\n")
    sys.stdout.write(json.dumps(outcome.as_result()) + "\n")
    return 1 if outcome.faults else 0


if __name__ == "__main__":
    sys.exit(main())
