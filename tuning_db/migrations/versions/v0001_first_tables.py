"""Version 1: run, trial, final, verdict."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    _make_run()
    _make_trial()
    _make_final()
    _make_verdict()


def _make_run() -> None:
    op.create_table(
        "run",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("problem", sa.Text, nullable=False),
        sa.Column("problem_key", sa.Text, nullable=False),
        sa.Column("class_key", sa.Text, nullable=False),
        sa.Column("bucket_key", sa.Text, nullable=False),
        sa.Column("target", sa.Text, nullable=False),
        sa.Column("device_key", sa.Text, nullable=False),
        sa.Column("toolchain", sa.Text, nullable=False),
        sa.Column("toolchain_key", sa.Text, nullable=False),
        sa.Column("measure_policy", sa.Text, nullable=False),
        sa.Column("exactness_policy", sa.Text, nullable=False),
        sa.Column("strategy", sa.Text, nullable=False),
        sa.Column("seed", sa.Integer, nullable=False),
        sa.Column("trials_budget", sa.Integer),
        sa.Column("timeout_s", sa.Double),
        sa.Column("started", sa.Text, nullable=False),
        sa.Column("ended", sa.Text),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("partial", sa.Boolean, nullable=False),
        sa.Column("owner_host", sa.Text, nullable=False),
        sa.Column("owner_pid", sa.Integer, nullable=False),
        sa.Column("owner_token", sa.Text, nullable=False),
        sa.Column("heartbeat", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_run"),
    )
    op.create_index("ix_run_class_key_device_key", "run", ["class_key", "device_key"])
    op.create_index("ix_run_problem_key_device_key", "run", ["problem_key", "device_key"])


def _make_trial() -> None:
    op.create_table(
        "trial",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("config", sa.Text, nullable=False),
        sa.Column("config_key", sa.Text, nullable=False),
        sa.Column("program_key", sa.Text, nullable=False),
        sa.Column("template_digest", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("facts", sa.Text),
        sa.Column("checks", sa.Text),
        sa.Column("checked_on", sa.Text),
        sa.Column("samples_us", sa.Text),
        sa.Column("clocks_mhz", sa.Text),
        sa.Column("measure_policy", sa.Text),
        sa.Column("median_us", sa.Double),
        sa.Column("predicted_us", sa.Double),
        sa.Column("created", sa.Text, nullable=False),
        sa.Column("quarantined", sa.Text),
        sa.PrimaryKeyConstraint("id", name="pk_trial"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_trial_run_id_run"),
    )
    op.create_index("ix_trial_run_id", "trial", ["run_id"])
    op.create_index("ix_trial_program_key", "trial", ["program_key"])


def _make_final() -> None:
    op.create_table(
        "final",
        sa.Column("id", sa.Integer, nullable=False),
        sa.Column("run_id", sa.Integer, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("samples_us", sa.Text),
        sa.Column("clocks_mhz", sa.Text),
        sa.Column("measure_policy", sa.Text),
        sa.Column("median_us", sa.Double),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("chosen", sa.Boolean, nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_final"),
        sa.ForeignKeyConstraint(["run_id"], ["run.id"], name="fk_final_run_id_run"),
        sa.UniqueConstraint("run_id", "kind", "name", name="uq_final_run_id_kind_name"),
    )


def _make_verdict() -> None:
    op.create_table(
        "verdict",
        sa.Column("program_key", sa.Text, nullable=False),
        sa.Column("device_key", sa.Text, nullable=False),
        sa.Column("toolchain_key", sa.Text, nullable=False),
        sa.Column("exactness", sa.Text, nullable=False),
        sa.Column("passed", sa.Boolean, nullable=False),
        sa.Column("checks", sa.Text, nullable=False),
        sa.Column("checked_on", sa.Text, nullable=False),
        sa.Column("created", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint(
            "program_key", "device_key", "toolchain_key", "exactness", name="pk_verdict"
        ),
    )
