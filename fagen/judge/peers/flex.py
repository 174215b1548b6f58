"""FlexAttention as its documentation has it used: compiled for the shape, default options."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from fagen.judge.peers.base import Attention, Backend
from fagen.problem import Problem


def flex(problem: Problem) -> Attention:
    """Compiled at the first call; a causal mask is a block mask, made once a device."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    s, causal = problem.shape, problem.features.causal
    shift = s.seq_kv - s.seq_q if causal == "bottom_right" else 0
    grouped = s.heads_q != s.heads_kv
    masks: dict[torch.device, Any] = {}
    # Past 8 shapes of one function torch would stop compiling and run it uncompiled, which keeps
    # the whole score matrix: what it compiled for earlier problems is dropped.
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    setting = _kept_buffers if problem.direction == "backward" else nullcontext

    def seen(_batch: Tensor, _head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return row + shift >= key

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if causal != "none" and q.device not in masks:
            masks[q.device] = create_block_mask(
                seen, None, None, s.seq_q, s.seq_kv, device=q.device
            )
        mask = masks.get(q.device)
        with setting():
            out: Tensor = compiled(q, k, v, block_mask=mask, scale=scale, enable_gqa=grouped)
        return out

    return attend


def _kept_buffers() -> AbstractContextManager[object]:
    """A backward pass compiled without this writes into what the forward pass saved, and refuses
    `retain_graph`: torch then says to turn it off."""
    from torch._functorch import config

    found: AbstractContextManager[object] = config.patch(donated_buffer=False)
    return found


def _name() -> str:
    return f"flex (torch {torch.__version__})"


BACKENDS = (Backend("flex", _name, flex),)
