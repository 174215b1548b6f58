"""What a problem costs."""

from __future__ import annotations

from dataclasses import replace

from fagen.problem import make_problem


def test_the_backward_pass_takes_five_products_and_twice_the_bytes():
    forward = make_problem(100, 64, head_dim_v=32, batch=3, heads=4, kv_heads=2, causal=True)
    backward = replace(forward, direction="backward")
    pairs = 100 * 101 // 2
    assert forward.flops == 2 * pairs * (64 + 32) * 12
    # QK^T, dQ, dK over D; gV^T, dV over Dv.
    assert backward.flops == 2 * pairs * (3 * 64 + 2 * 32) * 12
    lse = 4 * 12 * 100
    assert forward.io_bytes == 2 * (12 + 6) * 100 * 96 + lse
    assert backward.io_bytes == 2 * (forward.io_bytes - lse) + lse
    assert len({forward.key, backward.key}) == len({forward.class_key, backward.class_key}) == 2
