"""What a compiled kernel says of itself before it is run, and what that rules out.

Findings are notes for a reader (docs/lint.md); `why_rejected` names the few that mean a kernel is
not worth the device's time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fagen.generate import nvtools, sass
from fagen.generate.sass import Instruction
from fagen.outcome import Built, KernelFacts
from fagen.target import Target

# Static local stores plus loads a thread, in bytes. One H200, Triton 3.6, bf16 D128 N8192
# (benchmarks/results): 108 bytes were within 1.04 of the best, 1216 at 2.9 times it. One source
# that spills nothing in 3.6 and 3.7 has 26 stores and 51 loads in 3.9 (308 bytes) and must be
# timed; 801 and 1081 of them (7528 bytes), a third inside the loops, made a Hopper kernel useless.
SPILL_LIMIT_BYTES = 2048

# Waits for each wgmma. Where ptxas serialises, every wgmma of the function has its own wait: 64 of
# 64 and 24 of 24 (Triton 3.6, 3.7, 3.9). Otherwise there are one or two for the 12 to 24 of a
# loop: 0.08 to 0.18 in 20 kernels of `flash`, `kv_outer` and a warp-specialised one at D64, 128
# and 256, 0.67 at D16 and block_n 32, whose products are one and two wgmma long.
SERIALISED_SHARE = 0.9

# From here on ptxas is asked why: at most 1 s, and only small head dims come here unserialised.
ASK_SHARE = 1 / 3

SERIALISED = "serialised wgmma"
# Moves from here on are worth a note: loops of the winners of benchmarks/results/
# h200-forward*.json have at most 0.07 of them, and one with 0.2 was 3 % behind its sibling with
# 0.06 (D96 causal N4096, h200_flash_ws_race5.json).
MOVES_SHARE = 0.1

REALLOCATED = "register reallocation"
NOT_REALLOCATED = "no register reallocation"

_RESOURCES = re.compile(r"Function (?P<name>[^:]+):\s*REG:(?P<registers>\d+)")
_CODE = re.compile(r"C\d+: ")


def facts_of(asm: Mapping[str, Any], name: str, shared_bytes: int) -> KernelFacts:
    """Facts of one kernel, of Triton's `asm`: the `cubin`, and `ptx` and `ttgir` where they are.

    A finding says so when the disassembler can't read the cubin.
    """
    try:
        listing = nvtools.listing(asm["cubin"])
    except nvtools.ToolFailed as error:
        return KernelFacts(name, shared_bytes, 0, 0, (f"cubin not read: {error}",))
    return KernelFacts(
        name,
        shared_bytes,
        registers_in(listing),
        spill_bytes_in(listing),
        findings_in(listing, asm.get("ptx", ""), asm.get("ttgir", "")),
    )


def why_rejected(built: Built, target: Target) -> str | None:
    """Why this can't win and is not worth the device's time, as a sentence, or None."""
    reasons = (_why_kernel_rejected(kernel, target) for kernel in built.kernels)
    return next((reason for reason in reasons if reason is not None), None)


def _why_kernel_rejected(kernel: KernelFacts, target: Target) -> str | None:
    findings = kernel.findings
    remarks = "".join(f" ({finding})" for finding in findings if _CODE.match(finding))
    if kernel.shared_bytes > target.shared_bytes:
        return (
            f"{kernel.name} needs {kernel.shared_bytes} bytes of shared memory,"
            f" a block of {target.name} has {target.shared_bytes}."
        )
    if kernel.spill_bytes > SPILL_LIMIT_BYTES:
        return (
            f"{kernel.name} spills {kernel.spill_bytes} bytes a thread,"
            f" more than {SPILL_LIMIT_BYTES}."
        )
    # Its consumers are written for registers that the other warps were to give them.
    if NOT_REALLOCATED in findings:
        return f"{kernel.name} is warp-specialised, but its registers stay as they are{remarks}."
    # A plain kernel may still be worth its time: 128x64 with pointer loads, 24 waits for 24 wgmma
    # in Triton 3.6, is within 1.2 to 1.4 of the best of those runs.
    if SERIALISED in findings and any(note.startswith(REALLOCATED) for note in findings):
        return f"{kernel.name} is warp-specialised, but waits for each wgmma alone{remarks}."
    return None


def registers_in(listing: str) -> int:
    """The most registers a thread of any function in `cuobjdump -res-usage`."""
    return max((int(found["registers"]) for found in _RESOURCES.finditer(listing)), default=0)


def spill_bytes_in(listing: str) -> int:
    """Bytes that the local stores and loads of a listing move a thread, each counted once."""
    return sum(_spilled(function) for function in sass.functions(listing))


def findings_in(listing: str, ptx: str = "", ttgir: str = "") -> tuple[str, ...]:
    """Notes on the machine code; ptx and ttgir say what was asked of the compiler."""
    functions = sass.functions(listing)
    products = _count(functions, "HGMMA", "QGMMA", "IGMMA")
    waits = _count(functions, "WARPGROUP.DEPBAR")
    changes = _count(functions, "USETMAXREG")
    specialised = "setmaxnreg" in ptx or "requestedRegisters" in ttgir
    remarks: tuple[str, ...] = ()
    if (products and waits >= ASK_SHARE * products) or (specialised and not changes):
        remarks = _remarks(ptx)
    serialised = products >= 4 and waits >= SERIALISED_SHARE * products
    notes = []
    if products:
        notes.append(f"{products} wgmma, {waits} waits")
    if serialised or any("are serialized" in remark for remark in remarks):
        notes.append(SERIALISED)
    if tma := _count(functions, "UTMALDG"):
        notes.append(f"{tma} TMA loads")
    if specialised:
        notes.append(f"{REALLOCATED}: {changes} setmaxnreg" if changes else NOT_REALLOCATED)
    consumers = [loops for function in functions for loops in sass.product_loops(function)]
    if SERIALISED not in notes:  # there the exp2 between one wgmma and its own wait say nothing
        shown = [note for note in map(_overlap_note, consumers) if note]
        alone = len(shown) == 1
        notes += shown if alone else [f"consumer {i}: {note}" for i, note in enumerate(shown, 1)]
    if spilled := max((_spilled(body) for loops in consumers for body in loops), default=0):
        notes.append(f"spills {spilled} bytes in a loop")
    bodies = [body for loops in consumers for body in loops]
    worst = max(bodies, key=lambda body: _moves(body) / len(body), default=())
    if worst and _moves(worst) >= MOVES_SHARE * len(worst):
        notes.append(f"{_moves(worst)} of {len(worst)} instructions of a loop are moves")
    return (*notes, *remarks)


def _overlap_note(loops: Sequence[Sequence[Instruction]]) -> str:
    """E.g. "64 of 66 exp2 under PV"; loops that differ are named one after the other."""
    found = [sass.overlap(body) for body in loops if any(i.is_pv for i in body)]
    texts = [
        f"{o.under_pv} of {o.exp2} exp2 under PV"
        + (f", {o.under_qk} under QK" if o.under_qk else "")
        for o in found
        if o.exp2
    ]
    return "; ".join(dict.fromkeys(texts))


def _remarks(ptx: str) -> tuple[str, ...]:
    """ptxas' own words on Hopper code: it says which rule of wgmma or setmaxnreg was broken."""
    if ".target sm_90a" not in ptx:
        return ()
    try:
        return tuple(map(str, nvtools.remarks(ptx)))
    except nvtools.ToolFailed as error:
        return (f"no remarks: {error}",)


def _count(functions: Sequence[Sequence[Instruction]], *names: str) -> int:
    return sum(i.name.startswith(names) for function in functions for i in function)


def _moves(instructions: Sequence[Instruction]) -> int:
    return sum(instruction.is_move for instruction in instructions)


def _spilled(instructions: Sequence[Instruction]) -> int:
    return sum(instruction.local_bytes for instruction in instructions)
