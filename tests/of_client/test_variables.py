"""Variables of the environment that are no settings are said, once, with the setting that was meant."""

from __future__ import annotations

import logging

import pytest

from cukiln import variables
from cukiln.cli.server import load_settings
from cukiln.client import Client
from tests.support.run.forget_caches import forget_caches


@pytest.fixture(autouse=True)
def _nothing_said_before() -> None:
    forget_caches(variables)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno == logging.WARNING]


def test_a_misspelt_variable_is_said_once_with_the_setting_that_it_is_nearest_to(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUKILN_OFLINE", "1")
    monkeypatch.setenv("CUKILN_XYZZY", "1")
    for _ in range(2):
        Client().close()
    text = "is set, and is no setting of cukiln, so that it has no effect"
    assert sorted(said(caplog)) == [
        f"CUKILN_OFLINE {text}: the nearest one is CUKILN_OFFLINE",
        f"CUKILN_XYZZY {text}: none is called nearly so",
    ]


@pytest.mark.checkout
def test_a_misspelt_variable_of_the_service_is_said_where_it_starts(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CUKILN_WORKRES", "2")
    load_settings({})
    assert [message.rpartition(" ")[2] for message in said(caplog)] == ["CUKILN_WORKERS"]


def test_what_kubernetes_sets_for_a_service_of_this_name_is_not_said(caplog: pytest.LogCaptureFixture) -> None:
    port = ["", "_PROTO", "_PORT", "_ADDR"]
    of_services = [
        f"CUKILN_{name}{end}"
        for name in ("", "API_")
        for end in ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", *[f"PORT_8765_TCP{of}" for of in port])
    ]
    variables.warn_of_misspelt(of_services)
    assert said(caplog) == []
    variables.warn_of_misspelt(["CUKILN_SERVICE_PROT", "CUKILN_API_PORT"])
    assert [message.split()[0] for message in said(caplog)] == ["CUKILN_SERVICE_PROT", "CUKILN_API_PORT"]


@pytest.mark.checkout
def test_settings_of_client_and_service_are_not_said(caplog: pytest.LogCaptureFixture) -> None:
    from storage.config.settings import Settings

    aliases = {str(field.alias) for field in Settings.model_fields.values()}
    of_service = {alias for alias in aliases if alias.startswith("CUKILN_")}
    of_client = {"CUKILN_URL", "CUKILN_API_KEY", "CUKILN_OFFLINE", "CUKILN_CACHE", "CUKILN_CACHE_BYTES"}
    assert of_service | of_client | {"CUKILN_CONFIG", "CUKILN_LOCK"} == variables.VARIABLES
    variables.warn_of_misspelt(["HOME", "CUKILN_TEST_SEED", *variables.VARIABLES])
    assert said(caplog) == []
