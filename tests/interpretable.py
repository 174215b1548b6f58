"""Which forward families Triton's interpreter can run: those that aren't written in Gluon."""

from __future__ import annotations

from fagen.config import Config
from fagen.generate.families import families_of
from fagen.generate.render import render
from fagen.problem import make_problem

INTERPRETABLE = [
    family.NAME
    for family in families_of("forward")
    if render(make_problem(256, 64), Config(family.NAME, family.Knobs())).interpretable
]
