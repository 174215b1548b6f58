"""Faults that other attention libraries had, each for its whole kind, with real kernels.

`fagen.get` runs as it does on a GPU, in Triton's interpreter; only the gate at first use is left
out, since every number is compared with float64 here. The bf16 halves of these cases need a GPU.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fagen
from attention import DTYPES, assert_exact, make_outputs, plain_attention
from fagen.config import Config
from fagen.errors import BadInput, BadProblem, NoDevice
from fagen.generate.families import FAMILIES, config_from_dict
from fagen.generate.families.base import every_choice
from fagen.generate.program import Entry, Program
from fagen.generate.render import render
from fagen.generate.space import why_invalid
from fagen.judge.reference import baseline
from fagen.outcome import GATE, Check, Outcome, Status, Timing, Verdict
from fagen.problem import Features, Problem, make_problem
from fagen.records import Plan, Records
from fagen.run import kernel as run_kernel
from fagen.run.kernel import load
from fagen.run.launch import ThroughTriton
from fagen.serve import library
from fagen.target import Target, preset, toolchain
from interpretable import INTERPRETABLE

H200 = preset("h200")
# Family, and what its knobs must be: each loop form of flash is an algorithm of its own.
FORMS: dict[str, tuple[str, dict[str, object]]] = {
    "flash": ("flash", {}),
    "flash rotate_s": ("flash", {"loop": "rotate_s", "loads": "pointer", "num_stages": 2}),
    "flash rotate_p": ("flash", {"loop": "rotate_p", "loads": "pointer", "rescale_tau": 8.0}),
    "kv_outer": ("kv_outer", {}),
    "slim": ("slim", {}),
}
Attend = Callable[..., tuple[Tensor, Tensor]]
# What the loop forms share (addresses, head sizes, heads) is tried with one form a family.
each_family = pytest.mark.parametrize("attend", INTERPRETABLE, indirect=True)


class Passes:
    """A gate that lets everything through."""

    def __init__(self, problem: Problem, device: torch.device) -> None:
        pass

    def check(self, *_args: object, **_words: object) -> Verdict:
        return Verdict((Check("o_max", 0.0, 1.0),), "nowhere")


def configs_of(form: str, problem: Problem, target: Target) -> Iterator[Config]:
    """The valid configs of a form: the family's seeds, else every choice, large tiles first."""
    name, wanted = FORMS[form]
    family = FAMILIES[name]
    if family.why_unsupported(problem, target) is not None:
        return
    choices = list(every_choice(family.Knobs))[::-1] if wanted else family.seeds(problem, target)
    for knobs in choices:
        config = Config(name, knobs)
        if any(getattr(knobs, field) != value for field, value in wanted.items()):
            continue
        if why_invalid(problem, target, config) is None:
            yield config


@pytest.fixture
def launched() -> list[tuple[int, int, int]]:
    """The grid of every launch of a test."""
    return []


@pytest.fixture(autouse=True)
def _interpreted(
    monkeypatch: pytest.MonkeyPatch, launched: list[tuple[int, int, int]]
) -> Iterator[None]:
    """No gate, grids noted, and NaN in whatever torch allocates."""
    library.forget()
    monkeypatch.setattr("fagen.judge.verify.Gate", Passes)
    bind = run_kernel._interpreted

    def noted(program: Program, entry: Entry) -> ThroughTriton:
        kernel = bind(program, entry)

        def launch(grid: tuple[int, int, int], args: list[object]) -> None:
            launched.append(grid)
            kernel.call(grid, args)

        return replace(kernel, call=launch)

    monkeypatch.setattr(run_kernel, "_interpreted", noted)
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns
    yield
    torch.use_deterministic_algorithms(False)
    assert all(min(grid) > 0 for grid in launched)
    library.forget()


@pytest.fixture(params=FORMS)
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    """attend(q, k, v, scale=..., causal=...) -> (output, LSE), by `fagen.get` of one form."""
    form: str = request.param
    monkeypatch.setattr(
        "fagen.serve.candidates.seeds_of",
        lambda problem, target: configs_of(form, problem, target),
    )

    def run(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **words: object
    ) -> tuple[Tensor, Tensor]:
        before = [whole(x).clone() for x in (q, k, v)]
        kernel = fagen.get(q, k, v, **words)
        assert kernel.config.family == FORMS[form][0]
        o, lse = kernel(q, k, v, scale=scale, return_lse=True)
        assert all(torch.equal(whole(x), was) for x, was in zip((q, k, v), before, strict=True))
        assert (o.shape, o.dtype) == ((*q.shape[:3], v.shape[3]), q.dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
        return o, lse

    run.form = form
    return run


def whole(tensor: Tensor) -> Tensor:
    """Every byte of the memory that a view is of."""
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def normal(*shape: int, dtype: str = "fp16", seed: int = 0) -> Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return made.to(DTYPES[dtype])


def qkv(
    batch: int, heads: tuple[int, int], seq: tuple[int, int], dim: tuple[int, int], dtype: str
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        normal(batch, heads[0], seq[0], dim[0], dtype=dtype, seed=1),
        normal(batch, heads[1], seq[1], dim[0], dtype=dtype, seed=2),
        normal(batch, heads[1], seq[1], dim[1], dtype=dtype, seed=3),
    )


def aligned(causal: str) -> dict[str, object]:
    return {} if causal == "none" else {"causal": True, "causal_align": causal}


def exact(
    attend: Attend, q: Tensor, k: Tensor, v: Tensor, causal: str = "none"
) -> tuple[Tensor, Tensor]:
    """Runs, compares with float64 attention with the default scale, and returns what came out."""
    o, lse = attend(q, k, v, **aligned(causal))
    assert_exact(o, lse, plain_attention(q, k, v, q.shape[3] ** -0.5, causal), v)
    return o, lse


# N01: rows that see no key


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("seq_kv", [0, 3, 40])
def test_n01_a_row_that_sees_no_key_is_zero_and_harms_no_other(
    attend: Attend, dtype: str, seq_kv: int
):
    # 3 keys: the first tile of rows sees nothing, the second is shared with rows that see some.
    q, k, v = qkv(2, (3, 3), (70, seq_kv), (64, 64), dtype)
    o, lse = exact(attend, q, k, v, "bottom_right")
    hidden = 70 - seq_kv
    assert torch.equal(o[:, :, :hidden], torch.zeros_like(o[:, :, :hidden]))
    assert (lse[:, :, :hidden] == -torch.inf).all()
    assert torch.isfinite(o).all() and torch.isfinite(lse[:, :, hidden:]).all()


# N02: which corner a causal mask starts from

LENGTHS = [(1, 7), (3, 5), (5, 3), (64, 130), (130, 64), (129, 128), (2, 300)]


@pytest.mark.parametrize(("seq_q", "seq_kv"), LENGTHS)
@pytest.mark.parametrize("causal", ["top_left", "bottom_right"])
def test_n02_the_keys_that_each_row_sees_can_be_read_from_the_output(
    attend: Attend, seq_q: int, seq_kv: int, causal: str
):
    q, k, v = qkv(1, (1, 1), (seq_q, seq_kv), (64, 64), "fp16")
    shift = seq_kv - seq_q if causal == "bottom_right" else 0
    seen = (torch.arange(seq_q) + shift + 1).clamp(0, seq_kv)
    v[0, 0, :, 0] = torch.arange(seq_kv)
    o, lse = attend(torch.zeros_like(q), k, v, **aligned(causal))  # all visible keys weigh alike
    assert torch.equal(lse[0, 0].exp().round().long(), seen)
    mean = ((seen - 1) / 2).clamp_min(0).double()
    torch.testing.assert_close(o[0, 0, :, 0].double(), mean, rtol=2e-3, atol=0)
    assert not o[0, 0, seen == 0].any()
    exact(attend, q, k, v, causal)


def test_n02_causal_alone_is_torchs_rule_and_the_other_must_be_named():
    q, k, v = qkv(1, (1, 1), (3, 5), (16, 16), "fp32")
    torchs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert fagen.get(q, k, v, causal=True).problem.features.causal == "top_left"
    torch.testing.assert_close(fagen.get(q, k, v, causal=True)(q, k, v), torchs)
    named = fagen.get(q, k, v, causal=True, causal_align="bottom_right")(q, k, v)
    assert not torch.allclose(named, torchs, atol=1e-2)


# N03: head sizes

DIMS = [
    *[(72, 72), (80, 80), (96, 96), (160, 160), (192, 192), (256, 256)],
    *[(8, 8), (1, 1), (40, 24), (192, 128), (64, 256)],
]


@pytest.mark.parametrize(("dim", "dim_v"), DIMS)
@each_family
def test_n03_any_head_size_is_exact_whole_and_repeatable(attend: Attend, dim: int, dim_v: int):
    q, k, v = qkv(1, (1, 1), (130, 130), (dim, dim_v), "fp16")
    o, lse = exact(attend, q, k, v)  # with the scale of the true head size
    for _ in range(4):
        again = attend(q, k, v)
        assert torch.equal(again[0], o) and torch.equal(again[1], lse)
    if dim > 64:
        q[..., 64:] = 0
        assert not torch.allclose(exact(attend, q, k, v)[0], o, atol=1e-2)


@pytest.mark.parametrize(("dim", "dim_v"), [(72, 72), (1, 1), (40, 24), (64, 256)])
@each_family
def test_n03_in_fp32_too(attend: Attend, dim: int, dim_v: int):
    exact(attend, *qkv(1, (1, 1), (130, 130), (dim, dim_v), "fp32"), "top_left")


@pytest.mark.parametrize(("dim", "dim_v"), [(257, 64), (64, 264), (0, 64)])
def test_n03_a_head_size_that_no_kernel_has_names_those_that_there_are(dim: int, dim_v: int):
    q, k, v = qkv(1, (1, 1), (8, 8), (dim, dim_v), "fp16")
    with pytest.raises(BadInput, match="1 to 256"):
        fagen.get(q, k, v)


# N04: grouped heads

HEADS = [(3, 1), (6, 2), (7, 7), (10, 2), (12, 4), (14, 2), (34, 2), (71, 1)]


@pytest.mark.parametrize("heads", HEADS)
@each_family
def test_n04_each_query_head_reads_the_keys_and_values_of_its_group(
    attend: Attend, heads: tuple[int, int]
):
    q, k, v = qkv(1, heads, (17, 19), (16, 16), "fp16")
    v[0, :, :, 0] = torch.arange(heads[1])[:, None]  # each head says its number
    o, _ = exact(attend, q, k, v, "top_left")
    wanted = torch.arange(heads[0]) // (heads[0] // heads[1])
    assert torch.equal(o[0, :, :, 0].round().long(), wanted[:, None].expand(-1, 17))


@pytest.mark.parametrize("heads", [(3, 2), (33, 2), (2, 4)])
def test_n04_heads_with_a_remainder_are_refused_before_a_launch(
    heads: tuple[int, int], launched: list[tuple[int, int, int]]
):
    q, k, v = qkv(1, heads, (8, 8), (16, 16), "fp16")
    with pytest.raises(BadInput, match=f"{heads[0]} query heads are no multiple of {heads[1]}"):
        fagen.get(q, k, v)
    with pytest.raises(BadProblem, match="not a multiple"):
        fagen.get(seq=8, head_dim=16, heads=heads[0], kv_heads=heads[1], device="cpu")
    kernel = fagen.get(seq=8, head_dim=16, heads=2, dtype="fp16", device="cpu")
    with pytest.raises(BadInput):
        kernel(q, k, v)
    assert launched == []


# N05: odd and empty lengths

ODD = [0, 1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 255, 257, 1000]
# Each length meets itself, and the shorter ones their neighbours.
PAIRS = [
    *((n, n) for n in ODD),
    *((n, longer) for n, longer in pairwise(ODD) if longer < 1000),
    *((longer, n) for n, longer in pairwise(ODD) if longer < 1000),
    *((1, 1000), (1000, 17)),
]


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_n05_every_row_of_any_length_is_written(attend: Attend, causal: str):
    for seq_q, seq_kv in PAIRS:
        q, k, v = qkv(1, (1, 1), (seq_q, seq_kv), (16, 16), "fp16")
        o, lse = exact(attend, q, k, v, causal)
        if seq_kv == 0:
            assert not o.any() and (lse == -torch.inf).all()
        if seq_q == seq_kv == 1:
            assert torch.equal(o, v)


@pytest.mark.parametrize(
    ("batch", "seq_q", "seq_kv"), [(0, 16, 16), (0, 0, 0), (2, 0, 5), (0, 3, 0)]
)
def test_n05_no_rows_give_an_empty_output_and_no_launch(
    attend: Attend, launched: list[tuple[int, int, int]], batch: int, seq_q: int, seq_kv: int
):
    q, k, v = qkv(batch, (4, 2), (seq_q, seq_kv), (24, 40), "fp16")
    o, lse = attend(q, k, v)  # whose shapes and dtypes are compared there
    assert (o.numel(), lse.numel(), launched) == (0, 0, [])


def test_n05_no_heads_give_an_empty_output():
    q, k, v = qkv(1, (0, 0), (8, 8), (16, 16), "fp16")
    o, lse = fagen.get(q, k, v)(q, k, v, return_lse=True)
    assert (o.shape, o.dtype) == (q.shape, q.dtype)
    assert (lse.shape, lse.dtype) == ((1, 0, 8), torch.float32)


# N06: scores that fp16 can't hold


def as_good_as_plain(
    o: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, causal: str
) -> None:
    """Within the budget of exactness: twice the error of attention with scores in fp32."""
    truth, _ = plain_attention(q, k, v, scale, causal)
    plain, _ = baseline(q, k, v, Features(causal), scale)
    allowed = 2 * (plain.double() - truth).abs().max() + 1e-5
    assert torch.isfinite(o).all()
    assert (o.double() - truth).abs().max() <= allowed


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_n06_equal_scores_beyond_fp16_give_the_mean_of_v(attend: Attend, causal: str):
    q, k, v = qkv(1, (1, 1), (96, 96), (128, 128), "fp16")
    q.fill_(200)
    k.fill_(200)
    o, lse = attend(q, k, v, **aligned(causal))
    seen = torch.full((96,), 96) if causal == "none" else torch.arange(1, 97)
    mean = v[0, 0].double().cumsum(0)[seen - 1] / seen[:, None]
    assert (o[0, 0].double() - mean).abs().max() <= 3e-3
    wanted = 200 * 200 * 128 / math.sqrt(128) + seen.log().double()
    assert ((lse[0, 0].double() - wanted).abs() <= 1e-4 + 4 * 2**-23 * wanted).all()


@pytest.mark.parametrize("causal", ["none", "top_left"])
def test_n06_large_random_scores_keep_their_order(attend: Attend, causal: str):
    q, k, v = qkv(1, (1, 1), (96, 96), (128, 128), "fp16")
    q, k = q * 60, k * 60
    o, _ = attend(q, k, v, **aligned(causal))
    as_good_as_plain(o, q, k, v, 128**-0.5, causal)


def test_n06_a_key_that_leads_by_a_thousand_is_the_output(attend: Attend):
    for leader in (0, 50, 95):
        q, k, v = qkv(1, (1, 1), (96, 96), (128, 128), "fp16")
        q, k = q.abs() + 1, k / 4
        k[0, 0, leader] = 200.0
        o, _ = attend(q, k, v)
        assert torch.equal(o[0, 0], v[0, 0, leader].expand(96, 128))


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_n06_fp32_scores_far_from_zero(attend: Attend, offset: float):
    q, k, v = qkv(1, (1, 1), (96, 96), (128, 128), "fp32")
    q[..., 0], k[..., 0] = 100.0, offset / 100.0 * math.sqrt(128)
    o, lse = attend(q, k, v)
    as_good_as_plain(o, q, k, v, 128**-0.5, "none")
    assert ((lse - offset).abs() < 50).all()


# N07: the log-sum-exp that is returned


@each_family
def test_n07_parts_are_merged_by_a_natural_lse(attend: Attend):
    whole_keys, cut = (1024, 750) if attend.form == "slim" else (4096, 3000)
    q, k, v = qkv(1, (2, 1), (16, whole_keys), (64, 64), "fp16")
    o, lse = exact(attend, q, k, v)
    (o_a, lse_a), (o_b, lse_b) = (
        exact(attend, q, k[:, :, part], v[:, :, part])
        for part in (slice(None, cut), slice(cut, None))
    )
    right = torch.logsumexp(q.double() @ k.double().transpose(-1, -2) / 8, -1)
    assert (lse - right).abs().max() <= 1e-4
    assert (torch.logaddexp(lse_a, lse_b) - lse).abs().max() <= 1e-4
    weight = torch.sigmoid(lse_a.double() - lse_b.double())[..., None]
    merged = weight * o_a.double() + (1 - weight) * o_b.double()
    assert (merged - o.double()).abs().max() <= 1e-3  # a base-2 slip: about 0.1


# N09: strided views


def transposed(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]


def fused(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Slices of one tensor (B, S, 3, H, D)."""
    length = max(q.shape[2], k.shape[2])
    room = q.new_full((q.shape[0], length, 3, q.shape[1], q.shape[3]), math.nan)
    views = []
    for number, x in enumerate((q, k, v)):
        view = room[:, : x.shape[2], number].transpose(1, 2)
        view.copy_(x)
        views.append(view)
    return views


def every_second_row(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    rooms = [x.new_full((*x.shape[:2], 2 * x.shape[2], x.shape[3]), math.nan) for x in (q, k, v)]
    return [room[:, :, ::2].copy_(x) for room, x in zip(rooms, (q, k, v), strict=True)]


def wide_columns(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    rooms = [x.new_full((*x.shape[:3], 2 * x.shape[3]), math.nan) for x in (q, k, v)]
    return [room[..., ::2].copy_(x) for room, x in zip(rooms, (q, k, v), strict=True)]


def over_batch(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [q, k[:1].expand_as(k), v[:1].expand_as(v)]


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)]


def one_row(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    return [q, k[:, :, :1].expand_as(k), v]


def misaligned(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    rooms = [x.new_full((x.numel() + 1,), math.nan) for x in (q, k, v)]
    return [room[1:].view(x.shape).copy_(x) for room, x in zip(rooms, (q, k, v), strict=True)]


VIEWS = [
    *[transposed, fused, every_second_row, wide_columns],
    *[over_batch, over_heads, one_row, misaligned],
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
@each_family
def test_n09_a_view_gives_what_its_contiguous_copy_gives(
    attend: Attend, view: Callable[..., list[Tensor]]
):
    for seq_kv in (32, 33, 65, 97, 128):
        plain = qkv(2, (2, 2), (40, seq_kv), (24, 24), "fp16")
        odd = view(*plain)
        o, lse = exact(attend, *odd)
        copied, copied_lse = exact(attend, *(x.contiguous() for x in odd))
        assert (o.double() - copied.double()).abs().max() <= 4e-3
        assert (lse - copied_lse).abs().max() <= 1e-5


# N10: offsets beyond 2**31, in a process of its own: a wrapped offset is a segmentation fault

FAR = """
import json
import sys
import torch
from attention import assert_exact, make_outputs, plain_attention
from fagen.config import Config
from fagen.generate.families import config_from_dict
from fagen.generate.program import Entry, Program
from fagen.generate.render import render
from fagen.problem import make_problem
from fagen.run.kernel import load
from fagen.run.launch import ThroughTriton
from fagen.target import preset
home = torch.empty(2**31 + 2**20, dtype=torch.float16)  # pages that are not touched cost nothing
for shape, stride, layout, config in json.loads(sys.argv[1]):
    batch, heads, seq, dim = shape
    views = []
    for number in range(3):
        view = home.as_strided(shape, stride, number * 2**16)
        view.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(number)))
        views.append(view)
    problem = make_problem(seq, dim, batch=batch, heads=heads, dtype="fp16", layout=layout)
    o, lse = make_outputs(problem)
    program = render(problem, config_from_dict(config))
    load(program, preset("h200"), "cpu").launch(*views, o, lse, 0.125)
    assert_exact(o, lse, plain_attention(*views, 0.125), views[2])
    print("right", flush=True)
"""
FAR_STRIDES = [
    ((1, 3, 16, 64), (1, 2**30, 64, 1), "aligned16"),
    ((3, 1, 16, 64), (2**30, 1, 64, 1), "aligned16"),
    ((1, 3, 16, 64), (1, 2**30, 64, 1), "any"),
    ((1, 1, 17, 64), (1, 1, 2**27, 1), "any"),
]


def test_n10_offsets_pass_2_to_the_31_with_strides_below():
    jobs = []
    for form in FORMS:
        for (batch, heads, seq, dim), stride, layout in FAR_STRIDES:
            problem = make_problem(seq, dim, batch=batch, heads=heads, dtype="fp16", layout=layout)
            config = next(configs_of(form, problem, H200))
            jobs.append(((batch, heads, seq, dim), stride, layout, config.to_dict()))
    done = child(FAR, json.dumps(jobs))
    assert (done.returncode, done.stdout) == (0, "right\n" * len(jobs)), done.stderr


def child(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    """A Python process with these tests' helpers; a signal shows as a negative exit code."""
    tests = Path(__file__).resolve().parent.parent
    env = {**os.environ, "PYTHONPATH": f"{tests.parent}{os.pathsep}{tests}"}
    return subprocess.run(
        [sys.executable, "-c", code, *args], env=env, capture_output=True, text=True, check=False
    )


# N11: what a kernel can't take


def good() -> list[Tensor]:
    return list(qkv(1, (2, 2), (8, 8), (16, 16), "fp16"))


REFUSED: dict[str, tuple[Callable[[], list[Tensor]], str]] = {
    "rank 2": (lambda: [x[0, 0] for x in good()], "q has 2 dimensions"),
    "rank 3": (lambda: [x[0] for x in good()], "q has 3 dimensions"),
    "rank 5": (lambda: [x[None] for x in good()], "q has 5 dimensions"),
    "rank of v": (lambda: [*good()[:2], good()[2][0]], "v has 3 dimensions"),
    "fp16 and bf16": (lambda: [good()[0], *(x.bfloat16() for x in good()[1:])], "in dtype"),
    "fp32 and bf16": (lambda: [good()[0].float(), *(x.bfloat16() for x in good()[1:])], "dtype"),
    "one fp32": (lambda: [*good()[:2], good()[2].float()], "differ in dtype"),
    "fp64": (lambda: [x.double() for x in good()], "torch.float64 is not supported"),
    "int64": (lambda: [x.long() for x in good()], "torch.int64 is not supported"),
    "bool": (lambda: [x.bool() for x in good()], "torch.bool is not supported"),
    "complex": (lambda: [x.cfloat() for x in good()], "torch.complex64 is not supported"),
    "one on meta": (lambda: [*good()[:2], good()[2].to("meta")], "differ in device"),
    "all on meta": (lambda: [x.to("meta") for x in good()], "the tensors are on meta"),
    "another dtype than it was made for": (lambda: [x.float() for x in good()], "dtype fp16"),
}


@pytest.mark.parametrize("what", REFUSED)
@pytest.mark.parametrize("autocast", [False, True])
def test_n11_rank_dtype_and_device_are_refused_with_a_next_step(
    what: str, autocast: bool, launched: list[tuple[int, int, int]]
):
    make, said = REFUSED[what]
    kernel = fagen.get(*good())
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast),
        pytest.raises(BadInput, match=re.escape(said)) as refused,
    ):
        kernel(*make())
    assert refused.value.next_step
    assert launched == []


@pytest.mark.parametrize("what", [w for w in REFUSED if "all on" not in w and "made for" not in w])
def test_n11_get_refuses_the_same_tensors_in_the_same_words(what: str):
    make, said = REFUSED[what]
    with pytest.raises(BadInput, match=re.escape(said)):
        fagen.get(*make())


@pytest.mark.parametrize(
    "words",
    [
        {"attn_mask": torch.ones(8, 8, dtype=torch.bool)},
        {"dropout_p": 0.5},
        {"is_causal": True},
        {"enable_gqa": True},
    ],
    ids=lambda words: next(iter(words)),
)
def test_n11_what_torch_takes_besides_is_no_argument_and_never_ignored(words: dict[str, object]):
    kernel = fagen.get(*good())
    with pytest.raises(TypeError, match=next(iter(words))):
        kernel(*good(), **words)
    with pytest.raises((TypeError, BadProblem), match=next(iter(words))):
        fagen.get(*good(), **words)


def test_n11_a_kernel_to_read_takes_no_tensors():
    kernel = fagen.get(seq=8, head_dim=16, heads=2, dtype="fp16", target="h200")
    with pytest.raises(NoDevice, match="only be read") as refused:
        kernel(*good())
    assert refused.value.next_step


# C01: one process tunes, another loads

SERVE = """
import sys
import torch
import fagen
import fagen.judge.verify

class Refuses:
    def __init__(self, *_args):
        pass
    def check(self, *_args, **_words):
        raise AssertionError("was verified already")

fagen.judge.verify.Gate = Refuses
q, k, v = torch.load(sys.argv[1])
kernel = fagen.get(q, k, v)
print(kernel.origin, kernel.config.key)
torch.save(kernel(q, k, v, return_lse=True), sys.argv[2])
"""


@pytest.mark.parametrize("form", INTERPRETABLE)
def test_c01_another_process_serves_the_winner_with_the_same_bits(form: str, tmp_path: Path):
    q, k, v = qkv(1, (2, 1), (70, 90), (64, 64), "fp16")
    problem = make_problem(70, 64, heads=2, kv_heads=1, seq_kv=90, dtype="fp16")
    config = list(configs_of(form, problem, H200))[-1]
    program = render(problem, config, toolchain().triton_minor)
    o, lse = make_outputs(problem)
    load(program, H200, "cpu").launch(q, k, v, o, lse, 0.125)
    verdict = Verdict((Check("o_max", 0.1, 0.5),), "here")
    with Records.open(None, "write", config_from_dict) as records:
        run_id = records.begin_run(
            problem, H200, toolchain(), Plan("test", GATE, "test", 0, None, None)
        )
        timing = Timing((5.0,), "test")
        records.save(
            run_id, Outcome(config, Status.OK, "", program.key, verdict=verdict, timing=timing)
        )
        records.finish_run(run_id)
        records.save_verdict(program.key, "interpreter", toolchain().key, verdict)
    torch.save((q, k, v), tmp_path / "in.pt")
    done = child(SERVE, str(tmp_path / "in.pt"), str(tmp_path / "out.pt"))
    assert done.stdout.split() == ["tuned", config.key], done.stderr
    served, served_lse = torch.load(tmp_path / "out.pt")
    assert torch.equal(served, o) and torch.equal(served_lse, lse)
    assert_exact(o, lse, plain_attention(q, k, v, 0.125), v)
