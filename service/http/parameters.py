"""Query parameters: every one known, each once where it is no list; what is allowed in one that is wrong."""

from collections import Counter
from typing import Any

from fastapi import Request

from service.http.errors import Fault, Refused
from service.http.faults import allowed_by


async def known_parameters(request: Request) -> None:
    """A dependency of every call; async, or FastAPI would take a thread for it. Raises Refused.

    `?staet=done` would otherwise list all jobs, not the done ones. Probes may add what they like to /healthz."""
    if not request.scope["query_string"] or not request.url.path.startswith("/v1/"):
        return
    described = {
        parameter["name"]: parameter["schema"] for parameter in _described(request) if parameter["in"] == "query"
    }
    given = Counter(name for name, _ in request.query_params.multi_items())
    faults = [
        _fault(name[:100], sorted(described), times)
        for name, times in given.items()
        if name not in described or (times > 1 and not _takes_several(described[name]))
    ]
    if faults:
        raise Refused(faults)


def allowed_in(request: Request, parameter: str) -> Any:
    """What the OpenAPI document says about a parameter of this call."""
    return next((allowed_by(entry["schema"]) for entry in _described(request) if entry["name"] == parameter), None)


def _fault(name: str, names: list[str], times: int) -> Fault:
    if name not in names:
        return Fault("unknown-field", f"{name} is not a parameter of this call.", name, names)
    return Fault("invalid-value", f"{name} is given {times} times. Send it once.", name)


def _takes_several(schema: dict[str, Any]) -> bool:
    return any(part.get("type") == "array" for part in (schema, *schema.get("anyOf", ())))


def _described(request: Request) -> list[dict[str, Any]]:
    route = request.scope["route"]
    calls: dict[str, Any] = request.app.openapi()["paths"].get(route.path_format, {})
    parameters: list[dict[str, Any]] = calls.get(request.method.lower(), {}).get("parameters", [])
    return parameters
