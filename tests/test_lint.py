"""Facts read out of the disassembler's text, and what they rule out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fagen.generate import lint
from fagen.generate.lint import (
    SPILL_LIMIT_BYTES,
    facts_of,
    findings_in,
    registers_in,
    spill_bytes_in,
    why_rejected,
)
from fagen.outcome import Built, KernelFacts
from fagen.target import preset

if TYPE_CHECKING:
    import pytest

USAGE = """
Resource usage:
 Common:
  GLOBAL:0
 Function flash_fwd:
  REG:187 STACK:0 SHARED:1024 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
 Function helper:
  REG:40 STACK:0 SHARED:0 LOCAL:0 CONSTANT[0]:568 TEXTURE:0 SURFACE:0 SAMPLER:0
"""
SPILLS = """
        /*0510*/                   STL [R1+0xa70], R153 ;
        /*1100*/                   STL.64 [R1+0xa6c], R152 ;
        /*1120*/              @P0  STL.128 [R1], R28 ;
        /*1140*/                   LDL.LU R28, [R1+0xa70] ;
        /*1150*/                   LDL R29, [R1+0xa74] ;
        /*1160*/                   LDL.U16 R29, [R1+0xa78] ;
        /*1170*/                   LDL.LU.64 R30, [R1+0xa60] ;
        /*1180*/                   LDLX R1 ;
        /*1190*/                   ULDC.64 UR4, c[0x0][0x208] ;
"""
WGMMA = "  HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8], RZ, !UPT ;\n"
WAIT = "  WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"


def test_the_most_registers_of_a_cubin_count() -> None:
    assert registers_in(USAGE) == 187
    assert registers_in("") == 0


def test_spilled_bytes_are_stores_plus_loads_by_their_width() -> None:
    assert spill_bytes_in(SPILLS) == (4 + 8 + 16) + (4 + 4 + 2 + 8)
    assert spill_bytes_in(WGMMA + WAIT) == 0


def test_a_wait_after_every_wgmma_is_found_and_a_few_waits_are_not() -> None:
    assert "serialised wgmma" in findings_in((WGMMA + WAIT) * 16)
    assert findings_in(WGMMA * 16 + WAIT * 2) == ("16 wgmma, 2 waits",)
    assert "3 TMA loads" in findings_in("  UTMALDG.4D [UR8], [UR4] ;\n" * 3)
    assert findings_in("") == ()


def built(**changes: int) -> Built:
    facts = {"shared_bytes": 1024, "registers": 128, "spill_bytes": 0} | changes
    return Built("m.py", (KernelFacts("first", 0, 16, 0), KernelFacts("flash", **facts)))


def test_only_a_clear_loser_is_rejected() -> None:
    h200 = preset("h200")
    assert why_rejected(built(), h200) is None
    assert why_rejected(built(spill_bytes=SPILL_LIMIT_BYTES), h200) is None
    spilling = why_rejected(built(spill_bytes=SPILL_LIMIT_BYTES + 4), h200)
    assert spilling is not None and "flash spills 2052 bytes" in spilling
    assert why_rejected(built(shared_bytes=h200.shared_bytes), h200) is None
    large = why_rejected(built(shared_bytes=h200.shared_bytes + 1), h200)
    assert large is not None and "232449 bytes of shared memory" in large


def test_a_cubin_that_can_not_be_read_is_a_finding() -> None:
    facts = facts_of(b"no cubin", "flash", 2048)
    assert (facts.name, facts.shared_bytes, facts.registers) == ("flash", 2048, 0)
    assert facts.findings[0].startswith("cubin not read")


def test_without_the_disassembler_a_build_still_has_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> object:
        raise FileNotFoundError("triton is not installed")

    monkeypatch.setattr(lint, "_cuobjdump", missing)
    assert facts_of(b"", "flash", 7).shared_bytes == 7
