"""GET /static/…: the pages' scripts and styles, cached for good under the digest of their content."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from service.http.errors import refuse

FOLDER = Path(__file__).parent / "static"
MEDIA_TYPES = {".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8"}

router = APIRouter(include_in_schema=False)


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str
    digest: str  # the first 16 digits of its SHA-256


@lru_cache
def static_files() -> dict[str, StaticFile]:
    """By path below the folder. Nothing else can be asked for, whatever a path says."""
    files = {}
    for path in sorted(FOLDER.rglob("*")):
        if path.suffix in MEDIA_TYPES:
            content = path.read_bytes()
            digest = hashlib.sha256(content).hexdigest()[:16]
            files[path.relative_to(FOLDER).as_posix()] = StaticFile(content, MEDIA_TYPES[path.suffix], digest)
    return files


def static_url(name: str) -> str:
    """Where a page finds the file as it is now."""
    return f"/static/{name}?v={static_files()[name].digest}"


@router.get("/static/{name:path}", response_class=Response)
def get_static(name: str, v: str | None = None) -> Response:
    """The file. Under another digest than its own, as during an upgrade, it is sent as it is, and not kept."""
    file = static_files().get(name)
    if file is None:
        raise refuse("not-found", "There is nothing at this path; /docs lists what there is.")
    keep = "public, max-age=31536000, immutable" if v == file.digest else "no-cache"
    headers = {"Cache-Control": keep, "X-Content-Type-Options": "nosniff"}
    return Response(file.content, media_type=file.media_type, headers=headers)
