"""Every setting of the server, read from the environment in one place: `load_settings()`. Nothing is read at import."""

import ipaddress
import os
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, ValidationInfo, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from storage.config.files import gpu_lock_folder
from storage.config.limits import COMPILE_LIMITS, MEASURE_LIMITS, MEASURE_SECONDS, VERIFY_LIMITS, Limits
from storage.errors import SettingsError


@lru_cache(maxsize=64)  # asked for each request
def is_loopback(host: str) -> bool:
    """Whether `host` (a name or an address, without port) is this machine's loopback."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


MIN_KEY_LENGTH = 16
RESTORING = ".restoring"
"""A folder in the data folder while `cukiln restore` fills it."""
GIB = 2**30
URLS = {
    "redis_url": dict.fromkeys(("redis://", "rediss://", "unix://"), "…"),
    "blobs_url": {
        "file:///": "FOLDER",
        "s3://": "BUCKET/PREFIX",
        "gs://": "BUCKET/PREFIX",
        "az://": "CONTAINER/PREFIX",
    },
}
"""What they may begin with, and what follows."""


class Settings(BaseSettings):
    """The server's settings. The environment variable of each is CUKILN_ and its name, unless an alias stands there."""

    model_config = SettingsConfigDict(
        frozen=True, extra="ignore", populate_by_name=True, alias_generator=lambda name: f"CUKILN_{name.upper()}"
    )

    data_dir: Path = Field(Path(".cukiln"), alias="CUKILN_DATA")
    database_url: str = Field("", alias="DATABASE_URL", description="default: SQLite in the data folder")
    redis_url: str | None = Field(None, alias="REDIS_URL", description="default: an embedded valkey")
    blobs_url: str = Field("", description="default: a folder in the data folder")

    api_key: SecretStr | None = None
    host: str = Field("127.0.0.1", min_length=1)
    port: int = Field(8765, ge=0, le=65535, description="0: any free port")
    workers: int = Field(0, ge=0, le=1024, description="0: one per core")
    operator_path: str = Field("", alias="OPERATOR_PATH", description="trusted operator folders, separated by colons")
    nvcc: str | None = Field(None, description="default: of the PyPI wheels, else of PATH")
    cuda: int = Field(13, ge=12, le=13, description="whose compiler and driver; 12: nvcc 12, else NVRTC 12")
    host_compiler: str | None = Field(None, alias="CUKILN_CXX", description="default: g++")
    pid_namespaces: bool = Field(True, description="of compilers and kernels, where the machine allows them")
    tool_folders: str = Field("", description="that compilers may read, by colons")
    default_target: str | None = Field(
        None, alias="CUKILN_TARGET", pattern=r"^sm_[0-9]{2,3}[af]?$", description="default: requests name one"
    )

    max_body_bytes: int = Field(8 * 2**20, ge=1_000, le=GIB // 4, description="read and parsed in memory, tenfold")
    max_connections: int = Field(4_096, ge=8, description="of the API; one more ends the longest unfinished one")
    max_json_depth: int = Field(32, ge=8, le=500)
    max_problems: int = Field(10_000, ge=1, le=10_000)
    max_queued_jobs: int = Field(1_000, ge=1)
    max_space: int = Field(500_000, ge=1, description="schedules of a search without a limit, before any rule")
    max_candidates_per_problem: int = Field(20_000, ge=1)
    max_candidates_per_job: int = Field(200_000, ge=1)
    lower_cpu_seconds: float = Field(60.0, gt=0, allow_inf_nan=False, description="of one problem's schedules")
    event_stream_length: int = Field(1_000, ge=10)

    keep_days: float = Field(30.0, gt=0, allow_inf_nan=False, description="of jobs that have ended")
    keep_bytes: int | None = Field(None, ge=1, description="of blobs, beyond which younger jobs are removed too")

    lease_seconds: float = Field(5.0, ge=1, le=3600)
    max_attempts: int = Field(3, ge=1, le=100)
    poll_seconds: float = Field(1.0, gt=0, le=60)
    toolchain_live_seconds: float = Field(30.0, ge=5, allow_inf_nan=False)
    log_level: str = Field("INFO", pattern=r"^(?i:debug|info|warning|error|critical)$")

    compile_wall_seconds: float = Field(COMPILE_LIMITS.wall_seconds, gt=0, allow_inf_nan=False)
    compile_cpu_seconds: float = Field(COMPILE_LIMITS.cpu_seconds, gt=0, allow_inf_nan=False)
    compile_memory_bytes: int = Field(COMPILE_LIMITS.memory_bytes, ge=GIB // 4)
    group_memory_bytes: int = Field(GIB, ge=GIB // 8, description="what one group's compiler may need, as predicted")
    group_kernels: int = Field(48, ge=1, le=256, description="kernels of one group; 1: a file for each")
    compile_output_bytes: int = Field(COMPILE_LIMITS.output_bytes, ge=4096)
    verify_wall_seconds: float = Field(VERIFY_LIMITS.wall_seconds, gt=0, allow_inf_nan=False)
    verify_cpu_seconds: float = Field(VERIFY_LIMITS.cpu_seconds, gt=0, allow_inf_nan=False)
    verify_memory_bytes: int = Field(VERIFY_LIMITS.memory_bytes, ge=GIB // 4)
    verify_output_bytes: int = Field(VERIFY_LIMITS.output_bytes, ge=4096)
    verify_sanitize: bool = Field(False, description="run kernels under the address and undefined-behaviour sanitizers")
    verify_ptx: Literal["winners", "none"] = Field(
        "winners", description="which kernels are run from their PTX on the CPU before they are published"
    )
    promises: Literal["tell", "refuse"] = Field(
        "tell",
        description="a kernel whose GPU gave other bits than its PTX promises, within their bounds",
    )

    gpus: str = Field(
        "auto",
        pattern=r"^(auto|none|[A-Za-z0-9-]+(,[A-Za-z0-9-]+)*)$",
        description="which GPUs `cukiln serve` measures on: auto (all it finds), none, or numbers or UUIDs by commas",
    )
    gpu_module: str = Field(
        "workers.cuda.cupy_gpu",
        pattern=r"^[A-Za-z_][A-Za-z0-9_.]*$",
        description="what drives the GPU; tests name a simulated one here",
    )
    gpu_lock_dir: Path = Field(
        Path(),
        alias="CUKILN_GPU_LOCKS",
        description="folder of the lease files, one per GPU: the same for all services on a machine",
    )
    measure_seconds: float = Field(MEASURE_SECONDS, gt=0, le=60, description="of one candidate's samples at most")
    measure_wall_seconds: float = Field(MEASURE_LIMITS.wall_seconds, gt=0, allow_inf_nan=False)
    measure_cpu_seconds: float = Field(MEASURE_LIMITS.cpu_seconds, gt=0, allow_inf_nan=False)
    measure_memory_bytes: int = Field(MEASURE_LIMITS.memory_bytes, ge=GIB // 4)
    measure_output_bytes: int = Field(MEASURE_LIMITS.output_bytes, ge=4096)

    @field_validator("api_key")
    @classmethod
    def _long_enough(cls, value: SecretStr | None) -> SecretStr | None:
        key = value.get_secret_value() if value is not None else None
        if key is not None and (len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable()):
            raise ValueError(
                f"an API key needs at least {MIN_KEY_LENGTH} characters, all printable ASCII: `openssl rand -hex 32` "
                "makes one"
            )
        return value

    @field_validator("database_url")
    @classmethod
    def _known_database(cls, value: str) -> str:
        if value and not value.startswith(("sqlite:///", "postgresql://", "postgres://", "postgresql+psycopg://")):
            raise ValueError("allowed: sqlite:///FILE and postgresql://USER:PASSWORD@HOST/NAME")
        if value.removeprefix("sqlite:///") in ("", ":memory:") and value.startswith("sqlite"):
            raise ValueError("the database is shared by several processes: sqlite:/// needs a file")
        return value

    @field_validator("redis_url", "blobs_url")
    @classmethod
    def _known_url(cls, value: str | None, info: ValidationInfo) -> str | None:
        allowed = URLS[str(info.field_name)]
        if value and not value.startswith(tuple(allowed)):
            raise ValueError(f"allowed: {', '.join(map(''.join, allowed.items()))}")
        return value

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, values: Any) -> Any:
        """Fill what depends on the machine or on the data folder; an empty variable counts as not set."""
        filled = {name: value for name, value in dict(values).items() if value not in ("", None)}
        named = {name: str(field.alias) for name, field in cls.model_fields.items()}
        filled = {named.get(name, name): value for name, value in filled.items()}
        if str(filled.get("CUKILN_PORT")).startswith("tcp://"):  # Kubernetes, for a service called cukiln
            del filled["CUKILN_PORT"]
        data = Path(filled.get("CUKILN_DATA", ".cukiln")).expanduser().absolute()
        filled["CUKILN_DATA"] = data
        filled["CUKILN_GPU_LOCKS"] = gpu_lock_folder(filled.get("CUKILN_GPU_LOCKS"))
        filled.setdefault("DATABASE_URL", f"sqlite:///{data / 'cukiln.db'}")
        filled.setdefault("CUKILN_BLOBS_URL", (data / "blobs").as_uri())
        if str(filled.get("CUKILN_WORKERS", 0)) == "0":
            filled["CUKILN_WORKERS"] = len(os.sched_getaffinity(0))
        return filled

    @model_validator(mode="after")
    def _guarded(self) -> "Settings":
        if self.api_key is None and not is_loopback(self.host):
            raise ValueError(
                f"CUKILN_HOST={self.host} is reachable by others: set CUKILN_API_KEY, or keep to 127.0.0.1, "
                "::1 or localhost"
            )
        return self

    @property
    def is_database_embedded(self) -> bool:
        return self.database_url.startswith("sqlite:")

    @property
    def operator_folders(self) -> list[Path]:
        """Folders of OPERATOR_PATH; `storage.config.operator_path` loads them."""
        return [Path(folder) for folder in self.operator_path.split(os.pathsep) if folder]

    def limits(self, stage: Literal["compile", "verify", "measure"]) -> Limits:
        """Of one compiler call with everything it starts, one verification process, one process that owns a GPU."""
        return Limits(
            wall_seconds=getattr(self, f"{stage}_wall_seconds"),
            cpu_seconds=getattr(self, f"{stage}_cpu_seconds"),
            memory_bytes=getattr(self, f"{stage}_memory_bytes"),
            output_bytes=getattr(self, f"{stage}_output_bytes"),
        )


def load_settings(**overrides: Any) -> Settings:
    """Settings from the environment, `overrides` (by field name) first. Raises `SettingsError`."""
    named = {str(Settings.model_fields[name].alias): value for name, value in overrides.items()}
    try:
        return Settings(**named)
    except ValidationError as error:
        lines = [f"{'.'.join(map(str, e['loc'])) or 'settings'}: {e['msg']}" for e in error.errors(include_input=False)]
        raise SettingsError("; ".join(lines)) from error
