"""What `python -m service` makes before it listens, so that no request waits for it."""

from __future__ import annotations

import re
from pathlib import Path

from fastapi import FastAPI

from codegen.operators import operators
from codegen.plan.generator import generator
from service.__main__ import ready_app
from service.app import create_app
from storage.config.settings import load_settings
from storage.database.session import Database


def test_the_application_is_whole_before_its_first_request(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path, gpus="none")
    Database(settings.database_url).migrate()
    generator.cache_clear()
    app = ready_app(settings)
    assert app.openapi_schema is not None and "/v1/jobs" in app.openapi_schema["paths"]
    assert generator.cache_info().misses == len(operators())
    for name in operators():
        generator(name)
    assert generator.cache_info().misses == len(operators())


def test_applications_have_the_same_routes_whatever_their_settings(tmp_path: Path) -> None:
    """Services of the tests share them."""
    plain = create_app(load_settings(data_dir=tmp_path / "a", gpus="none"))
    other = create_app(load_settings(data_dir=tmp_path / "b", host="0.0.0.0", api_key="k" * 40))
    assert described(plain) == described(other)
    assert plain.openapi() == other.openapi()


def described(app: FastAPI) -> list[str]:
    """Routes with all that they hold, without its addresses."""
    return [re.sub(r" at 0x[0-9a-f]+", "", repr(route)) for route in app.router.routes]
