"""Records: what was tuned, asked and told in fagen's own values."""

from __future__ import annotations

import logging
from collections import Counter
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import tuning_db
from fagen import settings
from fagen.errors import DatabaseError, FagenError, UnknownTrial
from fagen.outcome import GATE, Status
from fagen.records import convert
from tuning_db import FinalRow, Mode, Store, TrialView
from tuning_db.exchange import Winner, shipped_rows

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

    from fagen.outcome import Outcome, Timing, Verdict
    from fagen.problem import Problem
    from fagen.records.convert import Decode
    from fagen.records.values import Final, Plan, Record, Run
    from fagen.target import Target, Toolchain

_SPARE = 16  # rows asked for beyond the wanted ones: the first may be of another version

# What reading a row raises that is damaged, or of a family or knob that is not known here.
_UNREADABLE = (FagenError, AttributeError, KeyError, TypeError, ValueError)

log = logging.getLogger(__name__)

_ended = 0


def runs_ended() -> int:
    """How many runs this process has ended: what was read before is old when it has grown."""
    return _ended


def shipped(class_key: str | None, decode: Decode) -> list[Record]:
    """What came with fagen for problems of this class, or of all, of every device; needs no
    database."""
    try:
        rows = [row for row in shipped_rows() if class_key in (None, row.class_key)]
    except tuning_db.StoreError as error:
        log.warning("going on without the shipped records: %s", error)
        return []
    return _understood(rows, _shipped_record, decode, "shipped records")


def _shipped_record(row: Winner, decode: Decode) -> Record:
    record = convert.shipped_record(row, decode)
    if record.problem.bucket_key != row.bucket_key:
        raise ValueError(f"{record.problem}: bucket_key is not that of its values")
    return record


class Records:
    """Every method raises DatabaseError where the database can't do it.

    decode turns a stored config into a Config, `families.config_from_dict`. A row that it does
    not know, or that is damaged, is left out with one warning; the others stay usable.
    """

    def __init__(self, store: Store, decode: Decode, write_to: Path | str | None = None) -> None:
        self._store = store
        self._decode = decode
        self._write_to = write_to  # for a store that only reads

    @classmethod
    def open(
        cls, setting: str | None, mode: Mode, decode: Decode, *, migrates: bool = True
    ) -> Records:
        """The database of --db, else of FAGEN_DB, else the user's own.

        "read": makes no file; only a verdict or a quarantine mark is ever written, through a
        connection of its own. The default file may be missing then: nothing is known yet.
        "write": makes it, and migrates an older one unless `migrates` is False.
        """
        named = setting or settings.database_setting()
        where = named or settings.default_database_path()
        with _database_errors():
            try:
                store = Store(where, mode, migrates=migrates)
            except tuning_db.DatabaseMissing:
                if named is not None:
                    raise
                store = Store(None, "write")
        return cls(store, decode, where if mode == "read" else None)

    @classmethod
    def describe(cls, setting: str | None) -> str:
        """Where the database is and what it holds, in one line."""
        named = setting or settings.database_setting()
        where = str(named or settings.default_database_path())
        with _database_errors():
            try:
                store = Store(where, "read")
            except tuning_db.DatabaseMissing:
                return f"{where} does not exist yet; fagen tune makes it."
            except tuning_db.SchemaTooOld as old:
                return f"{old.message} The next fagen tune migrates it, and keeps a backup."
            found = store.damage()
            if found:
                raise DatabaseError(
                    f"{store.place} is damaged: {found[0].replace(chr(10), ' ')}.",
                    "Move it aside, or restore a copy.",
                )
            counts = store.status_counts()
            trials = sum(sum(by_status.values()) for by_status in counts.values())
            return f"{store.place}: {len(store.runs())} runs, {trials} trials."

    def close(self) -> None:
        self._store.close()

    def __enter__(self) -> Records:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin_run(self, problem: Problem, target: Target, toolchain: Toolchain, plan: Plan) -> int:
        """A new run of this process. Runs whose process is gone are marked interrupted first."""
        row = convert.run_row(problem, target, toolchain, plan)
        with _database_errors():
            self._store.end_abandoned_runs(row.started)
            return self._store.add_run(row)

    def save(self, run_id: int, outcome: Outcome) -> int:
        """Stores a trial; ValueError for a time that is no time. Returns its id."""
        with _database_errors():
            return self._store.add_trial(convert.trial_row(run_id, outcome))

    def save_finals(
        self,
        run_id: int,
        programs: Mapping[str, Timing],
        *,
        peers: Mapping[str, Timing] | None = None,
        missing: Mapping[str, str] | None = None,
        chosen: str | None = None,
    ) -> None:
        """What the interleaved race measured; `chosen` is the winner's program key."""
        rows = [
            convert.final_row(run_id, key, "program", t, key == chosen)
            for key, t in programs.items()
        ]
        rows += [convert.final_row(run_id, name, "peer", t) for name, t in (peers or {}).items()]
        rows += [
            FinalRow(run_id, name, "peer", reason=reason)
            for name, reason in (missing or {}).items()
        ]
        with _database_errors():
            self._store.add_finals(rows)

    def finish_run(self, run_id: int, *, interrupted: bool = False) -> None:
        """An interrupted run is partial; its trials count all the same."""
        global _ended
        state: tuning_db.State = "interrupted" if interrupted else "finished"
        with _database_errors():
            self._store.end_run(run_id, state, partial=interrupted, ended=datetime.now(UTC))
        _ended += 1

    def save_verdict(
        self,
        program_key: str,
        device_key: str,
        toolchain_key: str,
        verdict: Verdict,
        *,
        exactness: str = GATE,
    ) -> None:
        """exactness: the gate that gave it."""
        row = convert.verdict_row(program_key, device_key, toolchain_key, exactness, verdict)
        with self._writer() as store:
            store.put_verdict(row)

    def verdict(
        self, program_key: str, device_key: str, toolchain_key: str, *, exactness: str = GATE
    ) -> Verdict | None:
        """What that gate said, and no other."""
        with _database_errors():
            row = self._store.verdict(program_key, device_key, toolchain_key, exactness)
        return None if row is None else convert.verdict_of(row.checks, row.checked_on)

    def quarantine(self, trial_id: int, reason: str) -> None:
        """Takes a trial and its equals out of every answer of `candidates` and `best`."""
        with self._writer() as store:
            known = store.quarantine(trial_id, reason)
        if not known:
            raise _unknown(trial_id)

    def history(
        self,
        problem: Problem,
        target: Target,
        toolchain: Toolchain,
        *,
        policy: str | None = None,
        exactness: str = GATE,
    ) -> list[Outcome]:
        """The last outcome of each config of exactly this problem under one gate, oldest first.

        With `policy`, timed ones count only where they were measured that way.
        """
        keys = _keys(problem_key=problem.key, target=target, toolchain=toolchain)
        keys["exactness_policy"] = exactness
        with _database_errors():
            views = self._store.trials(keys=keys)
        last: dict[str, TrialView] = {}
        for view in views:
            if not view.trial.quarantined:
                last.setdefault(view.trial.config_key, view)
        comparable = [
            view for view in last.values() if policy in (None, view.trial.measure_policy or policy)
        ]
        return [record.outcome for record in self._records(reversed(comparable))]

    def candidates(self, class_key: str, *, each: int = 4) -> list[Record]:
        """What may serve or seed a problem of this class: for every bucket, device and toolchain
        the `each` best timed, those judged by the gate of today first, then the predicted ones;
        then those shipped with fagen."""
        keys = {"class_key": class_key}
        return (
            self._best(keys, each)
            + self._best(keys, each, Status.PREDICTED)
            + shipped(class_key, self._decode)
        )

    def best(
        self, problem: Problem, target: Target, toolchain: Toolchain | None = None
    ) -> Record | None:
        """The winner of this problem's bucket on this device. Without a toolchain: of any, and
        the newest choice there is."""
        keys = _keys(bucket_key=problem.bucket_key, target=target, toolchain=toolchain)
        return max(self._best(keys), key=lambda r: (r.chosen, r.run_id), default=None)

    def winners(self) -> list[Record]:
        """The best of every bucket, device and toolchain; of this gate where there is one."""
        return self._best({})

    def trial(self, trial_id: int) -> Record:
        """Raises UnknownTrial, also for a row that this version can't read."""
        with _database_errors():
            view = self._store.trial(trial_id)
        if view is None:
            raise _unknown(trial_id)
        try:
            return convert.record_of(view, self._decode)
        except _UNREADABLE as error:
            why = error.message if isinstance(error, FagenError) else str(error)
            raise UnknownTrial(
                f"Trial {trial_id} is of another version of fagen: {why}",
                "Use the version that tried it.",
            ) from error

    def trials(
        self,
        *,
        run_id: int | None = None,
        problem: Problem | None = None,
        status: Status | None = None,
        since: datetime | None = None,
        limit: int | None = None,
    ) -> list[Record]:
        """Newest first."""
        keys = {} if problem is None else {"problem_key": problem.key}
        with _database_errors():
            return self._records(
                self._store.trials(
                    run_id=run_id, status=status, since=since, limit=limit, keys=keys
                )
            )

    def runs(
        self,
        *,
        run_id: int | None = None,
        problem: Problem | None = None,
        since: datetime | None = None,
        limit: int | None = None,
    ) -> list[Run]:
        """Newest first."""
        keys = {} if problem is None else {"problem_key": problem.key}
        with _database_errors():
            rows = self._store.runs(run_id=run_id, since=since, limit=limit, keys=keys)
            counts = self._store.status_counts()
        return self._understood(
            rows, lambda row, _: convert.run_of(row, counts.get(row.id or 0, {}))
        )

    def finals(self, run_id: int) -> list[Final]:
        """Fastest first; peers that could not run come last."""
        with _database_errors():
            return [convert.final_of(row) for row in self._store.finals(run_id)]

    @contextmanager
    def _writer(self) -> Iterator[Store]:
        with _database_errors():
            if self._write_to is None:
                yield self._store
                return
            store = Store(self._write_to, "write", migrates=False)
            try:
                yield store
            finally:
                store.close()

    def _best(
        self, keys: dict[str, str], each: int = 1, status: Status = Status.OK
    ) -> list[Record]:
        with _database_errors():
            views = self._store.best(status=status, each=each + _SPARE, keys=keys, exactness=GATE)
        place: Counter[tuple[str, str, str]] = Counter()
        first = []
        for record in self._records(views):
            group = record.problem.bucket_key, record.device_key, record.toolchain_key
            place[group] += 1
            if place[group] <= each:
                first.append(record)
        return first

    def _records(self, views: Iterable[TrialView]) -> list[Record]:
        return self._understood(views, convert.record_of)

    def _understood(self, rows: Iterable[Any], read: Callable[[Any, Decode], Any]) -> list[Any]:
        return _understood(rows, read, self._decode, str(self._store.place))


def _understood(
    rows: Iterable[Any], read: Callable[[Any, Decode], Any], decode: Decode, place: str
) -> list[Any]:
    kept, bad = [], []
    for row in rows:
        try:
            kept.append(read(row, decode))
        except _UNREADABLE as error:
            bad.append(str(error))
    if bad:
        log.warning(
            "%s: %d row(s) of another version left out; the first: %s", place, len(bad), bad[0]
        )
    return kept


@contextmanager
def _database_errors() -> Iterator[None]:
    try:
        yield
    except tuning_db.StoreError as error:
        raise DatabaseError(error.message, error.next_step) from error


def _keys(*, target: Target, toolchain: Toolchain | None = None, **keys: str) -> dict[str, str]:
    keys["device_key"] = target.device_key
    if toolchain is not None:
        keys["toolchain_key"] = toolchain.key
    return keys


def _unknown(trial_id: int) -> UnknownTrial:
    return UnknownTrial(f"There is no trial {trial_id}.", "See fagen db trials.")
