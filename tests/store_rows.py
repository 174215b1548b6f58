"""Rows and values for the tests of the database, each with something in every field."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fagen.config import Config
from fagen.errors import BadConfig
from fagen.outcome import GATE, Built, Check, KernelFacts, Outcome, Status, Timing, Verdict
from fagen.records import Plan
from fagen.target import Toolchain
from tuning_db import FinalRow, RunRow, TrialRow, VerdictRow, schema
from tuning_db.owner import this_process

V1, V2 = (Path(__file__).parent / "assets" / "db" / f"v{n}.db" for n in (1, 2))
NOW = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=UTC)
TOOLCHAIN = Toolchain("3.7.1", "12.9.86", "2.13.0", "580.82")
OLD_GATE = "fp64-v1"
PLAN = Plan("graph-cold", GATE, "tpe", seed=7, trials=64, timeout_s=180.0)


@dataclass(frozen=True)
class DemoKnobs:
    """Stands for a family's knobs: records must not care whose they are."""

    block_m: int = 64
    mode: str = "plain"


def demo(block_m: int = 64, mode: str = "plain") -> Config:
    return Config("demo", DemoKnobs(block_m, mode))


def decode(plain: dict[str, Any]) -> Config:
    """Like `families.config_from_dict`, of one family."""
    if plain.get("family") != "demo":
        raise BadConfig(f"Kernel family {plain.get('family')!r} is unknown.")
    try:
        return Config("demo", DemoKnobs(**plain["knobs"]))
    except TypeError as error:
        raise BadConfig(str(error)) from error


def outcome(us: float | None = 10.0, *, block_m: int = 64, key: str = "", **more: Any) -> Outcome:
    """A verified and timed outcome; with us=None one that was never timed."""
    timing = None if us is None else Timing((us * 1.1, us, us * 0.9), "graph-cold", (1980, 1965))
    whole = Outcome(
        demo(block_m),
        Status.OK,
        program_key=key or f"p{block_m}",
        template_digest="td",
        built=Built("/c/k.py", (KernelFacts("fwd", 4096, 168, 8, ("spill",)),)),
        verdict=Verdict((Check("o", 1e-3, 2e-3, "row 4"),), "gpu"),
        timing=timing,
        predicted_us=12.5,
    )
    return replace(whole, **more)


def run_row(key: str = "p", **more: Any) -> RunRow:
    owner = this_process()
    row = RunRow(
        problem={"seq": 8192},
        problem_key=key,
        class_key="class",
        bucket_key=f"bucket-{key}",
        target={"name": "h200"},
        device_key="dev",
        toolchain={"triton": "3.7.1"},
        toolchain_key="tool",
        measure_policy="graph-cold",
        exactness_policy=OLD_GATE,
        strategy="tpe",
        seed=0,
        trials_budget=64,
        timeout_s=180.0,
        started=NOW,
        owner_host=owner.host,
        owner_pid=owner.pid,
        owner_token=owner.token,
        heartbeat=NOW,
    )
    return replace(row, **more)


def trial_row(run_id: int, us: float | None, program: str = "prog", **more: Any) -> TrialRow:
    row = TrialRow(
        run_id=run_id,
        config={"family": "demo", "knobs": {"block_m": 64}},
        config_key=f"c-{program}",
        program_key=program,
        template_digest="td",
        status="ok" if us is not None else "crashed",
        reason="" if us is not None else "illegal access",
        created=NOW,
        facts={"registers": 168},
        checks=[{"name": "o", "error": 1e-3, "budget": 2e-3}],
        checked_on="gpu",
        samples_us=None if us is None else [us, us, us * 1.5],
        clocks_mhz=[1980],
        measure_policy="graph-cold",
        median_us=us,
        predicted_us=11.0,
    )
    return replace(row, **more)


def final_row(run_id: int, name: str, us: float | None, **more: Any) -> FinalRow:
    samples = None if us is None else [us]
    row = FinalRow(run_id, name, "program", samples, [1980], "graph-cold", us)
    return replace(row, **more)


def verdict_row(
    passed: bool = True, program: str = "prog", exactness: str = OLD_GATE
) -> VerdictRow:
    checks = [{"name": "o", "error": 1e-3, "budget": 2e-3}]
    return VerdictRow(program, "dev", "tool", exactness, passed, checks, "gpu", NOW)


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def copy_of_v1(folder: Path) -> Path:
    """A copy of the committed database of version 1."""
    return Path(shutil.copy(V1, folder / "old.db"))


def copy_of_v2(folder: Path) -> Path:
    return Path(shutil.copy(V2, folder / "old.db"))


V3_STEP = """
import sqlalchemy as sa, pathlib, time
from alembic import op
revision, down_revision = "0003", "0002"
def upgrade():
    op.add_column("run", sa.Column("note", sa.Text))
"""


def third_version(folder: Path) -> Path:
    """Migrations with a step to a schema 3 that has one more column."""
    migrations = folder / "migrations"
    shutil.copytree(schema.MIGRATIONS, migrations, ignore=shutil.ignore_patterns("__pycache__"))
    (migrations / "versions" / "v0003_note.py").write_text(V3_STEP)
    return migrations


def sql(path: Path, command: str, *values: object) -> list[tuple[Any, ...]]:
    """What one statement answers, past the store."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(command, values).fetchall()


def python(code: str, path: Path, number: float, **env: str) -> str:
    """The output of a new process: sys.argv is path, number, and two folders to import from."""
    here = Path(__file__).parent
    return subprocess.run(
        [sys.executable, "-c", code, path, str(number), here, here.parent],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout
