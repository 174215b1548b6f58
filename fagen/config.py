"""A candidate: a kernel family and a value for each of its knobs."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from fagen.keys import changed_fields, key_of


@dataclass(frozen=True)
class Config:
    """`knobs` is the frozen dataclass that the family's module declares."""

    family: str
    knobs: Any

    @property
    def key(self) -> str:
        return key_of({"family": self.family, "knobs": changed_fields(self.knobs)})

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON with every knob; `families.config_from_dict` reads it back."""
        return {"family": self.family, "knobs": asdict(self.knobs)}

    def __str__(self) -> str:
        shown = ", ".join(f"{f.name}={getattr(self.knobs, f.name)}" for f in fields(self.knobs))
        return f"{self.family}({shown})"
