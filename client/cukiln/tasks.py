"""Tasks of a client that is closed, which may be of several event loops."""

import asyncio
from collections.abc import Collection
from typing import Any


async def cancel_all(tasks: "Collection[asyncio.Task[Any]]") -> None:
    """Those of this event loop have ended then; another loop ends its own when it runs."""
    running = asyncio.get_running_loop()
    here = []
    for task in list(tasks):
        loop = task.get_loop()
        if loop is running:
            task.cancel()
            here.append(task)
        elif not loop.is_closed():
            loop.call_soon_threadsafe(task.cancel)
    await asyncio.gather(*here, return_exceptions=True)
