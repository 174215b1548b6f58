"""A small GPT trained with fagen's attention, with torch's and with eager attention.

python benchmarks/gpt.py --out benchmarks/results/NAME.json

A decoder of LAYERS blocks (torch alone) learns sequences that a random Markov chain makes. Losses:
the same seed trained with fagen and with eager attention, and eager once more with another seed;
what fagen changes is held against what a seed changes. Times: models with each attention take
steps in turns, over the same batches.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from publish import made, text_of, without_folders
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fagen
from fagen.judge.measure import turns
from fagen.target import detect

SCHEMA = 1
LAYERS, WIDTH, HEADS, WORDS = 4, 1024, 16, 512
LIKELY = 4  # words that may follow a word: the loss of a model that knows them is log(4)
LEARNING_RATE = 3e-4
WARM_STEPS = 5

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Size:
    batch: int
    seq: int
    steps: int
    rounds: int


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every step in the inputs' dtype."""
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


def of_torch(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


def of_fagen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = fagen.get(q, k, v, causal=True)(q, k, v)
    assert isinstance(out, Tensor)
    return out


ATTENTION: dict[str, Attention] = {
    "fagen": of_fagen,
    "sdpa-cudnn": partial(of_torch, SDPBackend.CUDNN_ATTENTION),
    "sdpa-flash": partial(of_torch, SDPBackend.FLASH_ATTENTION),
    "sdpa-efficient": partial(of_torch, SDPBackend.EFFICIENT_ATTENTION),
}


class Block(nn.Module):
    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        heads = self.qkv(self.before(x)).view(batch, seq, 3, HEADS, WIDTH // HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.rest(self.between(x))


class Trained:
    """A model with its optimizer."""

    def __init__(self, attention: Attention, seq: int, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(seq, WIDTH)
        blocks = [Block(attention) for _ in range(LAYERS)]
        self.body = nn.Sequential(*blocks, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS))
        self.model = nn.ModuleList([self.words, self.places, self.body]).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)

    def step(self, text: Tensor) -> Tensor:
        """Learns from text (batch, seq + 1); the loss before it."""
        with torch.autocast(text.device.type, dtype=torch.bfloat16):
            seen, next_words = text[:, :-1], text[:, 1:]
            at = torch.arange(seen.shape[1], device=text.device)
            logits = self.body(self.words(seen) + self.places(at))
            loss = functional.cross_entropy(logits.flatten(0, 1).float(), next_words.flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def texts(size: Size, count: int, seed: int, device: str) -> list[Tensor]:
    """Batches of a Markov chain that the seed draws."""
    dice = torch.Generator().manual_seed(seed)
    follows = torch.randint(WORDS, (WORDS, LIKELY), generator=dice)
    found = []
    for _ in range(count):
        words = [torch.randint(WORDS, (size.batch,), generator=dice)]
        picks = torch.randint(LIKELY, (size.seq, size.batch), generator=dice)
        for pick in picks:
            words.append(follows[words[-1], pick])
        found.append(torch.stack(words, 1).to(device))
    return found


def losses(attention: Attention, size: Size, seed: int, device: str) -> list[float]:
    """The loss of every step; the text is the same for all seeds."""
    trained = Trained(attention, size.seq, seed, device)
    return [float(trained.step(text)) for text in texts(size, size.steps, 0, device)]


def step_times(names: list[str], size: Size, device: str) -> dict[str, list[float]]:
    """Milliseconds of steps in turns."""
    ready = {name: Trained(ATTENTION[name], size.seq, 0, device) for name in names}
    batches = texts(size, 4, 0, device)
    for name in names:
        for number in range(WARM_STEPS):
            ready[name].step(batches[number % len(batches)])
    times: dict[str, list[float]] = {name: [] for name in names}
    for number, name in enumerate(turns(names, size.rounds)):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        ready[name].step(batches[number // len(names) % len(batches)])
        end.record()
        end.synchronize()
        times[name].append(start.elapsed_time(end))
    return times


def compare(size: Size, device: str) -> dict[str, Any]:
    curves = {
        "fagen": losses(of_fagen, size, 0, device),
        "eager": losses(eager, size, 0, device),
        "eager, another seed": losses(eager, size, 1, device),
    }
    own, other = (
        mean(abs(a - b) for a, b in zip(curves[name], curves["eager"], strict=True))
        for name in ("fagen", "eager, another seed")
    )
    return {"losses": curves, "loss_difference": own, "seed_difference": other}


def race(size: Size, device: str) -> dict[str, Any]:
    """Step times; times_best_of_torch above 1: fagen's steps are the shorter ones."""
    times = step_times(list(ATTENTION), size, device)
    medians = {name: median(samples) for name, samples in times.items()}
    best = min((name for name in medians if name != "fagen"), key=lambda name: medians[name])
    ratios = [a / b for a, b in zip(times[best], times["fagen"], strict=True)]
    return {"step_ms": times, "best_of_torch": best, "times_best_of_torch": median(ratios)}


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="the result file")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20, help="steps of each that are timed")
    parser.add_argument("--commit", help="where git can't tell it")
    parser.add_argument("--clean", choices=["yes", "no"], help="its tree, with --commit")
    given = parser.parse_args(words)
    clean = None if given.clean is None else given.clean == "yes"
    device = "cuda"
    size = Size(given.batch, given.seq, given.steps, given.rounds)
    model = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "words": WORDS}
    found = {
        "schema": SCHEMA,
        **made(detect(), _command(words), given.commit, clean),
        "model": {**model, "batch": size.batch, "seq": size.seq, "steps": size.steps},
        **compare(size, device),
        **race(size, device),
    }
    given.out.write_text(text_of(found) + "\n", encoding="utf-8")
    own, other = found["loss_difference"], found["seed_difference"]
    print(f"mean difference of losses: fagen to eager {own:.4f}, seed to seed {other:.4f}")
    print(f"steps: {found['times_best_of_torch']:.3f} times as fast as {found['best_of_torch']}")
    return 0


def _command(words: list[str]) -> str:
    named = without_folders(words, ["--out"])
    return f"python {shlex.join(['benchmarks/gpt.py', *named])}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
