"""The first schema."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "blobs",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("media_type", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_blobs")),
    )
    op.create_table(
        "builds",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kernel", sa.String(length=64), nullable=False),
        sa.Column("slice", sa.String(length=64), nullable=False),
        sa.Column("toolchain", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=16), nullable=False),
        sa.Column("group_id", sa.String(length=32), nullable=True),
        sa.Column("verify_group_id", sa.String(length=32), nullable=True),
        sa.Column("state", sa.String(length=20), nullable=False),
        sa.Column("code_digest", sa.String(length=64), nullable=True),
        sa.Column("resources", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("log", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_builds")),
    )
    op.create_index(op.f("ix_builds_code_digest"), "builds", ["code_digest"], unique=False)
    op.create_index(op.f("ix_builds_group_id"), "builds", ["group_id"], unique=False)
    op.create_index(op.f("ix_builds_kernel"), "builds", ["kernel"], unique=False)
    op.create_index(op.f("ix_builds_slice"), "builds", ["slice"], unique=False)
    op.create_index(op.f("ix_builds_verify_group_id"), "builds", ["verify_group_id"], unique=False)
    op.create_table(
        "jobs",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("cached", sa.Boolean(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("budget_seconds", sa.Float(), nullable=True),
        sa.Column("deadline", sa.Float(), nullable=True),
        sa.Column("workspace_limit_bytes", sa.BigInteger(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    op.create_index(op.f("ix_jobs_created_at"), "jobs", ["created_at"], unique=False)
    op.create_index(op.f("ix_jobs_state"), "jobs", ["state"], unique=False)
    op.create_table(
        "libraries",
        sa.Column("id", sa.String(length=64), nullable=False),
        sa.Column("kernel", sa.String(length=64), nullable=False),
        sa.Column("toolchain", sa.String(length=64), nullable=False),
        sa.Column("code_digest", sa.String(length=64), nullable=False),
        sa.Column("resources", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("library", sa.String(length=64), nullable=False),
        sa.Column("cubin", sa.String(length=64), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_libraries")),
    )
    op.create_table(
        "toolchains",
        sa.Column("digest", sa.String(length=64), nullable=False),
        sa.Column("description", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("targets", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("seen_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_toolchains")),
    )
    op.create_table(
        "verdicts",
        sa.Column("subject", sa.String(length=64), nullable=False),
        sa.Column("venue", sa.String(length=8), nullable=False),
        sa.Column("plan_version", sa.String(length=64), nullable=False),
        sa.Column("verdict", sa.String(length=20), nullable=False),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("details", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("wall_seconds", sa.Float(), nullable=False),
        sa.Column("cpu_seconds", sa.Float(), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("subject", "venue", "plan_version", name=op.f("pk_verdicts")),
    )
    op.create_table(
        "winners",
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.Column("operator", sa.String(length=64), nullable=False),
        sa.Column("target", sa.String(length=16), nullable=False),
        sa.Column("device_class", sa.String(length=128), nullable=False),
        sa.Column("problem", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("record", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("searches", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("attempt", sa.String(length=32), nullable=False),
        sa.Column("updated_at", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("key", name=op.f("pk_winners")),
    )
    op.create_index(op.f("ix_winners_operator"), "winners", ["operator"], unique=False)
    op.create_index(op.f("ix_winners_updated_at"), "winners", ["updated_at"], unique=False)
    op.create_table(
        "groups",
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=True),
        sa.Column("target", sa.String(length=16), nullable=False),
        sa.Column("toolchain", sa.String(length=64), nullable=True),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("kernels", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("predicted_seconds", sa.Float(), nullable=False),
        sa.Column("source", sa.String(length=64), nullable=True),
        sa.Column("log", sa.String(length=64), nullable=True),
        sa.Column("library", sa.String(length=64), nullable=True),
        sa.Column("cubin", sa.String(length=64), nullable=True),
        sa.Column("phases", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("codegen_seconds", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("compile_seconds", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("verify_seconds", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_groups_job_id_jobs"), ondelete="SET NULL"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_groups")),
    )
    op.create_index(op.f("ix_groups_job_id"), "groups", ["job_id"], unique=False)
    op.create_table(
        "items",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("target", sa.String(length=16), nullable=True),
        sa.Column("ref", sa.String(length=64), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=True),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("predicted_seconds", sa.Float(), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("attempt", sa.Integer(), nullable=False),
        sa.Column("token", sa.String(length=32), nullable=True),
        sa.Column("worker", sa.String(length=128), nullable=True),
        sa.Column("lease_expires_at", sa.Float(), nullable=True),
        sa.Column("created_at", sa.Float(), nullable=False),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_items_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_items")),
        sa.UniqueConstraint("kind", "ref", name=op.f("uq_items_kind_ref")),
    )
    op.create_index(
        "ix_items_best",
        "items",
        ["state", "kind", sa.text("priority DESC"), sa.text("predicted_seconds DESC"), "id"],
        unique=False,
    )
    op.create_index(op.f("ix_items_job_id"), "items", ["job_id"], unique=False)
    op.create_index(op.f("ix_items_lease_expires_at"), "items", ["lease_expires_at"], unique=False)
    op.create_index(op.f("ix_items_state"), "items", ["state"], unique=False)
    op.create_table(
        "job_problems",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("job_id", sa.String(length=32), nullable=False),
        sa.Column("position", sa.Integer(), nullable=False),
        sa.Column("name", sa.String(length=256), nullable=False),
        sa.Column("operator", sa.String(length=64), nullable=False),
        sa.Column("problem", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("target", sa.String(length=16), nullable=False),
        sa.Column("device_class", sa.String(length=128), nullable=False),
        sa.Column("key", sa.String(length=64), nullable=False),
        sa.Column("search", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("state", sa.String(length=16), nullable=False),
        sa.Column("cached", sa.Boolean(), nullable=False),
        sa.Column("planned", sa.Boolean(), nullable=False),
        sa.Column("space_size", sa.BigInteger(), nullable=False),
        sa.Column("candidate_count", sa.Integer(), nullable=False),
        sa.Column("rejections", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("seconds", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("winner", sa.String(length=64), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("started_at", sa.Float(), nullable=True),
        sa.Column("finished_at", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_job_problems_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_job_problems")),
        sa.UniqueConstraint("job_id", "position", name=op.f("uq_job_problems_job_id_position")),
    )
    op.create_index(op.f("ix_job_problems_job_id_state"), "job_problems", ["job_id", "state"], unique=False)
    op.create_index(op.f("ix_job_problems_key"), "job_problems", ["key"], unique=False)
    op.create_index(op.f("ix_job_problems_operator"), "job_problems", ["operator"], unique=False)
    op.create_table(
        "candidates",
        sa.Column("job_problem_id", sa.Integer(), nullable=False),
        sa.Column("candidate", sa.String(length=64), nullable=False),
        sa.Column("schedule", sa.JSON(none_as_null=True), nullable=False),
        sa.Column("kernel", sa.String(length=64), nullable=False),
        sa.Column("build", sa.String(length=64), nullable=False),
        sa.Column("verdict", sa.String(length=20), nullable=True),
        sa.Column("message", sa.Text(), nullable=True),
        sa.Column("predicted_us", sa.Float(), nullable=True),
        sa.Column("prediction", sa.JSON(none_as_null=True), nullable=True),
        sa.Column("measured_us", sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(
            ["job_problem_id"],
            ["job_problems.id"],
            name=op.f("fk_candidates_job_problem_id_job_problems"),
            ondelete="CASCADE",
        ),
        sa.PrimaryKeyConstraint("job_problem_id", "candidate", name=op.f("pk_candidates")),
    )
    op.create_index(op.f("ix_candidates_build"), "candidates", ["build"], unique=False)


def downgrade() -> None:
    op.drop_index(op.f("ix_candidates_build"), table_name="candidates")
    op.drop_table("candidates")
    op.drop_index(op.f("ix_job_problems_operator"), table_name="job_problems")
    op.drop_index(op.f("ix_job_problems_job_id_state"), table_name="job_problems")
    op.drop_index(op.f("ix_job_problems_key"), table_name="job_problems")
    op.drop_table("job_problems")
    op.drop_index(op.f("ix_items_state"), table_name="items")
    op.drop_index(op.f("ix_items_lease_expires_at"), table_name="items")
    op.drop_index("ix_items_best", table_name="items")
    op.drop_index(op.f("ix_items_job_id"), table_name="items")
    op.drop_table("items")
    op.drop_index(op.f("ix_groups_job_id"), table_name="groups")
    op.drop_table("groups")
    op.drop_index(op.f("ix_winners_updated_at"), table_name="winners")
    op.drop_index(op.f("ix_winners_operator"), table_name="winners")
    op.drop_table("winners")
    op.drop_table("verdicts")
    op.drop_table("toolchains")
    op.drop_table("libraries")
    op.drop_index(op.f("ix_jobs_state"), table_name="jobs")
    op.drop_index(op.f("ix_jobs_created_at"), table_name="jobs")
    op.drop_table("jobs")
    op.drop_index(op.f("ix_builds_verify_group_id"), table_name="builds")
    op.drop_index(op.f("ix_builds_slice"), table_name="builds")
    op.drop_index(op.f("ix_builds_kernel"), table_name="builds")
    op.drop_index(op.f("ix_builds_group_id"), table_name="builds")
    op.drop_index(op.f("ix_builds_code_digest"), table_name="builds")
    op.drop_table("builds")
    op.drop_table("blobs")
