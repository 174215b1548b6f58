"""benchmarks/tuners.py: the kernel and the list that triton.autotune gets, its steps, its file."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch.nn.functional import scaled_dot_product_attention
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fagen.config import Config
from fagen.generate.build import compile_entry
from fagen.generate.families import FAMILIES
from fagen.generate.render import render
from fagen.generate.space import SearchSpace
from fagen.problem import Problem, make_problem
from fagen.target import Target, preset, toolchain

H200 = preset("h200")
MINOR = toolchain().triton_minor
PROBLEM = make_problem(8192, 128)
FREE = {"block_m", "block_n", "num_warps", "num_stages"}
DENSE = make_problem(48, 16, heads=2, dtype="fp16", causal=True)


@pytest.fixture(scope="module")
def tuners(root: Path) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root / "benchmarks")
        yield importlib.import_module("tuners")


@pytest.fixture(scope="module")
def full(tuners: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the step of triton.autotune is told of PROBLEM."""
    job = tuners.portable(PROBLEM, H200, tmp_path_factory.mktemp("full"), capped=False)
    assert isinstance(job, dict)
    return job


@pytest.fixture
def race(tuners: ModuleType) -> ModuleType:
    return importlib.import_module("tuners_race")


@pytest.fixture
def triton_step(tuners: ModuleType) -> ModuleType:
    return importlib.import_module("tuners_triton")


@pytest.fixture
def helion_step(tuners: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module with Helion's kernel, without Helion."""
    language = ModuleType("helion.language")
    fake = ModuleType("helion")
    fake.language = language  # type: ignore[attr-defined]
    fake.kernel = lambda function, **settings: (function, settings)  # type: ignore[attr-defined]
    fake.Config = dict  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "helion", fake)
    monkeypatch.setitem(sys.modules, "helion.language", language)
    monkeypatch.delitem(sys.modules, "tuners_helion", raising=False)
    module = importlib.import_module("tuners_helion")
    monkeypatch.delitem(sys.modules, "tuners_helion")
    return module


def default_of(problem: Problem) -> Config:
    return next(c for c in SearchSpace.of(problem, H200).seeds if c.family == "flash")


# --- the kernel and the list that triton.autotune gets ---


@pytest.mark.parametrize("causal", [False, True])
def test_the_list_is_fagens_own_of_the_family_with_all_other_knobs_as_in_its_default(
    tuners: ModuleType, tmp_path: Path, causal: bool
):
    problem = make_problem(8192, 128, causal=causal)
    job = tuners.portable(problem, H200, tmp_path, capped=False)
    default = default_of(problem)
    wanted = {
        (c.knobs.block_m, c.knobs.block_n, c.knobs.num_warps, c.knobs.num_stages)
        for c in SearchSpace.of(problem, H200).configs
        if c.family == "flash"
        and replace(c.knobs, **{name: getattr(default.knobs, name) for name in FREE})
        == default.knobs
    }
    listed = [tuple(c.values()) for c in job["configs"]]
    assert set(listed) == wanted and len(listed) == len(wanted) == 33
    assert list(job["configs"][0]) == ["BLOCK_M", "BLOCK_N", "num_warps", "num_stages"]
    assert (128, 128, 8, 3) in wanted
    assert job["held"]["loads"] == "tma" and not FREE & set(job["held"])
    assert job["held"]["mask"] == ("longest_first" if causal else "split")


def test_with_register_caps_the_list_holds_the_other_one(
    tuners: ModuleType, full: dict[str, Any], tmp_path: Path
):
    capped = tuners.portable(PROBLEM, H200, tmp_path, capped=True)
    uncapped = [{k: v for k, v in c.items() if k != "maxnreg"} for c in capped["configs"]]
    assert [c for c in uncapped if c not in full["configs"]] == []
    assert {c["maxnreg"] for c in capped["configs"]} == {0, 128, 168}
    assert len([c for c in capped["configs"] if c["maxnreg"] == 0]) == len(full["configs"])
    assert "max_registers" in full["held"] and "max_registers" not in capped["held"]


def test_the_kernel_is_the_emitted_one_but_for_its_tile_and_name(full: dict[str, Any]):
    program = render(PROBLEM, default_of(PROBLEM), MINOR)
    emitted = program.source.split('"""\n', 1)[1].strip().splitlines()
    made = Path(full["module"]).read_text().strip().splitlines()
    assert [line for line in emitted if line not in made] == [
        "# launch       num_warps=8, num_stages=3",
        f"def {program.name}(",
        "    BLOCK_M: tl.constexpr = 128,",
        "    BLOCK_N: tl.constexpr = 128,",
    ]
    assert [line for line in made if line not in emitted] == [
        "def attention(",
        "    BLOCK_M: tl.constexpr,",
        "    BLOCK_N: tl.constexpr,",
    ]


def test_an_edit_that_does_not_apply_is_no_kernel(tuners: ModuleType):
    program = render(PROBLEM, default_of(PROBLEM), MINOR)
    other = render(PROBLEM, Config("flash", FAMILIES["flash"].Knobs(64, 64, 4, 2)), MINOR)
    with pytest.raises(ValueError, match="2 configs have 2 kernels"):
        tuners.one_kernel([program, other])  # pointers, not descriptors
    literal = program.source.replace("BLOCK_M: tl.constexpr = 128", "BLOCK_M: tl.constexpr = 64")
    with pytest.raises(ValueError, match="constexpr = 128,' 0 times"):
        tuners.one_kernel([replace(program, source=literal)])
    twice = program.source.replace("# launch ", "# launch a\n# launch ")
    with pytest.raises(ValueError, match="its launch 2 times"):
        tuners.one_kernel([replace(program, source=twice)])


def instructions(ptx: str, name: str) -> list[str]:
    """PTX without names and the places of its source."""
    text = re.sub(r"^\s*(//|\.loc|\.file|\.section|\$L__|\.b\d|\.4byte).*$", "", ptx, flags=re.M)
    text = text[: text.index(".section") if ".section" in text else len(text)]
    return [line for line in text.replace(name, "kernel").splitlines() if line.strip()]


def test_with_one_config_it_compiles_for_sm_90_to_what_fagen_emits(
    full: dict[str, Any],
    triton_step: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "fagen"))
    config = {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    assert config in full["configs"]
    knobs = replace(default_of(PROBLEM).knobs, block_m=64, block_n=64, num_warps=4, num_stages=2)
    program = render(PROBLEM, Config("flash", knobs), MINOR)
    (entry,) = program.entries
    kernel = triton_step.kernel_of(full)
    assert [arg.name for arg in entry.args] == full["args"]
    types = {arg.name: arg.type for arg in entry.args}
    tile = {"BLOCK_M": 64, "BLOCK_N": 64}
    constants = {p.name: tile.get(p.name, p.default) for p in kernel.params if p.is_constexpr}
    places = {name: i for i, name in enumerate(kernel.arg_names)}
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in kernel.arg_names},
        {(places[name],): value for name, value in constants.items()},
        {(places[a.name],): [["tt.divisibility", 16]] for a in entry.args if a.divisible > 1},
    )
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=entry.options)
    emitted = compile_entry(program, entry, H200)
    assert "wgmma" in made.asm["ptx"] and ".target sm_90a" in made.asm["ptx"]
    found, wanted = (
        instructions(one.asm["ptx"], name)
        for one, name in ((made, "attention"), (emitted, program.name))
    )
    assert len(found) > 500 and found == wanted


# Runs in Triton's interpreter: both ways to launch, and each config's tile in the descriptors.
INTERPRETED = """
import json, sys, torch, tuners_triton as step
job = json.loads(open(sys.argv[1]).read())
q, k, v = step.inputs(job["shape"], "cpu")
right = torch.nn.functional.scaled_dot_product_attention(
    q.double(), k.double(), v.double(), is_causal=True)
tuner, blocks = step.autotuned(job), []
def bench(call, quantiles):
    call()
    blocks.append(tuner.nargs["k_desc"].block_shape if "k_desc" in tuner.nargs else None)
    return [float(len(blocks))] * 3
tuner._do_bench = bench
outputs = [step.attention(job, kernel=tuner)(q, k, v)]
outputs += [step.attention(job, config)(q, k, v) for config in job["configs"]]
print(json.dumps({
    "errors": [(o.double() - right).abs().max().item() for o in outputs],
    "blocks": blocks, "chosen": step.as_plain(tuner.best_config),
    "timed": [step.as_plain(c) for c in tuner.configs_timings]}))
"""


@pytest.mark.parametrize("loads", ["tma", "pointer"])
def test_tuned_and_plain_it_computes_attention(
    tuners: ModuleType, root: Path, tmp_path: Path, loads: str
):
    target: Target = H200 if loads == "tma" else preset("a100")
    job = tuners.portable(DENSE, target, tmp_path, capped=False)
    assert job["held"]["loads"] == loads
    job["configs"] = [c for c in job["configs"] if c["num_warps"] == 4 and c["num_stages"] == 2]
    assert len(job["configs"]) >= 2
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job))
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED, str(path)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root / "benchmarks")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["errors"]) == 1 + len(job["configs"])
    assert max(found["errors"]) < 4e-3
    assert found["timed"] == job["configs"] and found["chosen"] == job["configs"][0]
    if loads == "tma":
        assert found["blocks"] == [[1, 1, c["BLOCK_N"], 16] for c in job["configs"]]


# --- Helion ---


def test_nothing_but_helions_own_step_needs_helion(
    tuners: ModuleType, race: ModuleType, triton_step: ModuleType
):
    assert "helion" not in sys.modules


def test_helions_log_is_counted_by_config(helion_step: ModuleType, tmp_path: Path):
    log = tmp_path / "log.csv"
    rows = ["a,started", "a,ok", "b,started", "b,error", "c,filtered", "b,timeout", "d,error"]
    rows += ["a,error", "e,deduplicated", "f,accuracy_error"]
    log.write_text("\n".join(["config_id,status", *rows]))
    assert helion_step.counted(log) == (4, 3)


def test_helion_is_asked_for_its_quick_effort_and_a_chosen_config_is_not_tuned(
    helion_step: ModuleType,
):
    asked = helion_step.settings({"budget_s": 90})
    assert (asked["autotune_effort"], asked["autotune_budget_seconds"]) == ("quick", 90)
    _, settings = helion_step.configured({"block_sizes": [64, 64], "num_warps": 4})
    assert settings["config"] == {"block_sizes": [64, 64], "num_warps": 4}
    assert "autotune_effort" not in settings


@pytest.mark.skipif(importlib.util.find_spec("helion") is None, reason="needs helion")
@pytest.mark.parametrize("causal", [False, True])
def test_helions_kernel_computes_attention(root: Path, causal: bool):
    script = f"""
import torch
plain = torch.mm  # the CPU's has no out_dtype
torch.mm = lambda a, b, out_dtype=None: plain(a, b).to(out_dtype or a.dtype)
import helion, tuners_helion as step
q, k, v = (torch.randn(1, 2, 200, 32) for _ in range(3))
o = step.attention(helion.kernel(step.attend_heads, static_shapes=True), {causal})(q, k, v)
right = torch.nn.functional.scaled_dot_product_attention(
    q.double(), k.double(), v.double(), is_causal={causal})
assert (o.double() - right).abs().max() < 1e-5
"""
    benchmarks = os.pathsep.join((str(root / "benchmarks"), os.environ.get("PYTHONPATH", "")))
    env = {**os.environ, "HELION_INTERPRET": "1", "PYTHONPATH": benchmarks}
    subprocess.run([sys.executable, "-c", script], env=env, check=True)


# --- steps ---


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_step_starts_with_empty_caches_of_its_own(tuners: ModuleType, tmp_path: Path):
    code = "import json, os; print(json.dumps(dict(os.environ)))"
    ended = [tuners.run_step(python(code), tmp_path / name, 30) for name in "ab"]
    words = ("FAGEN_DB", "FAGEN_CACHE", "TRITON_CACHE_DIR", "HELION_CACHE_DIR")
    for word in (*words, "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH"):
        a, b = (Path(one.answer[word]) for one in ended)
        assert a != b and a.is_relative_to(tmp_path / "a") and not a.exists()


def test_a_step_that_hangs_is_ended_with_its_children(tuners: ModuleType, tmp_path: Path):
    code = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
child.wait()
"""
    ended = tuners.run_step(python(code), tmp_path / "step", 2)
    assert (ended.answer, ended.reason) == (None, "It took more than 2 s.")
    assert 2 <= ended.seconds < 20
    stat = Path(f"/proc/{(tmp_path / 'pid').read_text()}/stat")
    end = time.monotonic() + 10
    while stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z":
        assert time.monotonic() < end, "the child of a step still runs"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ValueError('no file /home/me/it.py here')", "exit code 1: ValueError: no file"),
        ("import os; os.kill(os.getpid(), 11)", "signal 11: it said nothing"),
        ("print('not JSON')", "Its answer is no JSON."),
        ("print('1')", "Its answer is no JSON object."),
        ("print('{}'); raise SystemExit(3)", "exit code 3: it said nothing"),
    ],
)
def test_a_step_that_fails_says_why_and_not_where(
    tuners: ModuleType, tmp_path: Path, code: str, reason: str
):
    ended = tuners.run_step(python(code), tmp_path / "step", 30)
    assert ended.answer is None
    assert ended.reason.startswith(reason) and "/home" not in ended.reason


FAGEN = {
    "seconds": 50.5,
    "tried": 64,
    "counts": {"ok": 40, "slower": 20, "lint_rejected": 3, "wrong_result": 1},
    "winner": {"family": "flash", "knobs": {"block_m": 64}},
}
TUNED = {"tuning_s": 3.25, "tried": 9, "failed": 2, "config": {"BLOCK_M": 64}}


@pytest.fixture
def faked(tuners: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Steps that answer at once, a GPU by name, and a race that times whoever is in it."""

    def command(bench: Any, name: str, folder: Path) -> tuple[list[str], dict[str, Any]]:
        if name == "fagen":
            return python(f"import json; print(json.dumps({FAGEN!r}))"), {}
        if name == "triton":
            code = f"import json, time; found = {TUNED!r} | {{'ready_at': time.time()}}"
            code += "; print(json.dumps(found))"
            return python(code), {"listed": 9}
        if name == "helion":
            return python("import helion_that_is_missing"), {}
        raise ValueError("2 configs have 2 kernels, not one.")

    def checked(bench: Any, name: str) -> dict[str, Any]:
        checks = [{"name": "o_max", "error": 0.1, "budget": 1.0, "detail": ""}]
        return {"passed": True, "checks": checks}

    def raced(bench: Any, names: list[str]) -> Any:
        us = {**{name: 10.0 + 5 * i for i, name in enumerate(names)}, "sdpa-cudnn 9": 8.0}
        rows = {
            name: {"median_us": t, "tflops": 100 / t, "times_fagen": [t / 10, t / 10, t / 10]}
            for name, t in us.items()
        }
        race = {"policy": {"rounds": 21}, "rows": rows, "missing": {"sdpa-flash": "refused"}}
        return tuners.Ended(1.0, race)

    monkeypatch.setattr(tuners, "detect", lambda: H200)
    monkeypatch.setattr(tuners, "WARM", "print('{}')")
    monkeypatch.setattr(tuners, "_command", command)
    monkeypatch.setattr(tuners, "checked", checked)
    monkeypatch.setattr(tuners, "raced", raced)
    return command


def test_a_tuner_that_fails_is_in_the_file_and_the_others_go_on(
    tuners: ModuleType, faked: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "h200_tuners_full.json"
    words = ["--out", str(out), "--commit", "abc", "--clean", "yes", "--deadline", "30"]
    assert tuners.main(words) == 1  # not all went well
    found = json.loads(out.read_text())
    assert found["problem"]["text"] == "forward bf16 B1 H16 N8192 D128 full"
    assert found["commit"]["id"] == "abc" and found["device"]["name"] == "NVIDIA H200"
    assert set(found["versions"]) >= {"torch", "triton", "helion"} and found["deadline_s"] == 30
    assert f"--out {out.name}" in found["command"] and str(tmp_path) not in found["command"]
    fagen, plain, capped, helion = found["tuners"]
    assert (fagen["tried"], fagen["failed"], fagen["tuning_s"]) == (64, 4, 50.5)
    assert fagen["seconds"] == fagen["process_s"] and fagen["config"] == FAGEN["winner"]
    assert (plain["tried"], plain["failed"], plain["listed"]) == (9, 2, 9)
    assert 0 < plain["seconds"] <= plain["process_s"] and "ready_at" not in plain
    assert (plain["median_us"], plain["times_fagen"]) == (15.0, [1.5, 1.5, 1.5])
    assert capped["reason"] == "2 configs have 2 kernels, not one." and "tflops" not in capped
    assert helion["reason"].startswith("exit code 1: ModuleNotFoundError: No module named")
    assert helion["process_s"] > 0 and "seconds" not in helion
    assert [row["name"] for row in found["peers"]] == ["sdpa-cudnn 9"]
    assert found["race"] == {"policy": {"rounds": 21}, "missing": {"sdpa-flash": "refused"}}
    assert "triton-maxnreg: 2 configs have 2 kernels, not one." in capsys.readouterr().out
    assert tuners.main(words) == 1 and "exists" in capsys.readouterr().err


def test_a_wrong_kernel_is_named_and_not_timed(
    tuners: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checks = [
        {"name": "o_max[target]", "error": 2.0, "budget": 1.0, "detail": ""},
        {"name": "o_l2[target]", "error": "nan", "budget": 1.0, "detail": ""},
        {"name": "o_max[target,rising]", "error": 0.5, "budget": 1.0, "detail": ""},
    ]
    bench = tuners.Bench(PROBLEM, H200, tmp_path, 30.0)
    answer = tuners.Ended(1.0, {"passed": False, "checks": checks})
    monkeypatch.setattr(tuners, "run_step", lambda *_: answer)
    row = tuners.checked(bench, "fagen")
    assert row["reason"] == "Its result is wrong: o_max[target], o_l2[target]."
    monkeypatch.setattr(tuners, "run_step", lambda *_: tuners.Ended(1.0, None, "signal 11: no"))
    row = tuners.checked(bench, "fagen")
    assert row == {"passed": False, "reason": "Its check failed: signal 11: no"}


def test_what_is_no_tuner_is_refused(tuners: ModuleType, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        tuners.main(["--tuners", "fagen,other", "--out", "x.json"])
    assert "unknown: other" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tuners.main(["--peers", "nobody", "--out", "x.json"])
    assert "nobody" in capsys.readouterr().err


# --- check and race ---


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As good as the gate's baseline: fp32, rounded once."""
    o = scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    return o.to(q.dtype)


def unmasked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v)


def test_a_kernel_is_judged_by_the_gates_budgets_on_the_shape_itself(race: ModuleType):
    device = torch.device("cpu")
    right = race.verdict(attend, DENSE, device)
    assert right.passed
    assert {c.name for c in right.checks} == {
        f"{kind}[{case}]" for kind in ("o_max", "o_l2") for case in ("target", "target,rising")
    }
    assert all("N48x48" in c.detail and 0 < c.budget < 0.1 for c in right.checks)
    assert not race.verdict(unmasked, DENSE, device).passed
    broken = race.verdict(lambda q, k, v: attend(q, k, v) * math.nan, DENSE, device)
    assert not any(check.passed for check in broken.checks)


def test_kernels_are_raced_with_peers_and_a_kernel_that_does_not_run_is_missing(
    race: ModuleType, monkeypatch: pytest.MonkeyPatch
):
    def attention(name: str, job: Any) -> Any:
        if name == "helion":
            raise ImportError("No module named 'helion'")
        return attend

    monkeypatch.setattr(race, "attention", attention)
    monkeypatch.setattr(race, "ROUNDS", 3)
    quick = SimpleNamespace(
        **{**vars(race.MeasurePolicy()), "warmup_ms": 0.0, "batch_ms": 0.01, "pause_ms": 0.0},
        name="quick",
        input_sets=lambda problem, l2: 2,
    )
    monkeypatch.setattr(race, "MeasurePolicy", lambda: quick)
    words = {"seq": 48, "head_dim": 16, "heads": 2, "dtype": "fp16", "causal": True}
    job = {"words": words, "peers": ["eager"]}
    found = race.raced(job, ["fagen", "triton", "helion"], torch.device("cpu"), 0)
    assert found["policy"] == {"name": "quick", "l2": "rotate", "input_sets": 2, "rounds": 3}
    assert found["missing"] == {"helion": "ImportError: No module named 'helion'"}
    assert [name.split()[0] for name in found["rows"]] == ["fagen", "triton", "eager"]
    assert found["rows"]["fagen"]["times_fagen"] == [1.0, 1.0, 1.0]
    ours, theirs = (found["rows"][name]["samples_us"] for name in ("fagen", "triton"))
    assert len(ours) == 3
    ratios = sorted(a / b for a, b in zip(theirs, ours, strict=True))
    assert found["rows"]["triton"]["times_fagen"][0] == pytest.approx(ratios[1], rel=1e-5)
    assert found["rows"]["triton"]["tflops"] > 0


# --- the page ---


def test_the_page_shows_every_row_and_why_one_has_no_time(
    tuners: ModuleType, faked: Any, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tuners.main(["--out", str(tmp_path / "h200_tuners_full.json"), "--causal"])
    spec = importlib.util.spec_from_file_location("docs_generate", root / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    generator = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generator)
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    page = generator.tuners()
    assert "## h200_tuners_full.json\n\nbf16 B1 H16 N8192 D128 causal on NVIDIA H200" in page
    lines = [line.split(" | ") for line in page.splitlines() if line.startswith("| ")]
    head, _, fagen, plain, capped, helion, peer = lines
    assert {len(line) for line in lines} == {len(head)}
    assert fagen[2:] == [
        "50.5",
        "64",
        "4",
        "10.0",
        "10",
        "1.000 (1.000 to 1.000)",
        "flash: block_m=64 |",
    ]
    assert plain[2:5] == ["3.2", "9", "2"] and plain[-1] == "BLOCK_M=64 |"
    assert capped[1:] == ["-"] * 7 + ["2 configs have 2 kernels, not one. |"]
    assert "ModuleNotFoundError" in helion[-1]
    assert peer[0] == "| sdpa-cudnn 9" and peer[1:5] == ["-"] * 4 and peer[-1] == "- |"
