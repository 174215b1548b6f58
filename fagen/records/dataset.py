"""Data sets: everything that was measured of one problem on one device, in one file.

A header and a line a config, as JSON, compressed when the name ends in .gz. What a search would
have seen at any config can be looked up there, so searches can be compared without a GPU
(`fagen bench-tuner`).
"""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from fagen.errors import DatabaseError, FagenError
from fagen.outcome import Outcome, Seconds, Status
from fagen.problem import problem_from_dict
from fagen.target import Target, Toolchain

if TYPE_CHECKING:
    from fagen.config import Config
    from fagen.problem import Problem
    from fagen.records.convert import Decode
    from fagen.records.ledger import Records
    from fagen.records.values import Record

SCHEMA = 1  # of the file; a field that changes its meaning raises it
TIMED = (Status.OK, Status.SLOWER)
MAKE_ONE = "Make one with: fagen db export --seq N --head-dim N --out FILE"


@dataclass(frozen=True)
class Measured:
    """One config. passes_us: the samples of each time it was timed, oldest first; none for a
    failure. seconds: of its first trial. source: the digest of what was emitted for it."""

    config: Config
    status: Status
    reason: str
    passes_us: tuple[tuple[float, ...], ...]
    seconds: Seconds
    source: str

    @property
    def right(self) -> bool:
        """Whether it went through the gate; what was clearly slower did not."""
        return self.status is Status.OK

    @property
    def medians_us(self) -> tuple[float, ...]:
        return tuple(median(samples) for samples in self.passes_us)

    @property
    def true_us(self) -> float | None:
        """The best guess of its time: the mean of its passes' medians. None for a failure."""
        medians = self.medians_us
        return sum(medians) / len(medians) if medians else None


@dataclass(frozen=True)
class Dataset:
    """What was measured of a problem on a device with a toolchain, under one policy and gate."""

    problem: Problem
    target: Target
    toolchain: Toolchain
    policy: str
    exactness: str
    rows: tuple[Measured, ...]

    @property
    def optimum_us(self) -> float:
        """Raises DatabaseError where nothing is right."""
        times = [row.true_us for row in self.rows if row.right and row.true_us is not None]
        if not times:
            raise DatabaseError(f"No config of {self.problem} was timed.", MAKE_ONE)
        return min(times)


def collected(records: Records, problem: Problem) -> tuple[Dataset, int]:
    """The data set of a problem, and how many trials are left out: those of another device,
    toolchain, gate or measuring policy than most configs have.

    Raises DatabaseError where nothing was timed.
    """
    found = [
        record
        for record in reversed(records.trials(problem=problem))  # oldest first
        if record.status is not Status.PREDICTED and not record.quarantined
    ]
    timed = [record for record in found if _policy(record)]
    if not timed:
        raise DatabaseError(
            f"Nothing was timed for {problem}.", "fagen db list shows what is stored."
        )
    kinds = Counter(_kind(record) for record in timed)
    (kind, policy), _ = kinds.most_common(1)[0]
    kept = [
        record for record in found if _kind(record) in ((kind, policy), (kind, ""))
    ]  # a failure has no policy
    return _dataset(problem, policy, kept), len(found) - len(kept)


def _kind(record: Record) -> tuple[tuple[str, ...], str]:
    place = record.device_key, record.toolchain_key, record.exactness
    return place, _policy(record)


def _policy(record: Record) -> str:
    return record.outcome.timing.policy if record.outcome.timing is not None else ""


def _dataset(problem: Problem, policy: str, records: list[Record]) -> Dataset:
    outcomes: dict[Config, list[Outcome]] = {}
    for record in records:
        outcomes.setdefault(record.config, []).append(record.outcome)
    first = records[0]
    return Dataset(
        problem=problem,
        target=first.target,
        toolchain=first.toolchain,
        policy=policy,
        exactness=first.exactness,
        rows=tuple(_measured(config, tried) for config, tried in outcomes.items()),
    )


def _measured(config: Config, tried: list[Outcome]) -> Measured:
    last = tried[-1]
    right = [o for o in tried if o.status in TIMED and o.timing is not None]
    if last.status not in TIMED:  # refused in the end: no time of it counts
        right = []
    return Measured(
        config=config,
        status=last.status,
        reason=last.reason,
        passes_us=tuple(o.timing.samples_us for o in right if o.timing is not None),
        seconds=tried[0].seconds or Seconds(),
        source=last.program_key,
    )


def write(dataset: Dataset, path: Path) -> None:
    """The same data set gives the same bytes. Raises OSError."""
    text = "".join(f"{line}\n" for line in _lines(dataset)).encode()
    data = gzip.compress(text, mtime=0) if path.suffix == ".gz" else text
    part = path.with_name(f"{path.name}.part")  # what was there stays until all is written
    try:
        part.write_bytes(data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _lines(dataset: Dataset) -> Iterator[str]:
    yield _plain(
        {
            "schema": SCHEMA,
            "problem": dataset.problem.to_dict(),
            "target": dataset.target.to_dict(),
            "toolchain": asdict(dataset.toolchain),
            "policy": dataset.policy,
            "exactness": dataset.exactness,
            "configs": len(dataset.rows),
        }
    )
    for row in dataset.rows:
        yield _plain(
            {
                **row.config.to_dict(),
                "status": row.status.value,
                "reason": row.reason,
                "passes_us": [[round(us, 3) for us in samples] for samples in row.passes_us],
                "seconds": [round(value, 3) for value in asdict(row.seconds).values()],
                "source": row.source,
            }
        )


def _plain(value: dict[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def read(path: Path, decode: Decode) -> Dataset:
    """Raises DatabaseError for a file that is missing, cut short or something else. Configs that
    this version does not know make it useless too: a search could not reach them."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
        head, *lines = map(json.loads, text.splitlines())
        return _parsed(head, lines, decode)
    except OSError as error:
        raise DatabaseError(f"Can't read {path}: {error.strerror or error}.", MAKE_ONE) from None
    except (
        FagenError, EOFError, AttributeError, IndexError, KeyError, RecursionError, TypeError,
        ValueError, zlib.error
    ) as error:  # fmt: skip
        said = str(error).rstrip(".")
        kind = f"{type(error).__name__} " if isinstance(error, KeyError) else ""
        raise DatabaseError(f"{path} is no data set: {kind}{said}.", MAKE_ONE) from None


def _parsed(head: dict[str, Any], lines: list[dict[str, Any]], decode: Decode) -> Dataset:
    if head["schema"] != SCHEMA:
        raise ValueError(f"its schema is {head['schema']}, and this fagen reads {SCHEMA}")
    if head["configs"] != len(lines):
        raise ValueError(f"it holds {len(lines)} of {head['configs']} configs")
    return Dataset(
        problem=problem_from_dict(head["problem"]),
        target=_target(head["target"]),
        toolchain=Toolchain(**head["toolchain"]),
        policy=head["policy"],
        exactness=head["exactness"],
        rows=_distinct([_row(line, decode) for line in lines]),
    )


def _row(line: dict[str, Any], decode: Decode) -> Measured:
    passes = tuple(tuple(map(float, samples)) for samples in line["passes_us"])
    seconds = Seconds(*map(float, line["seconds"]))
    if not all(samples and all(0 < us < math.inf for us in samples) for samples in passes):
        raise ValueError(f"a time is not above 0: {line['passes_us']}")
    if not all(0 <= value < math.inf for value in asdict(seconds).values()):
        raise ValueError(f"seconds are not at least 0: {line['seconds']}")
    return Measured(
        config=decode({"family": line["family"], "knobs": line["knobs"]}),
        status=Status(line["status"]),
        reason=str(line["reason"]),
        passes_us=passes,
        seconds=seconds,
        source=str(line["source"]),
    )


def _distinct(rows: list[Measured]) -> tuple[Measured, ...]:
    twice = [config for config, count in Counter(r.config for r in rows).items() if count > 1]
    if twice:
        raise ValueError(f"it has {twice[0]} twice")
    return tuple(rows)


def _target(plain: dict[str, Any]) -> Target:
    target = Target(**plain)
    for name, value in asdict(target).items():
        if not isinstance(value, str) and not 0 < value < math.inf:
            raise ValueError(f"{name} of its target is {value!r}")
    return target
