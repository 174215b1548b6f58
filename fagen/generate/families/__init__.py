"""The kernel families, in the order they are offered. A new family is one more line here."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

from fagen.config import Config
from fagen.errors import BadConfig
from fagen.generate.families import (
    flash,
    flash_bwd,
    flash_bwd_roles,
    flash_bwd_ws,
    flash_ws,
    kv_outer,
    slim,
)
from fagen.generate.families.base import Family

FAMILIES: dict[str, Family] = {
    module.NAME: cast(Family, module)
    for module in (flash_ws, flash, kv_outer, slim, flash_bwd_ws, flash_bwd_roles, flash_bwd)
}


def families_of(direction: str) -> tuple[Family, ...]:
    """Those that compute this direction."""
    return tuple(family for family in FAMILIES.values() if direction == family.DIRECTION)


def family_of(config: Config) -> Family:
    """The module of a config's family. Raises BadConfig."""
    return family_named(config.family)


def repeats(config: Config) -> bool:
    """Whether every run gives the same bits."""
    return family_of(config).repeats(config.knobs)


def family_named(name: str) -> Family:
    if name not in FAMILIES:
        raise BadConfig(f"Family {name!r} is unknown.", f"Use one of {', '.join(FAMILIES)}.")
    return FAMILIES[name]


def config_from_dict(plain: dict[str, Any]) -> Config:
    """The inverse of `Config.to_dict`. A knob that is missing gets its default.

    Raises BadConfig for a family, knob or value that this version does not know.
    """
    family = family_named(str(plain.get("family")))
    choices = {f.name: f.metadata["choices"] for f in fields(family.Knobs)}
    knobs: dict[str, Any] = {}
    for name, value in dict(plain.get("knobs", {})).items():
        if name not in choices:
            raise BadConfig(
                f"{family.NAME} has no knob {name!r}.", f"It has {', '.join(choices)}."
            )
        # The declared value, not its equal: 8 and 8.0 would have different keys.
        found = [choice for choice in choices[name] if choice == value]
        if not found:
            raise BadConfig(
                f"{family.NAME}: {name} can't be {value!r}.",
                f"Use one of {', '.join(map(repr, choices[name]))}.",
            )
        knobs[name] = found[0]
    return Config(family.NAME, family.Knobs(**knobs))
