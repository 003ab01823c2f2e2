"""Settings: read in one place, with defaults that work alone and words for what cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from codegen.predict.compile_cost import MAX_BYTES, MAX_KERNELS
from storage.config import files, limits
from storage.config.settings import Settings, load_settings
from storage.errors import SettingsError
from workers.offline import measure_all, measure_bundle

KEY = "0123456789abcdef"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith("CUKILN_") or name in ("DATABASE_URL", "REDIS_URL"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def test_without_any_variable_everything_is_local(tmp_path: Path) -> None:
    settings = load_settings()
    assert settings.data_dir == tmp_path / ".cukiln"
    assert settings.database_url == f"sqlite:///{tmp_path}/.cukiln/cukiln.db"
    assert settings.is_database_embedded
    assert settings.blobs_url == (tmp_path / ".cukiln" / "blobs").as_uri()
    assert settings.redis_url is None
    assert settings.api_key is None
    assert (settings.host, settings.port) == ("127.0.0.1", 8765)
    assert settings.workers == len(os.sched_getaffinity(0))
    assert settings.lease_seconds == 5
    assert not (tmp_path / ".cukiln").exists()  # reading settings makes nothing


def test_variables_are_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "CUKILN_DATA": str(tmp_path / "elsewhere"),
        "DATABASE_URL": "postgresql://me:secret@db/cukiln",
        "REDIS_URL": "redis://:secret@valkey:6379/0",
        "CUKILN_BLOBS_URL": "s3://bucket/blobs",
        "CUKILN_API_KEY": KEY,
        "CUKILN_HOST": "0.0.0.0",
        "CUKILN_PORT": "80",
        "CUKILN_WORKERS": "7",
        "CUKILN_TARGET": "sm_90a",
        "CUKILN_COMPILE_WALL_SECONDS": "30",
        "CUKILN_VERIFY_MEMORY_BYTES": "1073741824",
    }.items():
        monkeypatch.setenv(name, value)
    settings = load_settings()
    assert settings.data_dir == tmp_path / "elsewhere"
    assert settings.database_url == "postgresql://me:secret@db/cukiln"
    assert not settings.is_database_embedded
    assert settings.redis_url == "redis://:secret@valkey:6379/0"
    assert settings.blobs_url == "s3://bucket/blobs"
    assert settings.api_key is not None and settings.api_key.get_secret_value() == KEY
    assert (settings.host, settings.port, settings.workers) == ("0.0.0.0", 80, 7)
    assert settings.default_target == "sm_90a"
    assert settings.limits("compile").wall_seconds == 30
    assert settings.limits("verify").memory_bytes == 2**30


def test_overrides_go_before_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUKILN_PORT", "80")
    settings = load_settings(port=81, data_dir=tmp_path / "x")
    assert (settings.port, settings.data_dir) == (81, tmp_path / "x")
    assert settings.database_url == f"sqlite:///{tmp_path}/x/cukiln.db"


def test_the_address_that_kubernetes_puts_into_the_variable_of_the_port_is_no_port(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUKILN_PORT", "tcp://10.43.0.7:8765")
    assert load_settings().port == 8765
    assert load_settings(port=80).port == 80


def test_an_empty_variable_counts_as_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUKILN_API_KEY", "DATABASE_URL", "REDIS_URL", "CUKILN_BLOBS_URL", "CUKILN_DATA", "CUKILN_WORKERS"):
        monkeypatch.setenv(name, "")
    settings = load_settings()
    assert settings.api_key is None
    assert settings.redis_url is None
    assert settings.is_database_embedded


LOOKED_AT_WHEN_USED = {
    "CUKILN_DATA",
    "CUKILN_NVCC",
    "CUKILN_CXX",
    "OPERATOR_PATH",
    "CUKILN_GPU_LOCKS",
    "CUKILN_TOOL_FOLDERS",
}
"""Any text may be a path: `cukiln serve` refuses those that lead nowhere."""
NONSENSE = {
    "CUKILN_KEEP_BYTES": "-1",
    "DATABASE_URL": "mysql://x",
    "REDIS_URL": "valkey",
    "CUKILN_BLOBS_URL": "ftp://x",
    "CUKILN_API_KEY": "short",
    "CUKILN_HOST": "0.0.0.0",
    "CUKILN_TARGET": "ampere",
    "CUKILN_LOG_LEVEL": "loud",
    "CUKILN_VERIFY_SANITIZE": "perhaps",
    "CUKILN_VERIFY_PTX": "some",
    "CUKILN_PROMISES": "keep",
    "CUKILN_PID_NAMESPACES": "perhaps",
    "CUKILN_GPUS": "the first",
    "CUKILN_GPU_MODULE": "workers/cuda/cupy_gpu.py",
}
VARIABLES = {str(field.alias): field.annotation for field in Settings.model_fields.values()}


@pytest.mark.parametrize("name", sorted(VARIABLES.keys() - LOOKED_AT_WHEN_USED))
def test_every_variable_refuses_nonsense_by_its_name(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    values = [NONSENSE[name]] if VARIABLES[name] not in (int, float) else ["many", "-1", "nan", "inf"]
    for value in values:
        monkeypatch.setenv(name, value)
        with pytest.raises(SettingsError, match=name):
            load_settings()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("CUKILN_PORT", "http", "CUKILN_PORT"),
        ("CUKILN_PORT", "70000", "CUKILN_PORT.*65535"),
        ("CUKILN_WORKERS", "-1", "CUKILN_WORKERS"),
        ("CUKILN_API_KEY", "short", "CUKILN_API_KEY.*at least 16 characters"),
        ("CUKILN_API_KEY", "0123456789abcdef\n", "CUKILN_API_KEY.*printable ASCII"),
        ("CUKILN_API_KEY", "0123456789abcdéf", "CUKILN_API_KEY.*printable ASCII"),
        ("CUKILN_HOST", "0.0.0.0", "CUKILN_HOST=0.0.0.0.*set CUKILN_API_KEY"),
        ("DATABASE_URL", "mysql://x", "DATABASE_URL.*postgresql://"),
        ("DATABASE_URL", "sqlite:///:memory:", "DATABASE_URL.*needs a file"),
        ("DATABASE_URL", "sqlite:///", "DATABASE_URL.*needs a file"),
        ("REDIS_URL", "http://x", "REDIS_URL.*redis://"),
        ("CUKILN_BLOBS_URL", "/folder", "CUKILN_BLOBS_URL.*file:///"),
        ("CUKILN_TARGET", "ampere", "CUKILN_TARGET"),
        ("CUKILN_LEASE_SECONDS", "0", "CUKILN_LEASE_SECONDS"),
        ("CUKILN_MAX_PROBLEMS", "10001", "CUKILN_MAX_PROBLEMS"),
        ("CUKILN_MAX_BODY_BYTES", "268435457", "CUKILN_MAX_BODY_BYTES.*less than or equal to 268435456"),
        ("CUKILN_COMPILE_MEMORY_BYTES", "1", "CUKILN_COMPILE_MEMORY_BYTES"),
        ("CUKILN_POLL_SECONDS", "nan", "CUKILN_POLL_SECONDS"),
        ("CUKILN_GPUS", "0,", "CUKILN_GPUS.*pattern"),
        ("CUKILN_GPUS", "0 1", "CUKILN_GPUS.*pattern"),
        ("CUKILN_GPU_MODULE", "os;", "CUKILN_GPU_MODULE.*pattern"),
        ("CUKILN_MEASURE_SECONDS", "61", "CUKILN_MEASURE_SECONDS.*60"),
    ],
)
def test_nonsense_is_refused_with_the_variable_and_what_is_allowed(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=f"(?s){message}"):
        load_settings()


@pytest.mark.parametrize("value", ["auto", "none", "0", "0,1", "GPU-8f6a1c3e-0d2b-4c6e-9a51-1f0e7d9b2c44,MIG-1-2"])
def test_gpus_are_named_by_number_or_uuid(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("CUKILN_GPUS", value)
    assert load_settings().gpus == value


def test_all_services_of_a_machine_share_the_folder_of_the_gpus_locks(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = load_settings(data_dir=tmp_path / "one").gpu_lock_dir
    assert here.is_absolute()
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    assert here == load_settings(data_dir=tmp_path / "two").gpu_lock_dir == measure_bundle.lock_folder()
    monkeypatch.setenv("HOME", str(tmp_path))
    for named in ("locks", "~/locks"):
        monkeypatch.setenv("CUKILN_GPU_LOCKS", named)
        assert load_settings().gpu_lock_dir == tmp_path / "locks" == measure_bundle.lock_folder()


@pytest.mark.parametrize(("mode", "is_taken"), [(0o1777, True), (0o777, False), (0o755, False), (None, False)])
def test_the_locks_lie_where_every_user_may_write(
    mode: int | None, is_taken: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run_lock = tmp_path / "run-lock"
    if mode is not None:
        run_lock.mkdir()
        run_lock.chmod(mode)
    monkeypatch.setattr(files, "LOCK_FOLDERS", (run_lock, Path("/tmp")))
    assert files.gpu_lock_folder() == (run_lock if is_taken else Path("/tmp")) / "cukiln-gpus"


def test_a_folder_that_no_user_can_write_to_holds_no_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    monkeypatch.setattr(files, "LOCK_FOLDERS", (tmp_path, Path("/tmp")))
    assert files.gpu_lock_folder().parent == tmp_path
    monkeypatch.setattr("os.statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert files.gpu_lock_folder().parent == Path("/tmp")


def test_a_refused_key_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUKILN_API_KEY", "tooshort-secret")
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert "tooshort-secret" not in str(caught.value)
    monkeypatch.setenv("CUKILN_API_KEY", KEY)
    assert KEY not in repr(load_settings())


def test_settings_do_not_change(tmp_path: Path) -> None:
    settings = load_settings()
    with pytest.raises(ValueError, match="frozen"):
        settings.port = 1  # type: ignore[misc]
    assert isinstance(settings, Settings)


def test_importing_the_storage_reads_no_environment_and_writes_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys; before = set(os.listdir('.')); os.environ['CUKILN_PORT'] = 'nonsense'; "
        "import storage.config.settings, storage.database.session, storage.blobs.blob_store; "
        "import storage.entities.jobs, storage.reports.job; "
        "assert set(os.listdir('.')) == before"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, env=environment)


def test_a_run_without_a_service_has_the_limits_that_are_the_settings_defaults(tmp_path: Path) -> None:
    settings = load_settings(data_dir=tmp_path)
    assert settings.limits("compile") == limits.COMPILE_LIMITS
    assert settings.limits("measure") == measure_all.MEASURE_LIMITS == limits.MEASURE_LIMITS
    assert settings.limits("verify") == limits.VERIFY_LIMITS
    assert settings.measure_seconds == measure_bundle.MEASURE_SECONDS
    assert (settings.group_kernels, settings.group_memory_bytes) == (MAX_KERNELS, MAX_BYTES)
