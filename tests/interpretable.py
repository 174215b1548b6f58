"""Which kernel families Triton's interpreter can run: those that aren't written in Gluon."""

from __future__ import annotations

from fagen.config import Config
from fagen.generate.families import FAMILIES
from fagen.generate.render import render
from fagen.problem import make_problem

INTERPRETABLE = [
    name
    for name, family in FAMILIES.items()
    if render(make_problem(256, 64), Config(name, family.Knobs())).interpretable
]
