"""The tuning database as `get` and the command line open it, with the families' own decoder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fagen import settings
from fagen.errors import BadSetting, DatabaseError
from fagen.generate.families import config_from_dict
from fagen.problem import Problem
from fagen.records import Records
from fagen.records.dataset import Dataset, collected, read, write


@contextmanager
def reading(db: str | None) -> Iterator[Records]:
    """Records of --db, else of FAGEN_DB, else of the user. Raises DatabaseError."""
    with Records.open(db, "read", config_from_dict) as records:
        yield records


def location(db: str | None) -> str:
    """The path or URL that --db, FAGEN_DB or the default mean; a password is not shown."""
    where = db or settings.database_setting() or str(settings.default_database_path())
    return re.sub(r"(://[^:/@]+):[^@]+@", r"\1:***@", where)


def dataset(file: Path) -> Dataset:
    """What `fagen db export` wrote. Raises DatabaseError."""
    return read(file, config_from_dict)


def refuse_database(file: Path, db: str | None) -> None:
    """Raises BadSetting for a file to write that is the database, or one of its journals."""
    where = Path(location(db)).resolve()
    mine = {where, *(where.with_name(where.name + end) for end in ("-wal", "-shm", "-journal"))}
    if file.resolve() in mine:
        raise BadSetting(f"{file} is the database, or belongs to it.", "Name another file.")


def exported(db: str | None, problem: Problem, file: Path) -> tuple[Dataset, int]:
    """Writes a data set of a problem; see `records.dataset.collected`. Raises DatabaseError."""
    refuse_database(file, db)
    with reading(db) as records:
        found, left_out = collected(records, problem)
    write(found, file)
    return found, left_out


def checked(db: str | None) -> str:
    """Migrate what is older, and say what is there. Makes no file. Raises DatabaseError."""
    where = db or settings.database_setting() or str(settings.default_database_path())
    if "://" in where or Path(where).exists():
        try:
            Records.open(db, "write", config_from_dict).close()
        except DatabaseError as error:  # one of this version is sound where it can't be written
            try:
                Records.open(db, "read", config_from_dict).close()
            except DatabaseError:
                raise error from None
    else:
        Records.open(db, "read", config_from_dict).close()  # raises when it was named
    return Records.describe(db)
