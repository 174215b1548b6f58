"""`fagen.get`: which kernel a shape gets, what a call may be, and what it never does."""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import sqlalchemy
import torch
from sqlalchemy import event

import fagen
from fagen.config import Config
from fagen.errors import (
    BadInput,
    BadProblem,
    NoDevice,
    NoKernel,
    UnknownTarget,
    VerificationFailed,
)
from fagen.generate.families import config_from_dict
from fagen.generate.program import Program
from fagen.generate.render import render
from fagen.generate.space import seeds_of
from fagen.outcome import GATE, Check, Outcome, Status, Timing, Verdict
from fagen.problem import Problem, make_problem
from fagen.records import Plan, Records
from fagen.serve import library
from fagen.serve.candidates import distance
from fagen.serve.place import Place
from fagen.target import Target, Toolchain, preset, toolchain
from fagen.tune.ledger import Ledger
from serve_fixtures import FakeMachine, attention, faked

H200 = preset("h200")
SHAPE = {"seq": 256, "head_dim": 64, "heads": 2, "dtype": "fp32"}


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> FakeMachine:
    return faked(monkeypatch)


def tensors(
    batch: int = 1,
    heads: int = 2,
    seq: int = 256,
    dim: int = 64,
    kv: int | None = None,
    seq_kv: int | None = None,
    dtype: torch.dtype = torch.float32,
):
    made = torch.Generator().manual_seed(0)
    kv, seq_kv = kv or heads, seq if seq_kv is None else seq_kv
    sizes = ((batch, heads, seq, dim), (batch, kv, seq_kv, dim), (batch, kv, seq_kv, dim))
    return [torch.randn(size, generator=made).to(dtype) for size in sizes]


def stored(
    problem: Problem,
    config: Config,
    *,
    us: float | None = 100.0,
    target: Target | None = H200,
    tools: Toolchain | None = None,
    status: Status = Status.OK,
    source: str | None = None,
    gate: str = GATE,
) -> int:
    """Write one trial into the test's database; returns its id."""
    key = source or render(problem, config, toolchain().triton_minor).key
    verdict = Verdict((Check("o_max", 0.1, 0.5),), "NVIDIA H200")
    timing = Timing((us,), "test") if us is not None and status is Status.OK else None
    outcome = Outcome(
        config,
        status,
        "",
        key,
        verdict=verdict,
        timing=timing,
        predicted_us=us if status is Status.PREDICTED else None,
    )
    with Records.open(None, "write", config_from_dict) as records:
        plan = Plan("test", gate, "test", 0, None, None)
        run_id = records.begin_run(problem, target, tools or toolchain(), plan)
        trial_id = records.save(run_id, outcome)
        records.finish_run(run_id)
    return trial_id


def two_configs(problem: Problem) -> list[Config]:
    """Of two families, the one that is the default first."""
    by_family = {config.family: config for config in reversed(seeds_of(problem, H200))}
    return [by_family["flash"], by_family["slim"]]


# The shape in every form, and one key for it


# C01
def test_every_form_of_one_shape_gives_one_kernel():
    q, k, v = tensors()
    by_words = fagen.get(**SHAPE, device="cpu")
    assert fagen.get(make_problem(**SHAPE), device="cpu") is by_words
    assert fagen.get((1, 2, 256, 64), dtype="float32", device="cpu") is by_words
    assert fagen.get(q, k, v) is by_words
    assert fagen.get(dtype=torch.float32, heads=2, head_dim=64, seq=256, device="cpu") is by_words


# C01
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seq", 600),
        ("seq_kv", 600),
        ("batch", 2),
        ("heads", 4),
        ("kv_heads", 1),
        ("head_dim", 80),
        ("head_dim_v", 32),
        ("dtype", "fp16"),
        ("causal", True),
    ],
)
def test_each_field_of_a_shape_asks_for_its_own_kernel(field: str, value: object):
    other = fagen.get(**{**SHAPE, field: value}, target="h200")
    assert other is not fagen.get(**SHAPE, target="h200")


@pytest.mark.parametrize(
    ("first", "words", "said"),
    [
        ((), {"seq": 8}, "needs seq and head_dim"),
        ((), {"seq": 8, "head_dim": 0}, "head_dim must be 1 to 256, got 0"),
        (((1, 2, 3),), {}, "must be keywords"),
        (((1, 2, 8, 8),), {"seq": 8}, "says seq already"),
        ((make_problem(8, 8),), {"seq": 8}, "can't be added"),
        ((), {"seq": 8, "head_dim": 8, "on_miss": "tune"}, "'tune' is unknown"),
        ((), {"seq": 2**31, "head_dim": 8}, "seq must be 0 to 2147479552"),
        ((), {"seq": 8, "head_dim": 8, "causal_align": "bottom_right"}, "needs causal"),
        ((), {"seq": 8, "head_dim": 8, "layout": "x"}, "layout 'x' is unknown"),
        *(
            ((), {"seq": 8, "head_dim": 8, "causal": wrong}, f"True or False, got {wrong!r}")
            for wrong in ("none", "bottom_right", "yes", 1, None)
        ),
        ((), {"seq": 8, "head_dim": 8, "scale_sign": "x"}, "scale_sign 'x' is unknown"),
    ],
)
def test_a_shape_that_is_none_is_refused(first: tuple[object, ...], words: list[str], said: str):
    with pytest.raises(BadProblem, match=re.escape(said)):
        fagen.get(*first, **words, target="h200")


def test_a_word_that_is_unknown_is_a_type_error():
    with pytest.raises(TypeError, match=r"lenght.*a shape has seq, head_dim"):
        fagen.get(seq=8, head_dim=8, lenght=3, target="h200")
    with pytest.raises(TypeError, match="headdim"):
        fagen.get(seq=8, headdim=8, target="h200")


# The chain


def test_nothing_stored_gives_the_default_verified_at_first_use(
    machine: FakeMachine, caplog: pytest.LogCaptureFixture
):
    kernel = fagen.get(**SHAPE, device="cpu")
    assert kernel.config == seeds_of(kernel.problem, H200)[0]
    assert (kernel.origin, machine.checked) == ("default", [kernel.chosen.program.key])
    assert "verified at first use" in repr(kernel)
    assert sum("has no verdict" in r.message for r in caplog.records) == 1


def test_the_fastest_tuned_row_of_the_bucket_is_served():
    problem = make_problem(**SHAPE)
    slow, fast = two_configs(problem)
    stored(problem, slow, us=200.0)
    trial = stored(make_problem(**{**SHAPE, "seq": 200}), fast, us=50.0)
    stored(make_problem(**{**SHAPE, "seq": 300}), slow, us=1.0)  # another bucket
    kernel = fagen.get(**{**SHAPE, "seq": 180}, target="h200")
    assert (kernel.origin, kernel.config) == ("tuned", fast)
    assert f"trial {trial}" in repr(kernel) and "50 us" in repr(kernel)


def test_rows_of_another_device_are_never_served():
    problem = make_problem(**SHAPE)
    stored(problem, two_configs(problem)[1], target=preset("a100"))
    assert fagen.get(**SHAPE, target="h200").origin == "default"


def test_a_row_with_a_verdict_for_this_source_and_place_is_not_verified_again(
    machine: FakeMachine,
):
    problem = make_problem(**SHAPE)
    stored(problem, two_configs(problem)[1])
    kernel = fagen.get(**SHAPE, target="h200")
    assert (kernel.origin, kernel.verdict.where, machine.checked) == ("tuned", "NVIDIA H200", [])


# C01
@pytest.mark.parametrize("change", ["toolchain", "source"])
def test_a_row_of_another_build_is_served_only_with_a_new_verdict(
    machine: FakeMachine, change: str
):
    problem = make_problem(**SHAPE)
    config = two_configs(problem)[1]
    if change == "toolchain":
        stored(problem, config, tools=replace(toolchain(), triton="3.6.0"))
    else:
        stored(problem, config, source="0" * 16)
    assert fagen.get(**SHAPE, target="h200").verdict is None
    kernel = fagen.get(**SHAPE, device="cpu")
    assert (kernel.origin, kernel.config, len(machine.checked)) == ("tuned", config, 1)


# C01
def test_a_verdict_of_another_gate_is_not_trusted(
    cuda: Place, machine: FakeMachine, caplog: pytest.LogCaptureFixture
):
    problem = make_problem(**SHAPE)
    config = two_configs(problem)[1]
    stored(problem, config, gate="0: laxer")
    program = render(problem, config, toolchain().triton_minor)
    keys = program.key, cuda.device_key, cuda.toolchain.key
    passed = Verdict((Check("o_max", 0.1, 0.5),), "NVIDIA H200")
    with Records.open(None, "read", config_from_dict) as records:
        records.save_verdict(*keys, passed, exactness="0: laxer")
    kernel = library.choose(cuda, "nearest", problem)
    assert (kernel.origin, kernel.program.key, kernel.notes) == (
        "tuned",
        program.key,
        ("verified at first use",),
    )
    assert machine.checked == [program.key]
    said = f"under gate {GATE.partition(':')[0]} yet: verified now"
    assert sum(said in r.message for r in caplog.records) == 1
    assert library.choose(cuda, "nearest", problem).notes == ()
    assert machine.checked == [program.key]


# C01
def test_what_only_a_laxer_gate_let_pass_is_not_served(cuda: Place, machine: FakeMachine):
    problem = make_problem(**SHAPE)
    trial = stored(problem, two_configs(problem)[1], gate="0: laxer")
    machine.wrong.add("slim")
    assert library.choose(cuda, "nearest", problem).origin == "default"
    assert quarantined(trial) != ""


def test_a_row_of_this_gate_is_served_before_a_faster_one_of_another():
    problem = make_problem(**SHAPE)
    slow, fast = two_configs(problem)
    stored(problem, fast, us=1.0, gate="0: laxer")
    stored(make_problem(**{**SHAPE, "seq": 200}), slow, us=100.0)
    assert fagen.get(**SHAPE, target="h200").config == slow


def test_why_names_the_gate_of_the_row():
    problem = make_problem(**SHAPE)
    stored(problem, two_configs(problem)[1], gate="0: laxer")
    found = fagen.why(**SHAPE, target="h200")
    [gate] = [field for field in found.fields if field.name == "gate"]
    assert (gate.rule, gate.wanted, gate.found, gate.match) == ("verify", GATE, "0: laxer", "miss")
    assert found.verdict is None


def test_the_nearest_tuned_shape_is_next_unless_left_out():
    near, far = make_problem(**{**SHAPE, "seq": 512}), make_problem(**{**SHAPE, "seq": 4096})
    first = seeds_of(far, H200)[0]
    second = next(c for c in seeds_of(near, H200) if c.family == "kv_outer")
    stored(far, first, us=1.0)
    stored(near, second, us=90.0)
    kernel = fagen.get(**SHAPE, target="h200")
    assert (kernel.origin, kernel.config) == ("nearest", second)
    assert "tuned for forward fp32 B1 H2 N512" in repr(kernel)
    assert fagen.get(**SHAPE, target="h200", on_miss="default").origin == "default"


def test_what_was_tuned_for_another_size_of_the_bucket_says_so():
    small, large = {**SHAPE, "seq": 300}, {**SHAPE, "seq": 500}
    stored(make_problem(**small), two_configs(make_problem(**small))[0], us=5.0)
    first, second = fagen.get(**small, target="h200"), fagen.get(**large, target="h200")
    assert first.chosen is second.chosen
    assert [k.problem for k in (first, second)] == [make_problem(**s) for s in (small, large)]
    assert "tuned for" not in repr(first) and "; 5 us" in repr(first)
    assert "tuned for forward fp32 B1 H2 N300 D64 full, there 5 us" in repr(second)
    assert "is of this shape" in fagen.why(**small, target="h200").reason
    said = fagen.why(**large, target="h200").reason
    assert "is of this size bucket (it was tuned for forward fp32 B1 H2 N300" in said


def test_distance_counts_doublings_over_the_bucketed_sizes():
    a, b = make_problem(1024, 64), make_problem(4096, 64, seq_kv=1024, batch=2)
    assert (distance(a, b), distance(a, a)) == (3.0, 0.0)


def test_a_predicted_row_is_a_seed_that_must_be_verified(machine: FakeMachine):
    problem = make_problem(**SHAPE)
    config = two_configs(problem)[1]
    stored(problem, config, us=10.0, status=Status.PREDICTED)
    assert fagen.get(**SHAPE, target="h200").verdict is None
    kernel = fagen.get(**SHAPE, device="cpu")
    assert (kernel.origin, kernel.config, len(machine.checked)) == ("predicted", config, 1)


def test_on_miss_raise_names_the_command_that_tunes():
    with pytest.raises(
        NoKernel, match=r"fagen tune --seq 256 --head-dim 64 --heads 2 --dtype fp32"
    ):
        fagen.get(**SHAPE, target="h200", on_miss="raise")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch):
    """A place on a GPU that is not there."""
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    return replace(library.place_of("cpu", None, None), device=torch.device("cuda", 0))


def quarantined(trial: int) -> str:
    with Records.open(None, "read", config_from_dict) as records:
        return records.trial(trial).quarantined


def test_what_fails_the_gate_is_left_out_for_good_and_the_next_one_is_served(
    machine: FakeMachine,
):
    problem = make_problem(**SHAPE)
    trial = stored(problem, two_configs(problem)[1])
    machine.wrong.add("slim")
    assert fagen.get(**SHAPE, device="cpu").origin == "default"
    assert quarantined(trial) == ""  # the interpreter says nothing of that row's device
    library.forget()
    checked = len(machine.checked)
    assert fagen.get(**SHAPE, device="cpu").origin == "default"
    assert len(machine.checked) == checked  # both verdicts were stored


def test_a_row_is_quarantined_by_its_own_device_alone(machine: FakeMachine, cuda: Place):
    problem = make_problem(**SHAPE)
    config = two_configs(problem)[1]
    other = stored(problem, config, tools=replace(toolchain(), triton="3.6.0"))
    machine.wrong.add("slim")
    assert library.choose(cuda, "nearest", problem).origin == "default"
    assert quarantined(other) == ""  # made by another toolchain
    own = stored(problem, config)
    assert library.choose(cuda, "nearest", problem).verdict is not None
    assert quarantined(own) == ""  # its own verdict is served
    with Records.open(None, "write", config_from_dict) as records:
        records.quarantine(own, "x")
    assert library.choose(cuda, "nearest", problem).origin == "default"


def test_a_kernel_that_breaks_the_device_is_not_loaded_again(
    machine: FakeMachine, cuda: Place, monkeypatch: pytest.MonkeyPatch
):
    problem = make_problem(**SHAPE)
    trial = stored(problem, two_configs(problem)[1])
    loads = []

    def load(program: Program, target: Target, device: torch.device):
        loads.append(program.config.family)
        if program.config.family == "slim":
            monkeypatch.setattr("torch.cuda.synchronize", broken)
            broken(device)
        return machine.load(program, target, device)

    def broken(device: torch.device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("fagen.run.kernel.load", load)
    with pytest.raises(VerificationFailed, match="Start Python again"):
        library.choose(cuda, "nearest", problem)
    with pytest.raises(NoDevice, match="fail already"):  # the next one is not blamed
        library.choose(cuda, "nearest", problem)
    assert loads == ["slim"] and "illegal" in quarantined(trial)
    monkeypatch.setattr("torch.cuda.synchronize", lambda device: None)  # a new process
    assert library.choose(cuda, "nearest", problem).origin == "default"


def test_a_row_outlives_a_machine_that_can_not_load_it(
    cuda: Place, monkeypatch: pytest.MonkeyPatch, machine: FakeMachine
):
    problem = make_problem(**SHAPE)
    trial = stored(problem, two_configs(problem)[1])

    def load(program: Program, target: Target, device: torch.device):
        raise RuntimeError("Failed to find C compiler. Please specify via CC.")

    with monkeypatch.context() as patched:
        patched.setattr("fagen.run.kernel.load", load)
        with pytest.raises(VerificationFailed, match="C compiler"):
            library.choose(cuda, "nearest", problem)
    assert quarantined(trial) == ""
    assert library.choose(cuda, "nearest", problem).origin == "tuned"


def test_what_tuning_found_wrong_is_not_served_after_a_quicker_check(
    machine: FakeMachine, cuda: Place
):
    problem = make_problem(**SHAPE)
    default = library.choose(cuda, "nearest", problem).program
    verdict = Verdict((Check("o_max", 1.0, 0.5),), "NVIDIA H200")
    wrong = Outcome(default.config, Status.WRONG_RESULT, "", default.key, verdict=verdict)
    with Records.open(None, "write", config_from_dict) as records:
        ledger = Ledger(records, problem, H200, toolchain())
        ledger.begin(SimpleNamespace(policy_name="test", seed=0, trials=1, timeout_s=1.0))
        ledger.save(wrong)
    assert library.choose(cuda, "nearest", problem).program.key != default.key


def test_a_run_of_this_process_is_seen_by_the_next_get():
    problem = make_problem(**SHAPE)
    assert fagen.get(**SHAPE, target="h200").origin == "default"
    stored(problem, two_configs(problem)[1])
    assert fagen.get(**SHAPE, target="h200").origin == "tuned"


def test_when_every_candidate_fails_it_says_so(machine: FakeMachine):
    machine.wrong |= {"flash", "kv_outer", "slim"}
    with pytest.raises(VerificationFailed, match="can be used"):
        fagen.get(**SHAPE, device="cpu")


def test_a_device_error_is_not_blamed_on_the_candidate(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
):
    def load(program: Program, target: Target | None, device: torch.device):
        raise NoDevice("no such device")

    monkeypatch.setattr("fagen.run.kernel.load", load)
    with pytest.raises(NoDevice):
        fagen.get(**SHAPE, device="cpu")


# A database that is of no use


# C02
@pytest.mark.parametrize("content", [b"", b"SQLite format 3\0" + b"x" * 84, b"hello", None])
def test_a_broken_database_is_a_miss_with_one_warning(
    content: bytes | None, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    path = Path(os.environ["FAGEN_DB"])
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    for _ in range(2):
        assert fagen.get(**SHAPE, target="h200").origin == "default"
        library.forget()
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1 and str(path) in warnings[0]
    assert path.is_dir() or path.read_bytes() == content  # left as it was


def test_a_database_that_is_damaged_further_down_is_a_miss_too(caplog: pytest.LogCaptureFixture):
    stored(make_problem(**SHAPE), two_configs(make_problem(**SHAPE))[1])
    path = Path(os.environ["FAGEN_DB"])
    with sqlite3.connect(path) as connection:
        (root,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name='trial'")
        (size,) = connection.execute("PRAGMA page_size")
    connection.close()
    content = bytearray(path.read_bytes())
    content[(root[0] - 1) * size[0] : root[0] * size[0]] = b"\xff" * size[0]
    path.write_bytes(content)
    assert fagen.get(**SHAPE, target="h200").origin == "default"
    assert fagen.why(**SHAPE, target="h200").origin == "default"
    assert [r.message for r in caplog.records if "malformed" in r.message]


# C02
def test_a_row_of_an_unknown_family_is_skipped_and_the_others_serve():
    problem = make_problem(**SHAPE)
    first, second = two_configs(problem)
    bad = stored(problem, first, us=1.0)
    stored(problem, second, us=9.0)
    with sqlite3.connect(os.environ["FAGEN_DB"]) as connection:
        connection.execute("UPDATE trial SET config = '{\"family\"' WHERE id = ?", (bad,))
    connection.close()
    assert fagen.get(**SHAPE, target="h200").config == second


# C04
def test_without_a_home_get_works_from_the_default(tmp_path: Path):
    code = (
        "import fagen;"  # fp32: nothing of it is shipped
        "kernel = fagen.get(seq=256, head_dim=64, dtype='fp32', target='h200');"
        "print(kernel.origin)"
    )
    env = {k: v for k, v in os.environ.items() if k not in ("HOME", "FAGEN_DB", "FAGEN_CACHE")}
    env = {k: v for k, v in env.items() if not k.startswith("XDG_")}
    for home in ("/nonexistent", "/dev/null"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**env, "HOME": home},
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stdout.strip()) == (0, "default"), done.stderr


# Calls


@pytest.mark.parametrize("causal_align", [None, "top_left", "bottom_right"])
def test_a_call_returns_what_the_formula_says(causal_align: str | None):
    q, k, v = tensors(heads=4, kv=2, seq=40, seq_kv=56)
    words = {"causal": True, "causal_align": causal_align} if causal_align else {}
    kernel = fagen.get(q, k, v, **words)
    out, lse = kernel(q, k, v, return_lse=True)
    right, right_lse = attention(q, k, v, causal_align or "none", 64**-0.5)
    assert torch.equal(out, right) and torch.equal(lse, right_lse)
    assert torch.equal(kernel(q, k, v), right)


@pytest.mark.parametrize("scale", [0.3, 1.0, 0.0, -0.5, 1e-39])  # the last may become 0
def test_the_scale_is_what_was_asked_for(scale: float, machine: FakeMachine):
    q, k, v = tensors(seq=40)
    out = fagen.get(q, k, v)(q, k, v, scale=scale)
    assert torch.equal(out, attention(q, k, v, "none", scale)[0])
    assert machine.loaded[-1].program.problem.features.scale == (
        "positive" if scale > 1e-30 else "any"
    )


def strided(kind: str) -> list[torch.Tensor]:
    q, k, v = tensors(seq=48)
    if kind == "offset":
        wide = torch.zeros(1, 2, 48, 65)
        wide[..., 1:] = k
        return [q, wide[..., 1:], v]
    if kind == "transposed":
        return [q.transpose(2, 3).contiguous().transpose(2, 3), k, v]
    return [q, k[:, :1].expand(1, 2, 48, 64), v]


@pytest.mark.parametrize("kind", ["offset", "transposed", "broadcast"])
def test_other_strides_run_on_a_twin_that_is_verified_once(kind: str, machine: FakeMachine):
    q, k, v = tensors(seq=48)
    kernel = fagen.get(q, k, v)
    kernel(q, k, v)
    odd = strided(kind)
    for _ in range(3):
        assert torch.equal(kernel(*odd), attention(*odd, "none", 0.125)[0])
    assert [r.program.problem.layout for r in machine.loaded] == ["aligned16", "any"]
    assert len(machine.checked) == 2


def test_rows_of_the_output_decide_the_layout_too(machine: FakeMachine):
    q, k, _ = tensors(seq=48, dim=64)
    v = torch.randn(1, 2, 48, 8)[..., :7]  # its rows are aligned, those of a dense output are not
    kernel = fagen.get(q, k, v)
    assert kernel(q, k, v).shape == (1, 2, 48, 7)
    assert machine.loaded[-1].program.problem.layout == "any"


@pytest.mark.parametrize(
    "sizes", [{"seq": 0}, {"batch": 0}, {"seq": 5, "seq_kv": 0}, {"seq": 1, "seq_kv": 1}]
)
def test_empty_and_tiny_sizes_have_the_shape_of_their_output(sizes: dict[str, int]):
    q, k, v = tensors(**sizes)
    out, lse = fagen.get(q, k, v)(q, k, v, return_lse=True)
    assert (out.shape, lse.shape) == (q.shape, q.shape[:3])
    if k.shape[2] == 0:
        assert torch.all(out == 0) and torch.all(lse == -torch.inf)


def test_any_size_of_the_kind_may_be_called():
    kernel = fagen.get(**SHAPE, device="cpu")
    for sizes in ({"batch": 3}, {"heads": 5}, {"seq": 17, "seq_kv": 90}):
        q, k, v = tensors(**sizes)
        assert torch.equal(kernel(q, k, v), attention(q, k, v, "none", 0.125)[0])


def test_a_size_above_the_sources_limit_gets_another_source_once(machine: FakeMachine):
    problem = make_problem(**SHAPE)
    slim = next(c for c in seeds_of(problem, H200) if c.family == "slim")
    stored(problem, slim)
    kernel = fagen.get(**SHAPE, device="cpu")
    assert kernel.config.family == "slim"
    q, k, v = tensors(seq=16, seq_kv=kernel.chosen.program.limits["seq_kv"].stop)
    for _ in range(2):
        assert torch.equal(kernel(q, k, v), attention(q, k, v, "none", 0.125)[0])
    assert [r.program.config.family for r in machine.loaded] == ["slim", "flash"]


# N05
@pytest.mark.parametrize("ratio", [1, 2])
def test_tensors_without_heads_give_empty_ones(ratio: int, machine: FakeMachine):
    none = [t[:, :0] for t in tensors()]
    kernel = fagen.get(**SHAPE | {"heads": 2 * ratio, "kv_heads": 2}, device="cpu")
    o, lse = kernel(*none, return_lse=True)
    assert (o.shape, o.dtype) == ((1, 0, 256, 64), torch.float32)
    assert (lse.shape, lse.dtype) == ((1, 0, 256), torch.float32)
    assert fagen.get(*none)(*none).shape == (1, 0, 256, 64)
    with pytest.raises(BadInput, match="0 query heads are no multiple of 2"):
        kernel(none[0], *tensors()[1:])


def bad(**changes: torch.Tensor) -> list[torch.Tensor]:
    q, k, v = tensors()
    return [changes.get("q", q), changes.get("k", k), changes.get("v", v)]


# N11
@pytest.mark.parametrize(
    ("qkv", "said"),
    [
        (bad(q=torch.zeros(2, 256, 64)), "q has 3 dimensions"),
        (bad(k=torch.zeros(1, 1, 2, 256, 64)), "k has 5 dimensions"),
        (bad(k=torch.zeros(1, 2, 256, 64, dtype=torch.float16)), "differ in dtype"),
        ([t.double() for t in bad()], "torch.float64 is not supported"),
        (bad(k=torch.zeros(1, 2, 256, 64, device="meta")), "differ in device"),
        (bad(k=torch.zeros(1, 2, 255, 64)), "differ in heads or length"),
        (bad(k=torch.zeros(1, 2, 256, 32)), "differ in head size"),
        (bad(q=torch.zeros(2, 2, 256, 64)), "Batch sizes differ"),
        (bad(q=torch.zeros(1, 3, 256, 64)), "3 query heads are no multiple of 2"),
        (bad(q=torch.zeros(1, 4, 256, 64)), "ratio of query to key/value heads 1, got 2"),
        ([t[..., :32] for t in bad()], "head size of q and k 64, got 32"),
        (bad(v=torch.zeros(1, 2, 256, 32)), "head size of v 64, got 32"),
        ([t.half() for t in bad()], "dtype fp32, got fp16"),
        ([t.to("meta") for t in bad()], "made for cpu, the tensors are on meta"),
        (bad(q=[[1.0]]), "q must be a tensor, got list"),
        (bad(q=torch._neg_view(torch.zeros(1, 2, 256, 64))), "q is a negated view"),
        (bad(v=torch._neg_view(torch.zeros(1, 2, 256, 64))), "v is a negated view"),
    ],
)
def test_tensors_that_a_kernel_cant_take_are_refused(
    qkv: list[torch.Tensor], said: str, machine: FakeMachine
):
    kernel = fagen.get(**SHAPE, device="cpu")
    with pytest.raises(BadInput, match=re.escape(said)):
        kernel(*qkv)
    assert machine.loaded[0].launches == []


# N09
def test_a_negated_view_is_refused_after_a_call_of_its_shape():
    q, k, v = tensors()
    kernel = fagen.get(q, k, v)
    kernel(q, k, v)
    with pytest.raises(BadInput, match="negated view"):
        kernel(torch._neg_view(q), k, v)
    assert torch.equal(kernel(q, k, v), attention(q, k, v, "none", 0.125)[0])


def test_a_scale_of_numpy_leaves_the_quick_way_open():
    q, k, v = tensors()
    kernel = fagen.get(q, k, v)
    kernel(q, k, v, scale=np.float32(0.125))
    assert kernel._last is not None and kernel._last.positive is True


def test_inputs_that_require_grad_run_where_no_gradient_is_asked_for():
    q, k, v = tensors()
    kernel = fagen.get(q, k, v)
    q.requires_grad_()
    with torch.no_grad():
        out = kernel(q, k, v)
    assert torch.equal(out, attention(q.detach(), k, v, "none", 0.125)[0])
    assert not out.requires_grad


# Devices


def test_a_target_alone_gives_a_kernel_to_read():
    kernel = fagen.get(**SHAPE, target="h200")
    assert f"def {kernel.chosen.program.name}(" in kernel.source
    with pytest.raises(NoDevice, match="can only be read"):
        kernel(*tensors())


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_device_and_target_the_error_says_what_to_do():
    with pytest.raises(NoDevice, match=r"target='h200'.*fagen show"):
        fagen.get(**SHAPE)


@pytest.mark.parametrize("device", ["x", -1, "cuda:x", object()])
def test_what_is_no_device_is_refused(device: object):
    with pytest.raises(NoDevice):
        fagen.get(**SHAPE, device=device)


def test_what_is_no_target_is_refused():
    with pytest.raises(UnknownTarget):
        fagen.get(**SHAPE, target=3)


def test_other_devices_than_cuda_are_refused():
    with pytest.raises(NoDevice, match="not on mps"):
        fagen.get(**SHAPE, device="mps")


def test_nothing_is_loaded_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, machine: FakeMachine
):
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    place = replace(library.place_of("cpu", None, None), device=torch.device("cuda", 0))
    with pytest.raises(fagen.errors.NotDuringCapture, match="before the capture"):
        library.choose(place, "nearest", make_problem(**SHAPE))
    assert machine.loaded == []


# Cost of a call


# R05
def test_ten_thousand_calls_ask_the_database_nothing():
    statements: list[str] = []

    def count(conn: object, cursor: object, statement: str, *rest: object):
        statements.append(statement)

    problem = make_problem(**SHAPE)
    stored(problem, two_configs(problem)[1])
    event.listen(sqlalchemy.Engine, "before_cursor_execute", count)
    try:
        q, k, v = tensors(seq=4)
        kernel = fagen.get(q, k, v)
        kernel(q, k, v)
        assert statements  # the first call did ask
        statements.clear()
        _without_launches(kernel)
        for _ in range(10_000):
            kernel(q, k, v)
            fagen.get(q, k, v)
        assert statements == []
    finally:
        event.remove(sqlalchemy.Engine, "before_cursor_execute", count)


# R05
def test_a_call_costs_the_host_little_more_than_its_allocations():
    q, k, v = tensors(seq=4)
    kernel = fagen.get(q, k, v)
    kernel(q, k, v)
    _without_launches(kernel)

    def call_us() -> float:
        start = time.perf_counter()
        for _ in range(500):
            kernel(q, k, v)
        return (time.perf_counter() - start) / 500 * 1e6

    assert min(call_us() for _ in range(10)) < 50  # 9 us on an idle core, 5 of them torch.empty


def _without_launches(kernel: fagen.Kernel) -> None:
    """What is left is the cost of a call on the host."""
    kernel._plans = {key: p._replace(launch=_nothing) for key, p in kernel._plans.items()}
    kernel._last = None


def _nothing(*_args: object) -> None:
    """A launch that does nothing."""


def test_a_call_runs_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch):
    entered: list[int] = []

    @contextmanager
    def device(index: int) -> Iterator[None]:
        entered.append(index)
        yield

    monkeypatch.setattr("torch.cuda.device", device)
    q, k, v = tensors(seq=4)
    kernel = fagen.get(q, k, v)
    right = kernel(q, k, v)
    assert entered == []
    assert kernel._last is not None
    plan = kernel._last
    for current in (1, 0):
        kernel._last = plan._replace(device=1, current_device=lambda at=current: at)
        assert torch.equal(kernel(q, k, v), right)
    assert entered == [1]


def test_what_a_call_depends_on_is_seen_at_every_call(machine: FakeMachine):
    q, k, v = tensors(seq=8)
    kernel = fagen.get(q, k, v)
    right = kernel(q, k, v)
    assert len(machine.loaded) == 1
    room = torch.zeros(q.numel() + 1)
    off = room[1:].view(q.shape).copy_(q)  # the same sizes and strides, at an odd address
    assert torch.equal(kernel(off, k, v), right)
    assert [r.program.problem.layout for r in machine.loaded] == ["aligned16", "any"]
    wide = torch.zeros(*q.shape[:3], 2 * q.shape[3])
    wide[..., ::2] = q
    assert torch.equal(kernel(wide[..., ::2], k, v), right)
    assert torch.equal(kernel(q, k, v), right)
    assert [len(r.launches) for r in machine.loaded] == [2, 2]
    v.requires_grad_()
    assert kernel(q, k, v).requires_grad
    v.requires_grad_(False)
    with pytest.raises(BadInput, match="differ in dtype"):
        kernel(q, k.half(), v)
    assert torch.equal(kernel(q, k, v), right)


# R05
def test_calls_go_on_while_the_database_is_locked():
    problem = make_problem(**SHAPE)
    stored(problem, two_configs(problem)[1])
    q, k, v = tensors(seq=4)
    kernel = fagen.get(q, k, v)
    lock = sqlite3.connect(os.environ["FAGEN_DB"], isolation_level=None)
    lock.execute("PRAGMA locking_mode=EXCLUSIVE")
    lock.execute("BEGIN EXCLUSIVE")
    try:
        assert fagen.get(q, k, v) is kernel
        assert torch.equal(kernel(q, k, v), attention(q, k, v, "none", 0.125)[0])
    finally:
        lock.close()


# R05
def test_many_lengths_load_few_kernels_and_keep_few_plans(
    machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("serve_fixtures.FakeRunner.launch", _nothing)
    kernel = fagen.get(**SHAPE, device="cpu")
    for seq in range(1, 301):
        kernel(*tensors(seq=seq, heads=1))
    assert len(machine.loaded) == 1
    assert len(kernel._plans) <= 256


def test_the_sign_of_each_calls_scale_picks_its_source(machine: FakeMachine):
    q, k, v = tensors(seq=40)
    kernel = fagen.get(q, k, v)
    for scale in (0.5, -0.5, None, 0.0, 2.0):
        kernel(q, k, v, scale=scale)
    launches = {r.program.problem.features.scale: len(r.launches) for r in machine.loaded}
    assert launches == {"positive": 3, "any": 2}
