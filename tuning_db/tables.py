"""The tables. `migrations/` must arrive at exactly these; a test compares the two."""

from __future__ import annotations

from sqlalchemy import Column, ForeignKey, Index, MetaData, Table, Text, UniqueConstraint

from tuning_db.columns import Flag, Json, Positive, Real, Utc, Whole

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

run = Table(
    "run",
    metadata,
    Column("id", Whole, primary_key=True),
    Column("problem", Json, nullable=False),
    Column("problem_key", Text, nullable=False),
    Column("class_key", Text, nullable=False),
    Column("bucket_key", Text, nullable=False),
    Column("target", Json, nullable=False),
    Column("device_key", Text, nullable=False),
    Column("toolchain", Json, nullable=False),
    Column("toolchain_key", Text, nullable=False),
    Column("measure_policy", Text, nullable=False),
    Column("exactness_policy", Text, nullable=False),
    Column("strategy", Text, nullable=False),
    Column("seed", Whole, nullable=False),
    Column("trials_budget", Whole),
    Column("timeout_s", Real),
    Column("started", Utc, nullable=False),
    Column("ended", Utc),
    Column("state", Text, nullable=False),
    Column("partial", Flag, nullable=False),
    Column("owner_host", Text, nullable=False),
    Column("owner_pid", Whole, nullable=False),
    Column("owner_token", Text, nullable=False),
    Column("heartbeat", Utc, nullable=False),
    Index(None, "class_key", "device_key"),
    Index(None, "problem_key", "device_key"),
)

trial = Table(
    "trial",
    metadata,
    Column("id", Whole, primary_key=True),
    Column("run_id", Whole, ForeignKey("run.id"), nullable=False),
    Column("config", Json, nullable=False),
    Column("config_key", Text, nullable=False),
    Column("program_key", Text, nullable=False),
    Column("template_digest", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("facts", Json),
    Column("checks", Json),
    Column("checked_on", Text),
    Column("samples_us", Json),
    Column("clocks_mhz", Json),
    Column("measure_policy", Text),
    Column("median_us", Positive),
    Column("predicted_us", Positive),
    Column("created", Utc, nullable=False),
    Column("quarantined", Text),
    Column("seconds", Json),
    Index(None, "run_id"),
    Index(None, "program_key"),
)

final = Table(
    "final",
    metadata,
    Column("id", Whole, primary_key=True),
    Column("run_id", Whole, ForeignKey("run.id"), nullable=False),
    Column("name", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("samples_us", Json),
    Column("clocks_mhz", Json),
    Column("measure_policy", Text),
    Column("median_us", Positive),
    Column("reason", Text, nullable=False),
    Column("chosen", Flag, nullable=False),
    UniqueConstraint("run_id", "kind", "name"),
)

verdict = Table(
    "verdict",
    metadata,
    Column("program_key", Text, primary_key=True),
    Column("device_key", Text, primary_key=True),
    Column("toolchain_key", Text, primary_key=True),
    Column("exactness", Text, primary_key=True),
    Column("passed", Flag, nullable=False),
    Column("checks", Json, nullable=False),
    Column("checked_on", Text, nullable=False),
    Column("created", Utc, nullable=False),
)
