"""What is known beside jobs: verdicts, times, winners, files, machines, imports, keys."""

from typing import Any

from sqlalchemy import BigInteger, ForeignKey, Index, String, Text, false
from sqlalchemy.orm import Mapped, mapped_column

from storage.database.tables.jobs import Base


class VerdictRow(Base):
    """The verdict on a subject: a code digest on a GPU, a slice digest on the CPU."""

    __tablename__ = "verdicts"
    subject: Mapped[str] = mapped_column(String(64), primary_key=True)
    venue: Mapped[str] = mapped_column(String(8), primary_key=True)  # cpu, gpu
    plan_version: Mapped[str] = mapped_column(String(64), primary_key=True)
    verdict: Mapped[str] = mapped_column(String(20))
    message: Mapped[str | None] = mapped_column(Text)
    details: Mapped[dict[str, Any]]  # seeds, extents, errors against their bounds
    wall_seconds: Mapped[float]
    cpu_seconds: Mapped[float]
    created_at: Mapped[float]


class WinnerRow(Base):
    """The winner record of a problem on a device class; `revision` only ever grows."""

    __tablename__ = "winners"
    __table_args__ = (
        Index("ix_winners_measured", "measured_problem", "target", "device_class"),
        Index("ix_winners_neighbours", "signature", "target", "size"),
    )
    key: Mapped[str] = mapped_column(String(64), primary_key=True)
    revision: Mapped[int]
    operator: Mapped[str] = mapped_column(String(64), index=True)
    target: Mapped[str] = mapped_column(String(16))
    device_class: Mapped[str] = mapped_column(String(128), index=True)
    problem: Mapped[dict[str, Any]]
    # Digest of the problem (codegen.identity.under_cuda), where this was measured: finds it on whichever device class.
    # Null: predicted or withdrawn.
    measured_problem: Mapped[str | None] = mapped_column(String(64))
    # codegen.neighbours.Place, the signature `under_cuda`. Null: withdrawn, or of an operator that the release which
    # wrote it did not have.
    signature: Mapped[str | None] = mapped_column(String(64))
    size: Mapped[float | None]
    record: Mapped[dict[str, Any]]  # cukiln.types.WinnerRecord
    own: Mapped[dict[str, Any] | None]  # what it is without imports, where there are any: storage.entities.record_parts
    searches: Mapped[list[Any]]  # covered: see storage.entities.searches
    attempt: Mapped[str] = mapped_column(String(32))  # token of the attempt that published this revision
    updated_at: Mapped[float] = mapped_column(index=True)


class WinnerUseRow(Base):
    """A record's front, or a part of the record, names this digest: of a file, which is a blob, or of a kernel's code.
    Parts may name what they do where no record answers: the key needs no row in `winners`."""

    __tablename__ = "winner_uses"
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    key: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)


class LibraryRow(Base):
    """A winner's own library: one kernel built alone, found by slice, toolchain and launch-time values."""

    __tablename__ = "libraries"
    id: Mapped[str] = mapped_column(String(64), primary_key=True)
    kernel: Mapped[str] = mapped_column(String(64))
    toolchain: Mapped[str] = mapped_column(String(64))
    code_digest: Mapped[str] = mapped_column(String(64))
    resources: Mapped[dict[str, Any]]
    library: Mapped[str] = mapped_column(String(64))  # blob digests
    cubin: Mapped[str] = mapped_column(String(64))
    source: Mapped[str] = mapped_column(String(64))
    ptx: Mapped[str | None] = mapped_column(String(64), index=True)
    sass: Mapped[str | None] = mapped_column(String(64))
    ptx_verdict: Mapped[dict[str, Any] | None]  # storage.entities.libraries.PtxVerdict
    created_at: Mapped[float]


class LibraryBuilderRow(Base):
    """Which attempt builds a winner's library, or verifies its PTX, now. A row whose attempt has ended counts for
    nothing."""

    __tablename__ = "library_builders"
    library: Mapped[str] = mapped_column(String(64), primary_key=True)  # its id, as in `libraries`, or its PTX
    task_id: Mapped[int]
    token: Mapped[str] = mapped_column(String(32))


class MeasurementRow(Base):
    """Times of a candidate's code on a device class under one driver, and the verification plan that it had passed."""

    __tablename__ = "measurements"
    code_digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    candidate: Mapped[str] = mapped_column(String(64), primary_key=True)  # stands for problem and launch
    device_class: Mapped[str] = mapped_column(String(128), primary_key=True)
    driver: Mapped[str] = mapped_column(String(32), primary_key=True)
    plan_version: Mapped[str] = mapped_column(String(64))
    median_us: Mapped[float]
    measurement: Mapped[dict[str, Any]]  # cukiln.types.Measurement
    created_at: Mapped[float]


class DeviceRow(Base):
    """A GPU that a worker measures on; `drained` says why it takes no more work."""

    __tablename__ = "devices"
    uuid: Mapped[str] = mapped_column(String(64), primary_key=True)
    device_class: Mapped[str] = mapped_column(String(128), index=True)
    capability: Mapped[str] = mapped_column(String(8))
    driver: Mapped[str] = mapped_column(String(32))
    description: Mapped[dict[str, Any]]
    worker: Mapped[str] = mapped_column(String(128))
    seen_at: Mapped[float]
    drained: Mapped[str | None] = mapped_column(Text)


class BlobRow(Base):
    """Bytes that are durable in the blob store: the row is committed only after file and folder were synced."""

    __tablename__ = "blobs"
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    size: Mapped[int] = mapped_column(BigInteger)
    media_type: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[float]  # when the bytes were put, the last time


class ToolchainRow(Base):
    """A compiler stack that made builds here, as its worker described it; also the heartbeat of the worker."""

    __tablename__ = "toolchains"
    digest: Mapped[str] = mapped_column(String(64), primary_key=True)
    description: Mapped[dict[str, Any]]
    targets: Mapped[list[Any]]
    seen_at: Mapped[float]


class ImportRow(Base):
    """Results that were measured elsewhere: what sent them, and when. Its id is its job's; the row outlives both."""

    __tablename__ = "imports"
    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    by: Mapped[str] = mapped_column(String(64))  # the name of the key that sent it
    key: Mapped[str | None] = mapped_column(String(8))  # its id; null: CUKILN_API_KEY, or loopback without keys
    overwrites: Mapped[bool]
    device_class: Mapped[str] = mapped_column(String(128), index=True)
    uuid: Mapped[str] = mapped_column(String(64))
    driver: Mapped[str] = mapped_column(String(32))
    measured_at: Mapped[float]
    created_at: Mapped[float] = mapped_column(index=True)
    withdrawn_at: Mapped[float | None]


class ImportedWinnerRow(Base):
    """The winner record that an import alone would make of a key."""

    __tablename__ = "imported_winners"
    import_id: Mapped[str] = mapped_column(ForeignKey("imports.id"), primary_key=True)
    key: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)
    record: Mapped[dict[str, Any]]


class ImportedFindingRow(Base):
    """Code that is wrong according to an import."""

    __tablename__ = "imported_findings"
    import_id: Mapped[str] = mapped_column(ForeignKey("imports.id"), primary_key=True)
    code_digest: Mapped[str] = mapped_column(String(64), primary_key=True, index=True)


class KeyRow(Base):
    """An API key; revoked ones stay, as imports name them. `overwrites`: its imports may stand beside our results."""

    __tablename__ = "keys"
    id: Mapped[str] = mapped_column(String(8), primary_key=True)
    name: Mapped[str] = mapped_column(String(64))
    scopes: Mapped[list[Any]]
    overwrites: Mapped[bool] = mapped_column(default=False, server_default=false())
    secret_hash: Mapped[str] = mapped_column(String(64))  # SHA-256, in hex
    created_at: Mapped[float]
    revoked_at: Mapped[float | None]
