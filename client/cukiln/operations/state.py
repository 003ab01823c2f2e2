"""What a client keeps between its calls."""

from pathlib import Path

from cukiln.errors import ServiceBusy, ServiceFailed, ServiceUnreachable, UnexpectedAnswer, UsageError
from cukiln.http.seconds import check_seconds
from cukiln.http.transport import AsyncTransport, Transport
from cukiln.local_cache import LocalCache
from cukiln.operations.record_memory import RecordMemory
from cukiln.settings import ClientSettings

FRESH_SECONDS = 60.0
# The service is not there, or cannot answer now: not a fault of the request.
NO_ANSWER = (ServiceUnreachable, ServiceBusy, ServiceFailed, UnexpectedAnswer)


class ClientState:
    _transport: Transport | AsyncTransport

    def __init__(
        self,
        settings: ClientSettings,
        cache_dir: Path | str | None,
        lookup_budget: float,
        fresh_seconds: float,
    ) -> None:
        check_seconds("lookup_budget", lookup_budget)
        check_seconds("fresh_seconds", fresh_seconds, waited=False)
        if lookup_budget == 0:
            raise UsageError("lookup_budget is 0; more than that is needed (offline=True has nothing sent)")
        folder = Path(cache_dir) if cache_dir is not None else settings.cache_dir
        self.cache = LocalCache(folder, settings.cache_bytes)
        self._memory = RecordMemory(self.cache)
        self._lookup_budget, self._fresh_seconds = lookup_budget, fresh_seconds

    @property
    def url(self) -> str:
        return self._transport.url
