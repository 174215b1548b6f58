"""Column types that store exactly one kind of value, whatever kind of number they are given.

Left to itself the driver stores a numpy integer as an 8-byte blob that no lookup finds, NaN as
NULL, and a time as the wall clock of whoever wrote it.
"""

from __future__ import annotations

import json
import math
import operator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import Boolean, Dialect, Double, Integer, Text
from sqlalchemy.types import TypeDecorator

TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"  # fixed width, so that text order is the order of instants


@dataclass(frozen=True)
class Damaged:
    """Stands for a stored value that can't be read; its row is left out, the others stay."""

    stored: Any


class Whole(TypeDecorator[int]):
    """A whole number: int, numpy integer or bool."""

    impl = Integer
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> int | None:
        return None if value is None else int(operator.index(value))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return value if value is None or isinstance(value, int) else Damaged(value)


class Flag(TypeDecorator[bool]):
    """True or false, stored as 1 or 0."""

    impl = Boolean(create_constraint=False)
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> bool | None:
        return None if value is None else bool(value)


class Real(TypeDecorator[float]):
    """A finite number, or NULL."""

    impl = Double
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> float | None:
        return None if value is None else finite(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        return value if value is None or isinstance(value, float) else Damaged(value)


class Positive(Real):
    """A time that was measured or predicted: finite and above zero, or NULL."""

    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> float | None:
        return None if value is None else positive(value)


class Json(TypeDecorator[Any]):
    """A JSON document as text, strict: no NaN, no Infinity, numpy scalars as plain numbers."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        return None if value is None else dump(value)

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        if value is None:
            return None
        try:
            return json.loads(value)
        except (TypeError, ValueError):
            return Damaged(value)


class Utc(TypeDecorator[datetime]):
    """An instant, stored as UTC text and read back aware. A naive time is refused."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: Dialect) -> str | None:
        if value is None:
            return None
        if value.utcoffset() is None:
            raise ValueError(f"time {value} has no zone")
        return str(value.astimezone(UTC).strftime(TIME_FORMAT))

    def process_result_value(self, value: Any, dialect: Dialect) -> Any:
        if value is None:
            return None
        try:
            found = datetime.fromisoformat(value)
        except (TypeError, ValueError):
            return Damaged(value)
        return found if found.tzinfo is not None else Damaged(value)


def positive(value: Any) -> float:
    """A finite float above zero. NaN is no time, and zero means that nothing was timed."""
    number = finite(value)
    if number <= 0:
        raise ValueError(f"a time must be above 0, got {number}")
    return number


def finite(value: Any) -> float:
    """A plain float of any kind of number. Raises ValueError for NaN, infinities and what is no
    number."""
    try:
        number = float(value)
    except TypeError:
        raise ValueError(f"a number is needed, got {value!r:.40}") from None
    if not math.isfinite(number):
        raise ValueError(f"a finite number is needed, got {number}")
    return number


def dump(value: Any) -> str:
    """Strict JSON in one line, keys sorted."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain
    )


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):  # numpy scalars and 0-d tensors
        return value.item()
    raise TypeError(f"{type(value).__name__} {value!r} can't be stored as JSON")
