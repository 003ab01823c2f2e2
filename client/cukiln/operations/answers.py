"""How an answer is read. Raises `UnexpectedAnswer` for one that is none of cukiln's."""

from typing import Any, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from cukiln.errors import UnexpectedAnswer

_Answer = TypeVar("_Answer", bound=BaseModel)


def parse(response: httpx2.Response, kind: type[_Answer]) -> _Answer:
    try:
        return kind.model_validate_json(response.content)
    except ValidationError as error:
        raise not_valid(response, error) from error


def not_valid(response: httpx2.Response, error: ValidationError) -> UnexpectedAnswer:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    return unexpected(response, f"{place}: {first['msg']}")


def json_object(response: httpx2.Response) -> dict[str, Any]:
    """An answer without a type of its own."""
    try:
        answer = response.json()
    except (ValueError, RecursionError) as error:
        raise unexpected(response, f"it is not JSON: {error}") from error
    if not isinstance(answer, dict):
        raise unexpected(response, "it is not a JSON object")
    return answer


def unexpected(response: httpx2.Response, why: str) -> UnexpectedAnswer:
    request = response.request
    return UnexpectedAnswer(
        f"{request.url} did not answer as cukiln does ({why}); check the address, and that client and service "
        "are of the same release",
        method=request.method,
        url=str(request.url),
    )
