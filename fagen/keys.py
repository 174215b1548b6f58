"""Stable short keys of frozen values."""

import hashlib
import json
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

KEY_HEX = 16


def changed_fields(value: Any) -> dict[str, Any]:
    """The fields of a frozen dataclass that differ from their declared default, nested ones too.

    A field without a default is always in. So adding a field with a default leaves every key that
    was made before it as it was.
    """
    found: dict[str, Any] = {}
    for field in fields(value):
        held = getattr(value, field.name)
        if is_dataclass(held):
            inner = changed_fields(held)
            if inner:
                found[field.name] = inner
        elif field.default is MISSING or held != field.default:
            found[field.name] = held
    return found


def key_of(value: Any) -> str:
    """A short sha256 of a frozen dataclass, or of any value that JSON can hold."""
    plain = changed_fields(value) if is_dataclass(value) else value
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_HEX]
