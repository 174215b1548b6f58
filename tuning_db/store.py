"""The store: every question and every change, each in one short transaction."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

from sqlalchemy import (
    Connection,
    CursorResult,
    Select,
    Table,
    bindparam,
    func,
    insert,
    select,
    text,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from tuning_db import owner, queries, schema, tables
from tuning_db.opening import open_for_reading, open_for_writing
from tuning_db.owner import Owner
from tuning_db.place import place_of
from tuning_db.rows import (
    FinalRow,
    RunRow,
    State,
    TrialRow,
    TrialView,
    VerdictRow,
    read_row,
    read_view,
    readable,
    values_of,
)
from tuning_db.session import transaction

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from datetime import datetime
    from pathlib import Path

Mode = Literal["read", "write"]
Keys = Mapping[str, str]  # columns of the run that must be equal: problem_key, device_key, ...
WAIT_S = 30.0

# Made once, for what every trial writes: the database is locked while a statement is made, and 16
# writers wait for each other (16,000 trials on two cores: 21 s; made anew each time 33 s).
_ADD_TRIAL = insert(tables.trial)
_BEAT = (
    update(tables.run).where(tables.run.c.id == bindparam("of")).values(heartbeat=bindparam("now"))
)


class Store:
    """Safe to share between threads (in memory: for one thread), and any number of processes may
    hold one on the same file.

    Every method is one transaction: it happened, or a StoreError says that it did not. Rows are
    never changed, but for a run's end, a verdict (the last one counts) and a quarantine mark.
    "read" makes no file and migrates none.
    """

    def __init__(
        self,
        where: str | Path | None,
        mode: Mode = "read",
        *,
        wait_s: float = WAIT_S,
        migrates: bool = True,
    ) -> None:
        self.place = place_of(where)
        if mode == "read":
            self._engine = open_for_reading(self.place, wait_s)
        else:
            self._engine = open_for_writing(self.place, wait_s, migrates=migrates)

    def close(self) -> None:
        self._engine.dispose()

    @contextmanager
    def _session(self, *, writes: bool = False) -> Iterator[Connection]:
        with transaction(self._engine, self.place, writes=writes) as connection:
            yield connection

    def damage(self) -> list[str]:
        """What SQLite finds wrong in its file, which it looks through, and what is missing of the
        tables. Nothing for a sound one."""
        with self._session() as connection:
            lacking = schema.lacking(connection)
            if connection.dialect.name != "sqlite":
                return lacking
            found = connection.execute(text("PRAGMA integrity_check(10)")).scalars().all()
        return [*(str(line) for line in found if line != "ok"), *lacking]

    def add_run(self, row: RunRow) -> int:
        with self._session(writes=True) as connection:
            return _inserted(connection.execute(insert(tables.run).values(values_of(row))))

    def end_run(self, run_id: int, state: State, *, partial: bool, ended: datetime) -> None:
        """Only a running run ends, and only once."""
        mine = (tables.run.c.id == run_id) & (tables.run.c.state == "running")
        with self._session(writes=True) as connection:
            connection.execute(
                update(tables.run).where(mine).values(state=state, partial=partial, ended=ended)
            )

    def beat(self, run_id: int, now: datetime) -> None:
        """Tells other hosts that the run is alive. Adding a trial does the same."""
        with self._session(writes=True) as connection:
            _beat(connection, run_id, now)

    def end_abandoned_runs(self, now: datetime) -> int:
        """Marks runs whose owner is gone as interrupted. Returns how many; live ones stay."""
        gone = [run for run in self.runs(state="running") if is_abandoned(run, now)]
        for run in gone:
            assert run.id is not None
            self.end_run(run.id, "interrupted", partial=True, ended=run.heartbeat)
        return len(gone)

    def add_trial(self, row: TrialRow) -> int:
        values = values_of(row)
        with self._session(writes=True) as connection:
            _beat(connection, row.run_id, row.created)
            return _inserted(connection.execute(_ADD_TRIAL, values))

    def add_finals(self, rows: Sequence[FinalRow]) -> None:
        """The finalists and peers of a run, all or none. Measured again, the last time counts."""
        with self._session(writes=True) as connection:
            for row in rows:
                _upsert(connection, tables.final, values_of(row), ("run_id", "kind", "name"))

    def put_verdict(self, row: VerdictRow) -> None:
        keys = ("program_key", "device_key", "toolchain_key", "exactness")
        with self._session(writes=True) as connection:
            _upsert(connection, tables.verdict, values_of(row), keys)

    def verdict(
        self, program_key: str, device_key: str, toolchain_key: str, exactness: str
    ) -> VerdictRow | None:
        asked = select(tables.verdict).filter_by(
            program_key=program_key,
            device_key=device_key,
            toolchain_key=toolchain_key,
            exactness=exactness,
        )
        found = self._read(asked, lambda mapping: read_row(VerdictRow, mapping))
        return found[0] if found else None

    def quarantine(self, trial_id: int, reason: str) -> bool:
        """Takes a trial out of `best`, with every other one of its source on that device and
        toolchain; none leaves the table. False: there is no such trial."""
        same = tables.trial.c.id.in_(queries.same_source(trial_id))
        with self._session(writes=True) as connection:
            marked = connection.execute(
                update(tables.trial).where(same).values(quarantined=reason)
            )
            return marked.rowcount > 0

    def runs(
        self,
        *,
        run_id: int | None = None,
        state: State | None = None,
        since: datetime | None = None,
        limit: int | None = None,
        keys: Keys | None = None,
    ) -> list[RunRow]:
        """Newest first."""
        run = tables.run
        asked = select(run).order_by(run.c.started.desc(), run.c.id.desc()).limit(limit)
        asked = asked.filter_by(**(keys or {}))
        if run_id is not None:
            asked = asked.where(run.c.id == run_id)
        if state is not None:
            asked = asked.where(run.c.state == state)
        if since is not None:
            asked = asked.where(run.c.started >= since)
        return self._read(asked, lambda mapping: read_row(RunRow, mapping))

    def status_counts(self) -> dict[int, dict[str, int]]:
        """Per run, how many trials have each status."""
        trial = tables.trial
        asked = select(trial.c.run_id, trial.c.status, func.count()).group_by(
            trial.c.run_id, trial.c.status
        )
        counts: dict[int, dict[str, int]] = {}
        with self._session() as connection:
            for run_id, status, number in connection.execute(asked):
                counts.setdefault(run_id, {})[status] = number
        return counts

    def finals(self, run_id: int) -> list[FinalRow]:
        """Fastest first, those without a time last."""
        final = tables.final
        asked = select(final).where(final.c.run_id == run_id)
        asked = asked.order_by(final.c.median_us.is_(None), final.c.median_us, final.c.id)
        return self._read(asked, lambda mapping: read_row(FinalRow, mapping))

    def trial(self, trial_id: int) -> TrialView | None:
        found = self._read(queries.views().where(tables.trial.c.id == trial_id), read_view)
        return found[0] if found else None

    def trials(
        self,
        *,
        run_id: int | None = None,
        status: str | None = None,
        since: datetime | None = None,
        limit: int | None = None,
        keys: Keys | None = None,
    ) -> list[TrialView]:
        """Newest first."""
        trial = tables.trial
        asked = queries.views().order_by(trial.c.created.desc(), trial.c.id.desc()).limit(limit)
        for name, key in (keys or {}).items():
            asked = asked.where(tables.run.c[name] == key)
        if run_id is not None:
            asked = asked.where(trial.c.run_id == run_id)
        if status is not None:
            asked = asked.where(trial.c.status == status)
        if since is not None:
            asked = asked.where(trial.c.created >= since)
        return self._read(asked, read_view)

    def best(
        self,
        *,
        status: str = "ok",
        each: int = 1,
        keys: Keys | None = None,
        exactness: str | None = None,
    ) -> list[TrialView]:
        """The best `each` sources of every bucket, device and toolchain, best first.

        What counts and in which order: see `queries.best`.
        """
        return self._read(queries.best(status, each, keys or {}, exactness), read_view)

    def _read(self, asked: Select[Any], read: Any) -> list[Any]:
        with self._session() as connection:
            mappings = connection.execute(asked).mappings().all()
        return readable(mappings, read, str(self.place))


def is_abandoned(run: RunRow, now: datetime) -> bool:
    """A run that never said its end and whose process is gone."""
    held_by = Owner(run.owner_host, run.owner_pid, run.owner_token)
    return run.state == "running" and owner.is_gone(held_by, run.heartbeat, now)


def _inserted(result: CursorResult[Any]) -> int:
    key = result.inserted_primary_key
    assert key is not None
    return int(key[0])


def _beat(connection: Connection, run_id: int, now: datetime) -> None:
    connection.execute(_BEAT, {"of": run_id, "now": now})


def _upsert(
    connection: Connection, table: Table, values: dict[str, Any], keys: Sequence[str]
) -> None:
    dialect = postgresql if connection.dialect.name == "postgresql" else sqlite
    rest = {name: value for name, value in values.items() if name not in keys}
    connection.execute(
        dialect.insert(table)
        .values(values)
        .on_conflict_do_update(index_elements=list(keys), set_=rest)
    )
