"""Facts read out of the machine code and out of ptxas' remarks, and what they rule out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fagen.config import Config
from fagen.generate import lint, nvtools, sass
from fagen.generate.build import build
from fagen.generate.families.flash import Knobs
from fagen.generate.lint import (
    NOT_REALLOCATED,
    REALLOCATED,
    SERIALISED,
    SPILL_LIMIT_BYTES,
    facts_of,
    findings_in,
    registers_in,
    spill_bytes_in,
    why_rejected,
)
from fagen.generate.render import render
from fagen.outcome import Built, KernelFacts
from fagen.problem import make_problem
from fagen.target import preset, toolchain

ASSETS = Path(__file__).parent / "assets/lint"
H200 = preset("h200")

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
# One step of each product as Hopper has it: K is read as it lies, V transposed; `gsb0` commits.
QK = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24"
PV = "HGMMA.64x64x16.F32.BF16 R88, R152, gdesc[UR8].tnspB, R88"
EXP2 = "MUFU.EX2 R9, R4"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"
WAIT_BUT_1 = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
# What the compiler was asked for: no text that ptxas can be given.
ASKED = "setmaxnreg.inc.sync.aligned.u32 240;"


def code(*lines: str) -> str:
    """A listing of these instructions at addresses 0x10 apart, the first at 0x100."""
    return "".join(f"        /*{0x100 + 16 * i:04x}*/  {line} ;\n" for i, line in enumerate(lines))


def loop(*lines: str) -> str:
    """The same with a conditional branch back to the first."""
    return code(*lines, "@P0 BRA 0x100")


def the_overlap(*lines: str) -> sass.Overlap:
    [[[body]]] = [sass.product_loops(f) for f in sass.functions(loop(*lines))]
    return sass.overlap(body)


def test_the_most_registers_of_a_cubin_count() -> None:
    assert registers_in(USAGE) == 187
    assert registers_in("") == 0


def test_spilled_bytes_are_stores_plus_loads_by_their_width() -> None:
    assert spill_bytes_in(SPILLS) == (4 + 8 + 16) + (4 + 4 + 2 + 8)
    assert spill_bytes_in(code(QK, WAIT)) == 0


def test_spills_inside_a_loop_of_products_are_found() -> None:
    spill = "STL.64 [R1], R2"
    assert "spills 8 bytes in a loop" in findings_in(loop(QK + ", gsb0", WAIT, spill))
    assert not any("spills" in note for note in findings_in(code(QK, "@P0 BRA 0x100", spill)))


def test_a_loop_that_copies_registers_is_found() -> None:
    moves = ["MOV R1, R2", "IMAD.MOV.U32 R3, RZ, RZ, R4"]
    notes = findings_in(loop(QK + ", gsb0", WAIT, *moves))
    assert any(re.fullmatch(r"2 of \d+ instructions of a loop are moves", n) for n in notes)
    others = ["IMAD.IADD R1, R2, 1, R3"] * 20
    assert not any("moves" in n for n in findings_in(loop(QK + ", gsb0", WAIT, *moves, *others)))
    assert not any("moves" in n for n in findings_in(code(*moves * 9)))


def test_a_wait_after_every_wgmma_is_found_and_a_few_waits_are_not() -> None:
    assert SERIALISED in findings_in(code(*[QK + ", gsb0", WAIT] * 16))
    assert findings_in(code(*[QK] * 15, QK + ", gsb0", WAIT, WAIT)) == ("16 wgmma, 2 waits",)
    assert "3 TMA loads" in findings_in(code(*["UTMALDG.4D [UR8], [UR4]"] * 3))
    assert findings_in("") == ()


def test_small_head_dims_have_many_waits_and_are_not_serialised() -> None:
    """D16, 32 keys, masked and unmasked loop: QK is one wgmma long, PV two."""
    step = [QK + ", gsb0", WAIT, PV, PV + ", gsb0", WAIT]
    assert findings_in(code(*step * 2)) == ("6 wgmma, 4 waits",)


def test_exp2_between_the_products_of_pv_and_their_wait_are_under_pv() -> None:
    waited_first = (QK + ", gsb0", PV, PV + ", gsb0", WAIT_BUT_1, WAIT, EXP2, EXP2)
    assert the_overlap(*waited_first) == sass.Overlap(2, 0, 0)
    held = (QK + ", gsb0", PV, PV + ", gsb0", WAIT_BUT_1, EXP2, WAIT, EXP2)
    assert the_overlap(*held) == sass.Overlap(2, 1, 0)
    between = (QK + ", gsb0", WAIT, PV, EXP2, PV + ", gsb0", WAIT)
    assert the_overlap(*between) == sass.Overlap(1, 1, 0)


def test_exp2_under_the_next_scores_are_told_apart() -> None:
    assert the_overlap(QK + ", gsb0", EXP2, WAIT, PV + ", gsb0", WAIT) == sass.Overlap(1, 0, 1)
    both = (QK + ", gsb0", PV + ", gsb0", EXP2, WAIT)
    assert the_overlap(*both) == sass.Overlap(1, 1, 1)
    assert "1 of 1 exp2 under PV, 1 under QK" in findings_in(loop(*both))


def test_a_product_in_flight_at_a_loops_end_is_so_at_its_start() -> None:
    carried = (EXP2, QK + ", gsb0", WAIT, PV + ", gsb0")
    assert the_overlap(*carried) == sass.Overlap(1, 1, 0)


def test_only_the_innermost_loops_count_and_a_retry_out_of_line_is_none() -> None:
    inner = ["@!P2 BRA 0x190", PV + ", gsb0", EXP2, WAIT, "@!P1 BRA 0x110"]  # from 0x110
    retry = ["@!P2 BRA 0x190", "BRA 0x120"]  # at 0x190, back into the loop
    listing = code(EXP2, *inner, "@P0 BRA 0x100", WAIT, "EXIT", *retry)
    [[[body]]] = [sass.product_loops(f) for f in sass.functions(listing)]
    assert (body[0].address, body[-1].address) == (0x110, 0x150)
    assert sass.overlap(body) == sass.Overlap(1, 1, 0)


def test_each_function_has_loops_of_its_own() -> None:
    listing = f"\t\tFunction : a\n{loop(QK)}\n\t\tFunction : b\n{loop(PV, PV)}"
    sizes = [[len(body) for [body] in sass.product_loops(f)] for f in sass.functions(listing)]
    assert sizes == [[2], [3]]


@pytest.mark.parametrize(("name", "under_pv"), [("ws_d256", 14), ("ws_d256_held", 34)])
def test_each_consumer_of_a_warp_specialised_kernel_is_read(name: str, under_pv: int) -> None:
    """Real listings, cut down: bf16 D256 causal, two consumers, Triton 3.7.1, ptxas 12.8.

    In the first ptxas moved the wait for PV up, before most of the exp2; in the second a wait on
    a barrier, a basic block's end, holds it back.
    """
    listing = (ASSETS / f"{name}.sass").read_text(encoding="utf-8")
    findings = findings_in(listing, ptx=ASKED)
    assert registers_in(listing) == 168
    assert f"{REALLOCATED}: 12 setmaxnreg" in findings
    assert findings[-2:] == tuple(f"consumer {i}: {under_pv} of 34 exp2 under PV" for i in (1, 2))
    assert why_rejected(Built("m.py", (KernelFacts("ws", 0, 168, 16, findings),)), H200) is None


# ptxas

LOG = """\
ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to insufficient register resources for the function in the function 'flash_fwd'
ptxas-blackwell info    : (C7513) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ill formed pipeline stage in the function 'k' in line 0
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count at entry.
ptxas info    : Used 255 registers, used 1 barriers, 560 bytes cumulative stack size
"""  # noqa: E501  as printed


def test_remarks_are_read_without_the_functions_name_and_once() -> None:
    why = "wgmma.mma_async instructions are serialized due to"
    assert [str(remark) for remark in nvtools.remarks_in(LOG)] == [
        f"C7512: {why} insufficient register resources for the function",
        f"C7513: {why} ill formed pipeline stage",
        "C7508: 'setmaxnreg' ignored; unable to determine register count at entry",
    ]


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("serialised", "C7513", "defining input registers of a wgmma"),
        ("setmaxnreg_ignored", "C7508", "'setmaxnreg' ignored"),
    ],
)
def test_the_ptxas_of_this_triton_remarks_on_ptx(name: str, code: str, words: str) -> None:
    [remark] = nvtools.remarks((ASSETS / f"{name}.ptx").read_text(encoding="utf-8"))
    assert remark.code == code and words in remark.text


@pytest.mark.parametrize("ptx", ["", ".version 8.7\n.target sm_90a\n.address_size 64\nnonsense"])
def test_a_ptx_that_ptxas_refuses_says_why(ptx: str) -> None:
    with pytest.raises(nvtools.ToolFailed, match=r"names no target|ptxas.*: .*(abort|error)"):
        nvtools.remarks(ptx)


def test_ptxas_is_asked_only_where_the_machine_code_gives_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def remarks(ptx: str) -> tuple[nvtools.Remark, ...]:
        asked.append(ptx)
        return (nvtools.Remark("C7511", "wgmma.mma_async instructions are serialized"),)

    monkeypatch.setattr(nvtools, "remarks", remarks)
    ptx = f".target sm_90a\n{ASKED}"
    good = code(*["USETMAXREG.TRY_ALLOC.CTAPOOL UP0, 0xf0", *[QK] * 7, QK + ", gsb0", WAIT])
    assert f"{REALLOCATED}: 1 setmaxnreg" in findings_in(good, ptx) and asked == []
    serialised = findings_in(code(*[QK + ", gsb0", WAIT] * 8), ".target sm_90a")
    assert SERIALISED in serialised and serialised[-1].startswith("C7511: ")
    assert len(asked) == 1
    doubted = findings_in(code(*[QK, QK + ", gsb0", WAIT] * 4), ".target sm_90a")
    assert doubted[:2] == ("8 wgmma, 4 waits", SERIALISED)  # on ptxas' word
    asked.clear()
    ignored = findings_in(code(*[QK] * 7, QK + ", gsb0", WAIT), ptx)
    assert NOT_REALLOCATED in ignored and asked == [ptx]
    findings_in(code(*[QK + ", gsb0", WAIT] * 8), ".target sm_100a")
    assert asked == [ptx]


def test_register_reallocation_that_the_compiler_dropped_is_found() -> None:
    found = findings_in(code(QK), ttgir="ttg.warp_specialize() {requestedRegisters = [240, 24]}")
    assert NOT_REALLOCATED in found
    assert not any("reallocation" in note for note in findings_in(code(QK), ttgir="ttg.local"))


# Rejection


def built(**changes: int | tuple[str, ...]) -> Built:
    facts = {"shared_bytes": 1024, "registers": 128, "spill_bytes": 0} | changes
    return Built("m.py", (KernelFacts("first", 0, 16, 0), KernelFacts("flash", **facts)))


def test_only_a_clear_loser_is_rejected() -> None:
    assert why_rejected(built(), H200) is None
    assert why_rejected(built(spill_bytes=SPILL_LIMIT_BYTES), H200) is None
    spilling = why_rejected(built(spill_bytes=SPILL_LIMIT_BYTES + 4), H200)
    assert spilling is not None and "flash spills 2052 bytes" in spilling
    assert why_rejected(built(shared_bytes=H200.shared_bytes), H200) is None
    large = why_rejected(built(shared_bytes=H200.shared_bytes + 1), H200)
    assert large is not None and "232449 bytes of shared memory" in large


def test_spills_that_a_newer_triton_adds_are_no_reason() -> None:
    """26 stores and 51 loads in 3.9 of a source that spills nothing in 3.6."""
    assert why_rejected(built(spill_bytes=4 * (26 + 51)), H200) is None


def test_a_warp_specialised_kernel_needs_its_registers_and_its_overlap() -> None:
    remark = "C7508: 'setmaxnreg' ignored; unable to determine register count at entry"
    kept = why_rejected(built(findings=(NOT_REALLOCATED, remark)), H200)
    assert kept is not None and f"registers stay as they are ({remark})." in kept
    specialised = f"{REALLOCATED}: 12 setmaxnreg"
    alone = why_rejected(built(findings=(SERIALISED, specialised, "C7513: why")), H200)
    assert alone is not None and "waits for each wgmma alone (C7513: why)." in alone
    assert why_rejected(built(findings=("64 wgmma, 10 waits", specialised)), H200) is None
    assert why_rejected(built(findings=(SERIALISED, "C7515: why")), H200) is None


# Real builds


def facts_for(knobs: Knobs) -> Built:
    program = render(make_problem(8192, 128), Config("flash", knobs), toolchain().triton_minor)
    return build(program, H200)


def test_what_measured_best_is_not_rejected() -> None:
    """The winner of bf16 D128 N8192 on an H200 before warp-specialised kernels were there."""
    winner = facts_for(Knobs(64, 128, 4, 1, "tma", "plain", max_registers=168))
    [kernel] = winner.kernels
    assert kernel.findings[0] == "32 wgmma, 4 waits" and kernel.spill_bytes == 0
    assert SERIALISED not in kernel.findings
    assert any(note.endswith("of 66 exp2 under PV") for note in kernel.findings)
    assert why_rejected(winner, H200) is None


def test_a_serialised_kernel_says_why_and_is_still_timed() -> None:
    serialised = facts_for(Knobs(128, 64, 8, 3, "pointer", "plain"))
    [kernel] = serialised.kernels
    assert SERIALISED in kernel.findings
    assert kernel.findings[-1].startswith("C75") and "are serialized" in kernel.findings[-1]
    assert not any("exp2" in note for note in kernel.findings)
    assert why_rejected(serialised, H200) is None


def test_probabilities_carried_over_the_edge_leave_pv_under_exp2() -> None:
    [kernel] = facts_for(Knobs(128, 128, 8, 2, "tma", "rotate_p")).kernels
    assert any(note.startswith("66 of 66 exp2 under PV") for note in kernel.findings)


def test_a_cubin_that_can_not_be_read_is_a_finding() -> None:
    facts = facts_of({"cubin": b"no cubin"}, "flash", 2048)
    assert (facts.name, facts.shared_bytes, facts.registers) == ("flash", 2048, 0)
    assert facts.findings[0].startswith("cubin not read: cuobjdump: ")


def test_without_the_tools_a_build_still_has_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise FileNotFoundError("triton is not installed")

    monkeypatch.setattr(nvtools, "_folder", missing)
    assert facts_of({"cubin": b""}, "flash", 7).shared_bytes == 7
    assert lint.findings_in(code(*[QK + ", gsb0", WAIT] * 8), ".target sm_90a")[-1] == (
        "no remarks: ptxas-blackwell: triton is not installed"
    )
