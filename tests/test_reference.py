"""The truth and the baseline against formulas written out once more, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fagen.judge import reference
from fagen.problem import Features


def by_rows(
    q: Tensor, k: Tensor, v: Tensor, features: Features, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention one row at a time, over the list of keys that the row sees."""
    batch, heads, seq_q, _ = q.shape
    seq_kv, ratio = k.shape[2], heads // k.shape[1]
    o = torch.zeros(batch, heads, seq_q, v.shape[3], dtype=torch.float64)
    lse = torch.full((batch, heads, seq_q), -math.inf, dtype=torch.float64)
    last = {
        "none": lambda i: seq_kv,
        "top_left": lambda i: i + 1,
        "bottom_right": lambda i: i + 1 + seq_kv - seq_q,
    }[features.causal]
    for b in range(batch):
        for h in range(heads):
            for i in range(seq_q):
                count = max(0, min(seq_kv, last(i)))
                if count:
                    keys = k[b, h // ratio, :count].double()
                    s = scale * (keys @ q[b, h, i].double())
                    lse[b, h, i] = torch.logsumexp(s, 0)
                    o[b, h, i] = torch.softmax(s, 0) @ v[b, h // ratio, :count].double()
    return o, lse


def inputs(
    seq_q: int, seq_kv: int, heads: int = 4, heads_kv: int = 2, dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    dice = torch.Generator().manual_seed(seq_q * 1000 + seq_kv)
    return (
        torch.randn(2, heads, seq_q, 12, generator=dice).to(dtype),
        torch.randn(2, heads_kv, seq_kv, 12, generator=dice).to(dtype),
        torch.randn(2, heads_kv, seq_kv, 5, generator=dice).to(dtype),
    )


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(
    ("seq_q", "seq_kv"), [(7, 7), (3, 9), (9, 3), (1, 1), (1, 6), (5, 0), (0, 4)]
)
def test_truth_is_the_formula(seq_q: int, seq_kv: int, causal: str, scale: float) -> None:
    q, k, v = inputs(seq_q, seq_kv)
    features = Features(causal)  # type: ignore[arg-type]
    o, lse = reference.truth(q, k, v, features, scale)
    right_o, right_lse = by_rows(q, k, v, features, scale)
    assert o.dtype == lse.dtype == torch.float64
    torch.testing.assert_close(o, right_o, atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(lse, right_lse, atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("heads_kv", [1, 2, 6])
@pytest.mark.parametrize("scores", [1, 40, 1000])
def test_chunks_change_nothing(
    scores: int, heads_kv: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(11, 13, heads=6, heads_kv=heads_kv)
    features = Features("top_left")
    whole = reference.truth(q, k, v, features, 0.4)
    monkeypatch.setattr(reference, "CHUNK_SCORES", scores)
    parts = reference.truth(q, k, v, features, 0.4)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one, other, atol=1e-13, rtol=1e-13)


def test_a_patch_is_a_part_of_the_whole() -> None:
    q, k, v = inputs(9, 14)
    features = Features("bottom_right")
    whole = reference.truth(q, k, v, features, 0.4)
    part = reference.truth_patch(q, k, v, features, 0.4, slice(4, 7))
    torch.testing.assert_close(part[0], whole[0][:, :, 4:7], atol=1e-13, rtol=1e-13)
    torch.testing.assert_close(part[1], whole[1][:, :, 4:7], atol=1e-13, rtol=1e-13)


def test_hidden_rows_are_zero_with_lse_minus_infinity() -> None:
    q, k, v = inputs(8, 3)
    for attend in (reference.truth, reference.baseline):
        o, lse = attend(q, k, v, Features("bottom_right"), 1.0)
        assert (o[:, :, :5] == 0).all()
        assert (lse[:, :, :5] == -math.inf).all()
        assert torch.isfinite(lse[:, :, 5:]).all()


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.bfloat16, 1e-4, 8e-3), (torch.float16, 1e-5, 1e-3), (torch.float32, 0.0, 1e-6)],
)
def test_the_baseline_errs_as_its_dtype_does(dtype: torch.dtype, low: float, high: float) -> None:
    q, k, v = inputs(33, 65, dtype=dtype)
    o, lse = reference.baseline(q, k, v, Features(), 0.3)
    right_o, right_lse = reference.truth(q, k, v, Features(), 0.3)
    assert o.dtype == dtype
    assert low <= float((o.double() - right_o).abs().max()) <= high
    # Scores in fp32 whatever the dtype, so the LSE is far better than the output.
    assert float((lse.double() - right_lse).abs().max()) < 2e-6


def test_the_baseline_holds_raw_scores_that_fp16_cannot() -> None:
    q = torch.full((1, 1, 4, 128), 200.0, dtype=torch.float16)
    k = torch.full((1, 1, 96, 128), 200.0, dtype=torch.float16)
    v = torch.arange(96.0).view(1, 1, 96, 1).half()
    o, lse = reference.baseline(q, k, v, Features(), 128**-0.5)
    assert float((o - 47.5).abs().max()) < 0.05
    assert torch.isfinite(lse).all()


def test_inner_products_are_ieee_and_flags_come_back() -> None:
    flags = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)
    before = [flag.fp32_precision for flag in flags]
    try:
        torch.set_float32_matmul_precision("medium")
        loose = [flag.fp32_precision for flag in flags]
        with reference.exact_matmul():
            assert [flag.fp32_precision for flag in flags] == ["ieee", "ieee"]
        assert [flag.fp32_precision for flag in flags] == loose
        with pytest.raises(KeyError), reference.exact_matmul():
            raise KeyError
        assert [flag.fp32_precision for flag in flags] == loose
    finally:
        torch.set_float32_matmul_precision("highest")
        for flag, value in zip(flags, before, strict=True):
            flag.fp32_precision = value


def test_autocast_around_it_changes_nothing() -> None:
    q, k, v = inputs(9, 9, dtype=torch.float32)
    plain = reference.baseline(q, k, v, Features(), 0.3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wrapped = reference.baseline(q, k, v, Features(), 0.3)
    assert torch.equal(plain[0], wrapped[0])
    assert torch.equal(plain[1], wrapped[1])


# Gradients


def by_autograd(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, features: Features, scale: float
) -> list[Tensor]:
    """torch's derivative of the formula, written with whole score matrices in float64."""
    leaves = [one.double().requires_grad_() for one in (q, k, v)]
    ratio = q.shape[1] // k.shape[1]
    wide_k, wide_v = (one.repeat_interleave(ratio, 1) for one in leaves[1:])
    s = scale * leaves[0] @ wide_k.transpose(2, 3)
    row, key = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])[None, :]
    shift = k.shape[2] - q.shape[2] if features.causal == "bottom_right" else 0
    seen = torch.ones_like(s, dtype=torch.bool)
    if features.causal != "none":
        seen = seen & (key <= row + shift)
    some = seen.any(-1, keepdim=True)  # the softmax of nothing is NaN, in its derivative too
    p = torch.softmax(s.masked_fill(~seen & some, -math.inf), -1) * some
    return list(torch.autograd.grad(p @ wide_v, leaves, g.double()))


@pytest.mark.parametrize("scale", [0.3, -0.3, 0.0])
@pytest.mark.parametrize("causal", ["none", "top_left", "bottom_right"])
@pytest.mark.parametrize(("seq_q", "seq_kv"), [(7, 7), (3, 9), (9, 3), (1, 1), (1, 6)])
def test_true_gradients_are_the_formulas(
    seq_q: int, seq_kv: int, causal: str, scale: float
) -> None:
    q, k, v = inputs(seq_q, seq_kv)
    g = torch.randn(2, 4, seq_q, 5, generator=torch.Generator().manual_seed(1)).half()
    features = Features(causal)  # type: ignore[arg-type]
    found = reference.truth_gradients(q, k, v, g, features, scale)
    for mine, right in zip(found, by_autograd(q, k, v, g, features, scale), strict=True):
        assert mine.dtype == torch.float64 and mine.shape == right.shape
        assert torch.allclose(mine, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [1, 40, 200])
def test_chunks_change_no_gradient(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    q, k, v = inputs(9, 7)
    g, features = torch.randn(2, 4, 9, 5).half(), Features("top_left")
    whole = reference.truth_gradients(q, k, v, g, features, 0.3)
    monkeypatch.setattr(reference, "CHUNK_SCORES", chunk)
    parts = reference.truth_gradients(q, k, v, g, features, 0.3)
    assert all(torch.allclose(a, b, rtol=1e-13) for a, b in zip(whole, parts, strict=True))


@pytest.mark.parametrize(("seq_q", "seq_kv"), [(5, 0), (0, 4)])
def test_gradients_of_nothing_are_zero(seq_q: int, seq_kv: int) -> None:
    q, k, v = inputs(seq_q, seq_kv)
    g = torch.ones(2, 4, seq_q, 5).half()
    found = reference.truth_gradients(q, k, v, g, Features(), 0.3)
    assert [one.shape for one in found] == [q.shape, k.shape, v.shape]
    assert not any(one.any() for one in found)


def test_a_row_that_sees_no_key_has_no_part_in_any_gradient() -> None:
    q, k, v = inputs(9, 3)
    g, features = torch.randn(2, 4, 9, 5).half(), Features("bottom_right")
    right = reference.truth_gradients(q, k, v, g, features, 0.3)
    g[:, :, :6] = math.nan
    found = reference.truth_gradients(q, k, v, g, features, 0.3)
    assert not found[0][:, :, :6].any()
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [(torch.bfloat16, 1e-4, 2e-2), (torch.float16, 1e-5, 3e-3), (torch.float32, 0.0, 1e-6)],
)
def test_baseline_gradients_err_as_their_dtype_does(
    dtype: torch.dtype, low: float, high: float
) -> None:
    q, k, v = inputs(40, 50, dtype=dtype)
    g = torch.randn(2, 4, 40, 5, generator=torch.Generator().manual_seed(2)).to(dtype)
    right = reference.truth_gradients(q, k, v, g, Features(), 0.3)
    found = reference.baseline_gradients(q, k, v, g, Features(), 0.3)
    for mine, one in zip(found, right, strict=True):
        assert mine.dtype == dtype
        error = (mine.double() - one).norm() / one.norm()
        assert low <= error <= high
