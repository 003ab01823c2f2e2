"""What `python -m service` makes before it listens, so that no request waits for it."""

from __future__ import annotations

from pathlib import Path

from codegen.operators import operators
from codegen.plan.generator import generator
from service.__main__ import ready_app
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
