"""Hopper machine code as a list of instructions: its loops, and what runs under its products."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_FUNCTION = re.compile(r"^\s*Function : .*$", re.MULTILINE)
_INSTRUCTION = re.compile(
    r"^\s*/\*(?P<address>[0-9a-f]+)\*/\s+(?:@!?(?P<guard>U?P\w+)\s+)?(?P<name>[A-Z][\w.]*)"
    r"\s*(?P<operands>[^;]*);",
    re.MULTILINE,
)
_PREDICATE = re.compile(r"\bU?P\d")
_BRANCH_TARGET = re.compile(r"0x([0-9a-f]+)\s*$")
_LOCAL_BYTES = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}


@dataclass(frozen=True)
class Instruction:
    """name: with its suffixes, e.g. `MUFU.EX2`. guarded: may be skipped by a predicate."""

    address: int
    name: str
    operands: str
    guarded: bool

    @property
    def is_product(self) -> bool:
        """A warpgroup's matrix product, asynchronous on the tensor core."""
        return self.name.startswith(("HGMMA", "QGMMA", "IGMMA"))

    @property
    def is_pv(self) -> bool:
        """A product with an operand that lies transposed in shared memory, as V does and K not.

        (P alone doesn't tell: Triton keeps it in registers or in shared memory. Backward, dO, Q
        and K are read like this too.)
        """
        return self.is_product and ".tnsp" in self.operands

    @property
    def commits(self) -> bool:
        """The last product of a group: what a wait counts."""
        return self.is_product and "gsb0" in self.operands

    @property
    def is_wait(self) -> bool:
        return self.name.startswith("WARPGROUP.DEPBAR")

    @property
    def still_allowed(self) -> int:
        """How many groups a wait leaves in flight."""
        return int(self.operands.split(",")[1], 16)

    @property
    def is_move(self) -> bool:
        """From one register to another, or a constant to one."""
        return self.name == "MOV" or self.name.startswith(("MOV.", "IMAD.MOV"))

    @property
    def local_bytes(self) -> int:
        """Bytes a thread that a spill's store or load moves; 0 for every other instruction."""
        name, *suffixes = self.name.split(".")
        if name not in ("STL", "LDL"):
            return 0
        return next((_LOCAL_BYTES[s] for s in suffixes if s in _LOCAL_BYTES), 4)

    @property
    def jumps_back_to(self) -> int | None:
        """Where a conditional branch to an earlier address goes: a loop's end."""
        conditional = self.guarded or _PREDICATE.search(self.operands) is not None
        target = _BRANCH_TARGET.search(self.operands)
        if self.name.split(".")[0] != "BRA" or not conditional or target is None:
            return None
        address = int(target[1], 16)
        return address if address <= self.address else None


@dataclass(frozen=True)
class Overlap:
    """exp2 instructions of one loop body, and how many of them run while a product does."""

    exp2: int
    under_pv: int
    under_qk: int


def functions(listing: str) -> list[list[Instruction]]:
    """The instructions of each function in the text of `cuobjdump -sass`."""
    found = [list(_instructions(text)) for text in _FUNCTION.split(listing)]
    return [function for function in found if function]


def _instructions(text: str) -> Iterator[Instruction]:
    for found in _INSTRUCTION.finditer(text):
        yield Instruction(
            int(found["address"], 16),
            found["name"],
            found["operands"].strip(),
            found["guard"] is not None,
        )


def product_loops(function: Sequence[Instruction]) -> list[list[list[Instruction]]]:
    """Bodies of the innermost loops with products, for each consumer in the listing's order.

    A loop ends in a conditional branch backwards. ptxas moves the retry of a barrier wait behind
    the function's end, from where an unconditional branch returns: that is no loop. In a
    warp-specialised kernel each partition begins by changing its registers, so loops between the
    same two USETMAXREG belong to one consumer.
    """
    with_products: dict[tuple[int, int], list[Instruction]] = {}
    for last in function:
        first = last.jumps_back_to
        if first is not None:
            body = [i for i in function if first <= i.address <= last.address]
            if any(i.is_product for i in body):
                with_products[first, last.address] = body
    changes = [i.address for i in function if i.name.startswith("USETMAXREG")]
    consumers: dict[int, list[list[Instruction]]] = {}
    for span, body in sorted(with_products.items()):
        if not any(_inside(other, span) for other in with_products):
            partition = sum(address < span[0] for address in changes)
            consumers.setdefault(partition, []).append(body)
    return list(consumers.values())


def _inside(inner: tuple[int, int], outer: tuple[int, int]) -> bool:
    return inner != outer and outer[0] <= inner[0] and inner[1] <= outer[1]


def overlap(body: Sequence[Instruction]) -> Overlap:
    """Which exp2 of a loop body lie between a product's issue and the wait that retires it.

    In the order of the listing, which is the order of issue but for code moved out of line. The
    body is walked twice: what is still in flight at its end is so at its start.
    """
    groups: list[bool] = []  # committed and not waited for, oldest first: is it PV?
    begun: bool | None = None  # the group that is being issued
    for _ in range(2):
        exp2 = under_pv = under_qk = 0
        for instruction in body:
            if instruction.is_product:
                begun = instruction.is_pv
                if instruction.commits:
                    groups.append(begun)
                    begun = None
            elif instruction.is_wait:
                groups = groups[max(0, len(groups) - instruction.still_allowed) :]
            elif instruction.name.startswith("MUFU.EX2"):
                exp2 += 1
                in_flight = groups if begun is None else [*groups, begun]
                under_pv += True in in_flight
                under_qk += False in in_flight
    return Overlap(exp2, under_pv, under_qk)
