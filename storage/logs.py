"""How every server process logs: one line per event on stderr."""

from __future__ import annotations

import logging
import sys


def set_up_logging(level: str = "INFO") -> None:
    """`level` as CUKILN_LOG_LEVEL gives it. Called once, by the process that owns stderr."""
    logging.basicConfig(
        level=level.upper(),
        format="%(asctime)s %(levelname)s %(name)s [%(process)d] %(message)s",
        stream=sys.stderr,
    )
    logging.getLogger("alembic").setLevel(logging.WARNING)  # says at INFO that it looks at the schema, each time
