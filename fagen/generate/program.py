"""A Program: one generated module, its entry kernels, and how each is launched."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from fagen.config import Config
from fagen.keys import KEY_HEX
from fagen.problem import Problem

ROWS_OF_A_TILE = 128  # in what backward kernels keep of each query row

# What a text is called while its key is taken: rows outlive a change of name or header.
NAMELESS = "kernel"


class Sizes(NamedTuple):
    """The sizes of one call, in elements. What grid rules and workspaces are computed from."""

    batch: int
    heads_q: int
    heads_kv: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int

    @property
    def rows_beyond_keys(self) -> int:
        """Query rows for which there is no key of their own number."""
        return max(0, self.seq_q - self.seq_kv)

    @property
    def rows_in_tiles(self) -> int:
        """Query rows of all heads, those of each filled up to a multiple of ROWS_OF_A_TILE."""
        tiles = -(-self.seq_q // ROWS_OF_A_TILE)
        return self.batch * self.heads_q * tiles * ROWS_OF_A_TILE

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.heads_q // max(1, self.heads_kv)

    @classmethod
    def of(cls, problem: Problem) -> Sizes:
        s = problem.shape
        return cls(s.batch, s.heads_q, s.heads_kv, s.seq_q, s.seq_kv, s.head_dim, s.head_dim_v)


@dataclass(frozen=True)
class Arg:
    """One runtime argument of an entry kernel.

    name: as in the generated signature; `run.kernel` knows the value of each name.
    type: as Triton takes it: "*bf16", "i32", "i64", "fp32", "tensordesc<bf16[1,1,64,128]>".
    divisible: what the value is a multiple of (pointers in bytes); 1 claims nothing.
    """

    name: str
    type: str
    divisible: int = 1


Dialect = Literal["triton", "gluon"]


@dataclass(frozen=True)
class Entry:
    """One kernel of a Program: its function in the module, its arguments in order, its options.

    dialect: which of Triton's languages the function is written in.
    gives: outputs of a backward pass that it is for; one that is for none of those that are wanted
    is left out.
    """

    function: str
    args: tuple[Arg, ...]
    num_warps: int
    num_stages: int
    maxnreg: int | None = None
    dialect: Dialect = "triton"
    gives: tuple[str, ...] = ()

    def is_for(self, wanted: Collection[str]) -> bool:
        return not self.gives or any(name in wanted for name in self.gives)

    @property
    def options(self) -> dict[str, int]:
        """What Triton takes besides the arguments."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.maxnreg is None else {**options, "maxnreg": self.maxnreg}


@dataclass(frozen=True)
class Workspace:
    """Scratch memory that the entry kernels share. Contents are undefined before the first one.

    shape: as a descriptor of it sees it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Generated, built, verified, timed and stored as one.

    key: digest of the emitted source, name and header left out. The text names each kernel's
    launch options, so they are in it.
    limits: the values of a size, by its name in Sizes, that the source is right for.
    """

    problem: Problem
    config: Config
    name: str
    source: str = field(repr=False)
    key: str
    template_digest: str
    entries: tuple[Entry, ...]
    limits: dict[str, range] = field(default_factory=dict)

    @property
    def interpretable(self) -> bool:
        """Triton's interpreter can run it: there is none for Gluon."""
        return all(entry.dialect == "triton" for entry in self.entries)

    def why_unfit(self, sizes: Sizes) -> str | None:
        """The size that this source is not right for, as a sentence."""
        for name, right in self.limits.items():
            value = getattr(sizes, name)
            if value not in right:
                only = right[-1] if len(right) == 1 else f"{right[0]} to {right[-1]}"
                return f"{self.name} is made for {name} {only}, not {value}."
        return None


def below_header(source: str) -> str:
    """A generated module without the text that opens it."""
    return source.split('"""', 2)[-1]


def source_key(source: str, name: str) -> str:
    """The key of the Program of this name that has this source, from the text alone."""
    return nameless_key(below_header(source).replace(name, NAMELESS))


def nameless_key(text: str) -> str:
    """The key of a module that was rendered under the name NAMELESS and without a header."""
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_HEX]
