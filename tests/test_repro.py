"""`fagen repro`: the script that it writes, and what the script does where there is no GPU."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cli_fixtures import rows_of, run_script, write_trials
from fagen import rerun, settings
from fagen.cli.main import main
from fagen.config import Config
from fagen.errors import FagenError, NoDevice, WorkerDied
from fagen.generate.families import FAMILIES
from fagen.generate.plain import program_from_dict, program_to_dict
from fagen.generate.program import Program, below_header, source_key
from fagen.generate.render import render
from fagen.generate.space import SearchSpace
from fagen.judge.measure import MeasurePolicy
from fagen.judge.reference import baseline
from fagen.outcome import Check, Status, Verdict
from fagen.problem import Problem, make_problem
from fagen.report.repro import literal
from fagen.target import preset, toolchain
from fagen.tune.jobs import Tried
from fagen.tune.proxies import InterpretWorker
from golden_cases import golden_programs
from interpretable import INTERPRETABLE

H200 = preset("h200")
SMALL = Config("flash", FAMILIES["flash"].Knobs(block_m=16, block_n=32, num_warps=4))
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
LOST = "f00dfeed" * 2  # a digest that no source has


def rendered(head_dim: int = 16, config: Config = SMALL, **words: Any) -> Program:
    return render(make_problem(64, head_dim, **words), config, toolchain().triton_minor)


def gluon() -> Config:
    return Config("flash_ws", FAMILIES["flash_ws"].seeds(make_problem(64, 64), H200)[0])


def written(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """stdout and stderr of `fagen repro`."""
    assert main(["repro", *words]) == 0
    return capsys.readouterr()


def parts(script: str) -> tuple[dict[str, Any], str]:
    """TRIAL and SOURCE, read without running anything."""
    found = {
        statement.targets[0].id: ast.literal_eval(statement.value)
        for statement in ast.parse(script).body
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
    }
    return found["TRIAL"], found["SOURCE"]


# The script's text


@pytest.mark.parametrize("config", [SMALL, gluon()], ids=lambda config: config.family)
def test_a_script_is_python_and_holds_the_source_that_was_tried(
    config: Config, capsys: pytest.CaptureFixture[str]
):
    head_dim = 64 if config.family == "flash_ws" else 16
    program = rendered(head_dim, config)
    write_trials([{"config": config, "head_dim": head_dim, "us": 3.25, "reason": "a \"'\n\\"}])
    out, err = written("1", capsys=capsys)
    trial, source = parts(out)
    assert err == ""
    assert source == program.source
    assert source_key(source, trial["program"]["name"]) == trial["tried_key"] == program.key
    assert program_from_dict(trial["program"], source) == program
    assert trial["target"] == H200.to_dict()
    assert trial["toolchain"]["triton"] == toolchain().triton
    measured = trial["measured"]
    assert (measured["status"], measured["median_us"]) == ("ok", 3.25)
    assert measured["reason"] == "a \"'\n\\"
    assert measured["worst"] == {"name": "o_max", "error": 0.25, "budget": 0.5, "detail": ""}
    assert "WARNING" not in out


def test_an_error_that_is_no_number_and_any_name_are_kept(capsys: pytest.CaptureFixture[str]):
    target = replace(H200, name='NVIDIA "Ünïcøde"™ 漢字')
    write_trials([{"error": float("nan"), "target": target, "status": Status.WRONG_RESULT}])
    trial, _ = parts(written("1", capsys=capsys)[0])
    assert trial["measured"]["worst"]["error"] == "nan"
    assert trial["measured"]["median_us"] is None
    assert trial["target"]["name"] == target.name


@pytest.mark.parametrize("program", golden_programs(), ids=lambda program: program.name)
def test_a_program_is_read_back_from_plain_values(program: Program):
    plain = json.loads(json.dumps(program_to_dict(program)))
    assert program_from_dict(plain, program.source) == program


@pytest.mark.parametrize(
    "text",
    ["", "'", "a'''b", "\\", "a\\'", 'r"""x"""\n', "a\r\nb", "\0", "é\n", "\ud800", "\n\\n\n"],
    ids=ascii,
)
def test_a_literal_is_its_text(text: str):
    assert ast.literal_eval(literal(text)) == text
    assert literal(text).isascii()


# Which source


def older(program: Program) -> tuple[str, str, str]:
    """(key, name, text) of the program as other templates would have emitted it."""
    text = program.source.replace("# Q, K, V, O ", "# K, Q, V, O ")
    assert text != program.source
    key = source_key(text, program.name)
    name = program.name.replace(program.key[:8], key[:8])
    return key, name, text.replace(program.name, name)


def test_a_source_that_is_lost_is_replaced_by_todays_with_a_warning(
    capsys: pytest.CaptureFixture[str],
):
    write_trials([{"config": SMALL, "source_key": LOST}])
    out, err = written("1", capsys=capsys)
    trial, source = parts(out)
    assert source == rendered().source
    assert (trial["tried_key"], trial["program"]["key"]) == (LOST, rendered().key)
    for said in (" ".join(err.split()), " ".join(out.split("import sys")[0].split())):
        assert "this is today's source of that config" in said
        assert f"not the one that was tried ({LOST})" in said
    row = json.loads(written("1", "--json", capsys=capsys)[0])
    assert row["source_key"] != row["stored_source_key"]
    assert row["warning"].startswith("this is today's source")


@pytest.mark.parametrize("place", ["where it was tried", "cache"])
def test_a_module_file_with_the_stored_digest_is_the_source(
    place: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path))  # of its own: what is put there stays there
    key, name, text = older(rendered())
    folder = tmp_path if place != "cache" else settings.kernel_dir() / key[:2]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(text)
    words = {"module_path": str(folder / f"{name}.py")} if place != "cache" else {}
    write_trials([{"config": SMALL, "source_key": key, **words}])
    out, err = written("1", capsys=capsys)
    trial, source = parts(out)
    assert (source, err) == (text, "")
    assert trial["program"]["name"] == name
    assert trial["program"]["entries"][0]["function"] == name


def test_a_module_file_with_another_text_is_not_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    key, name, text = older(rendered())
    (tmp_path / f"{name}.py").write_text(text + "\n")
    words = {"source_key": key, "module_path": str(tmp_path / f"{name}.py")}
    write_trials([{"config": SMALL, **words}])
    out, err = written("1", capsys=capsys)
    assert parts(out)[1] == rendered().source
    assert "not the one that was tried" in err


def test_the_source_is_in_the_dialect_of_the_trials_triton(capsys: pytest.CaptureFixture[str]):
    config = gluon()
    problem = make_problem(64, 64)
    old, new = (render(problem, config, minor) for minor in ((3, 6), (3, 9)))
    assert old.key != new.key
    write_trials([{"config": config, "head_dim": 64, "source_key": new.key}])
    plain = {"triton": "3.9.0", "ptxas": "", "torch": "", "driver": ""}
    rows_of(Path(os.environ["FAGEN_DB"]), f"UPDATE run SET toolchain = '{json.dumps(plain)}'")
    out, err = written("1", capsys=capsys)
    assert (parts(out)[1], err) == (new.source, "")


# What can't be written


def refused(*words: str, code: int, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["repro", *words]) == code
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return str(err)


def test_an_unknown_trial_is_an_error(capsys: pytest.CaptureFixture[str]):
    write_trials([{}])
    err = refused("7", code=1, capsys=capsys)
    assert err == "fagen: There is no trial 7. See fagen db trials.\n"


def test_a_trial_of_a_family_that_is_gone_is_an_error(capsys: pytest.CaptureFixture[str]):
    write_trials([{}])
    config = json.dumps({"family": "gone", "knobs": {}})
    rows_of(Path(os.environ["FAGEN_DB"]), f"UPDATE trial SET config = '{config}'")
    err = refused("1", code=1, capsys=capsys)
    assert err == (
        "fagen: Trial 1 is of another version of fagen: Family 'gone' is unknown."
        " Use the version that tried it.\n"
    )


def test_a_trial_that_was_never_rendered_is_an_error(capsys: pytest.CaptureFixture[str]):
    reason = "not rendered: KeyError: 'x'\nin a template"
    write_trials([{"status": Status.BUILD_ERROR, "source_key": "", "reason": reason}])
    err = refused("1", code=1, capsys=capsys)
    assert err == (
        "fagen: Trial 1 never had a source: not rendered: KeyError: 'x' in a template."
        " What its config gives today: fagen show 1\n"
    )


def test_a_config_that_is_rendered_no_more_needs_its_module_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    key, name, text = older(rendered())
    path = tmp_path / f"{name}.py"
    write_trials([{"config": SMALL, "source_key": key, "module_path": str(path)}])

    def render_nothing(*_: object):
        raise KeyError("knob")

    monkeypatch.setattr("fagen.serve.source.render", render_nothing)
    err = refused("1", code=1, capsys=capsys)
    assert "can't be rendered any more: KeyError: 'knob'. Use the version" in err
    path.write_text(text)
    assert parts(written("1", capsys=capsys)[0])[1] == text


def test_a_file_is_not_written_over_unless_it_is_said(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    write_trials([{}])
    path = tmp_path / "script.py"
    out, err = written("1", "--out", str(path), capsys=capsys)
    script = path.read_text(encoding="utf-8")
    assert out == "" and f"python {path}" in err
    assert written("1", capsys=capsys)[0] == script
    path.write_text("mine")
    err = refused("1", "--out", str(path), code=2, capsys=capsys)
    assert f"{path} exists. Say --force" in err
    assert path.read_text() == "mine"
    written("1", "--out", str(path), "--force", capsys=capsys)
    assert path.read_text(encoding="utf-8") == script


def test_a_trial_that_can_not_be_written_leaves_the_file_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    write_trials([{}])
    refused("7", "--out", str(tmp_path / "new.py"), code=1, capsys=capsys)
    assert not (tmp_path / "new.py").exists()
    err = refused("1", "--out", str(tmp_path / "no" / "new.py"), code=1, capsys=capsys)
    assert err == f"fagen: {tmp_path}/no/new.py: No such file or directory.\n"


# What the script does


@NO_GPU
def test_a_script_builds_and_interprets_without_gpu_and_database(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, root: Path
):
    write_trials([{"config": SMALL, "us": 3.25, "reason": "of before"}])
    out, _ = written("1", capsys=capsys)
    done = run_script(out, tmp_path, root)
    assert (done.returncode, done.stderr) == (0, "")
    program = rendered()
    for said in (
        "Trial 1 of ",
        str(program.problem),
        str(program.config),
        H200.name,
        toolchain().triton,
        "Then: ok, 3.25 us\n  of before\n  worst check, on NVIDIA H200: ok  o_max: 0.25 of 0.5",
        "No GPU: ",
        "Nothing will be timed.",
        f"{program.name}: ",
        " registers, ",
        " bytes of shared memory, 0 bytes spilled",
        "Checking in Triton's interpreter, on small shapes in fp16.",
        "Right on interpreter.",
    ):
        assert said in done.stdout
    assert "WARNING" not in done.stdout
    shares = [
        float(error) / float(budget)
        for error, budget in (
            line.split(": ")[1].split(" (")[0].split(" of ")
            for line in done.stdout.splitlines()
            if line.startswith("ok  ")
        )
        if float(budget)
    ]
    assert len(shares) >= 3 and shares == sorted(shares, reverse=True)


@NO_GPU
def test_a_script_in_gluon_is_built_and_says_that_nothing_was_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, root: Path
):
    write_trials([{"config": gluon(), "head_dim": 64, "status": Status.TIMED_OUT}])
    done = run_script(written("1", capsys=capsys)[0], tmp_path, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Then: timed_out, not timed" in done.stdout
    assert "  register reallocation: " in done.stdout
    assert "Nothing was run: there is no GPU, and Triton's interpreter does not run Gluon." in (
        done.stdout
    )


@NO_GPU
def test_a_wrong_source_is_found_in_the_interpreter(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, root: Path
):
    write_trials([{"config": SMALL}])
    out, _ = written("1", capsys=capsys)
    wrong = out.replace("acc = acc / l_i[:, None]", "acc = 1.05 * acc / l_i[:, None]")
    assert wrong != out
    done = run_script(wrong, tmp_path, root)
    assert done.returncode == 1
    assert "WARNING: the source was edited" in done.stdout
    assert "FAILED  o_max[" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("wrong_result: o_")


def test_a_source_that_does_not_compile_is_a_failure_with_its_reason(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, root: Path
):
    write_trials([{"config": SMALL}])
    broken = written("1", capsys=capsys)[0].replace("acc = acc / l_i[:, None]", "acc = nothing")
    done = run_script(broken, tmp_path, root)
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].startswith(f"build_error: {rendered().name}: ")
    assert "nothing" in done.stdout.splitlines()[-1]


def test_what_takes_too_long_is_ended(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, root: Path
):
    write_trials([{"config": SMALL}])
    hangs = written("1", capsys=capsys)[0].replace("import triton\n", "while True:\n    pass\n", 1)
    done = run_script(hangs, tmp_path, root, "--timeout", "0.5")
    assert done.returncode == 1
    assert done.stderr.startswith("fagen: Ended after 0.5 s of building.")
    assert "--timeout SECONDS" in done.stderr


@pytest.mark.parametrize(
    "words", [["--timeout", "0"], ["--timeout", "nan"], ["--timeout", "soon"], ["--fast"]]
)
def test_bad_use_of_a_script_exits_2(words: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        rerun.main({}, "", words)
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_reading_a_script_needs_no_database_and_no_template(root: Path):
    asked = "import sys, fagen.rerun; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=root, capture_output=True, text=True, check=True
    )
    assert {"tuning_db", "sqlalchemy", "optuna", "jinja2"}.isdisjoint(done.stdout.split())


# The same in this process, where parts can be replaced


@pytest.fixture
def again(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs a script's `main` on a trial of these words: its exit code and its output."""

    def no_gpu():
        raise NoDevice("No GPU: a test says so.")

    monkeypatch.setattr("fagen.rerun.targets.detect", no_gpu)

    def act(*arguments: str, edit: Callable[[str], str] = str, **words: Any) -> tuple[int, str]:
        (trial_id,) = write_trials([{"config": SMALL, **words}])
        plain, source = parts(written(str(trial_id), capsys=capsys)[0])
        code = rerun.main(plain, edit(source), list(arguments))
        return code, capsys.readouterr().out

    return act


Again = Callable[..., tuple[int, str]]


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.pop("program"),
        lambda plain: plain.pop("target"),
        lambda plain: plain.update(program=None),
        lambda plain: plain.update(target={"name": "x"}),
    ],
)
def test_a_damaged_script_is_said_in_one_line(
    damage: Callable[[dict[str, Any]], Any], capsys: pytest.CaptureFixture[str]
):
    (trial_id,) = write_trials([{"config": SMALL}])
    plain, source = parts(written(str(trial_id), capsys=capsys)[0])
    damage(plain)
    assert rerun.main(plain, source, []) == 2
    err = capsys.readouterr().err
    assert "damaged" in err and "fagen repro" in err and len(err.splitlines()) == 1


def test_a_kernel_that_lost_its_name_is_a_failed_build(again: Again):
    code, out = again(edit=lambda text: text.replace("def flash_fwd", "def other_fwd"))
    assert code == 1 and "has no function flash_fwd" in out


@pytest.mark.parametrize(
    ("raised", "code"), [(KeyboardInterrupt(), 130), (FagenError("no"), 1)], ids=str
)
def test_what_ends_a_script_is_a_line_and_a_code(
    again: Again, monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int
):
    def ends(*_: Any) -> None:
        raise raised

    monkeypatch.setattr(rerun, "_run", ends)
    assert again()[0] == code


@pytest.mark.parametrize(
    ("reply", "code", "said"),
    [
        (Tried(Status.PREDICTED, "unverified, can't run it: x"), 0, "Nothing was run: unverified"),
        (WorkerDied("killed.", timed_out=True), 1, "timed_out: killed. A kernel that hangs"),
        (WorkerDied("ended: SIGSEGV.", timed_out=False), 1, "crashed: ended: SIGSEGV."),
    ],
    ids=["unverified", "hangs", "crashes"],
)
def test_what_the_interpreter_can_not_do_is_said(
    reply: Any, code: int, said: str, again: Again, monkeypatch: pytest.MonkeyPatch
):
    def answer(self: object, program: Program, seconds: float):
        assert (program.problem.shape.dtype, seconds) == ("fp16", 60.0)
        if isinstance(reply, Exception):
            raise reply
        return reply

    monkeypatch.setattr(InterpretWorker, "try_program", answer)
    found, out = again()
    assert found == code
    assert out.splitlines()[-1].startswith(said)


def test_a_source_of_today_and_an_interpreter_in_the_environment_are_said(
    again: Again, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    passed = Tried(Status.PREDICTED, "", Verdict((Check("o_max", 0.1, 0.5),), "interpreter"))
    monkeypatch.setattr(InterpretWorker, "try_program", lambda *_: passed)
    code, out = again(source_key=LOST)
    assert code == 0
    assert "WARNING: this is not the source that was tried" in out
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    (trial_id,) = write_trials([{"config": SMALL}])
    plain, source = parts(written(str(trial_id), capsys=capsys)[0])
    assert rerun.main(plain, source, []) == 2
    assert "Unset it" in capsys.readouterr().err


@dataclass
class OnCpu:
    """Stands for a kernel on a GPU: plain attention in torch, times `factor`."""

    problem: Problem
    factor: float = 1.0
    error: str = ""

    def launch(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, s: float) -> None:
        if self.error:
            raise RuntimeError(self.error)
        out, log_sum = baseline(q, k, v, self.problem.features, s)
        o.copy_(out * self.factor)
        lse.copy_(log_sum)

    launch_poisoned = launch


@pytest.fixture
def gpu(again: Again, monkeypatch: pytest.MonkeyPatch):
    """The CPU taken for an H200; returns what replaces the kernel."""
    policy = MeasurePolicy(warmup_ms=0.1, batch_ms=0.1, samples=3, pause_ms=0.0)
    monkeypatch.setattr("fagen.rerun.targets.detect", lambda: H200)
    monkeypatch.setattr("fagen.rerun._device", lambda: "cpu")
    monkeypatch.setattr("fagen.judge.measure.MeasurePolicy", lambda: policy)

    def install(**words: Any):
        kernel = OnCpu(make_problem(64, 16), **words)
        monkeypatch.setattr("fagen.run.kernel.load", lambda *_: kernel)

    return install


def test_a_right_kernel_is_timed_in_turns_with_torch(gpu: Callable[..., None], again: Again):
    gpu()
    code, out = again("--finalist", us=50.0)
    assert code == 0
    assert 'Checking at level "finalist".' in out and "repeat[" in out
    assert "The stored time was taken by test: the two do not compare." in out
    _, own, *others = out[out.index("median us") :].splitlines()
    median, p20, p80, then, ratio = map(float, own.removeprefix("this kernel").split())
    assert 0 < p20 <= median <= p80
    assert then == 50.0 and ratio == pytest.approx(median / then, rel=1e-3)
    assert "another device" not in out
    assert any(line.startswith("sdpa-flash") for line in others)
    assert any(line.startswith("Not measured: sdpa-cudnn") for line in others)


def test_another_device_is_named_and_the_level_is_full(gpu: Callable[..., None], again: Again):
    gpu()
    code, out = again(target=preset("h100"))
    assert code == 0
    assert 'Checking at level "full".' in out and "repeat[" not in out
    assert "This is another device than then: times do not compare." in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"factor": 1.05}, "wrong_result: o_"),
        ({"error": "CUDA error: an illegal memory access"}, "crashed: CUDA error: an illegal"),
        ({"error": "out of memory"}, "out_of_resources: out of memory"),
    ],
    ids=["wrong", "crashes", "too large"],
)
def test_a_kernel_that_fails_on_the_gpu_is_not_timed(
    words: dict[str, Any], said: str, gpu: Callable[..., None], again: Again
):
    gpu(**words)
    code, out = again()
    assert code == 1
    assert out.splitlines()[-1].startswith(said)
    assert "Timing" not in out


@pytest.mark.parametrize("fault", ["too fast", "not timed"])
def test_a_right_kernel_without_a_usable_time_is_a_failure(
    fault: str, gpu: Callable[..., None], again: Again, monkeypatch: pytest.MonkeyPatch
):
    passed = Tried(Status.OK, "", Verdict((Check("o_max", 0.1, 0.5),), "here"))
    monkeypatch.setattr("fagen.rerun.Bench.confirm", lambda *_: passed)
    if fault == "too fast":
        monkeypatch.setattr("fagen.judge.measure.impossible", lambda *_: "too fast.")
    gpu(error="" if fault == "too fast" else "not timed")
    code, out = again()
    assert code == 1
    assert "Right on here." in out
    assert out.splitlines()[-1].startswith("crashed: ") and fault in out.splitlines()[-1]


# The source in fp16


@pytest.mark.parametrize("family", INTERPRETABLE)
def test_a_source_made_fp16_is_the_one_that_is_rendered_in_fp16(family: str):
    problem = make_problem(300, 64, heads=4, kv_heads=2, causal=True)
    half = replace(problem, shape=replace(problem.shape, dtype="fp16"))
    configs = [c for c in SearchSpace.of(problem, H200).configs if c.family == family]
    for config in configs[::97]:
        made, wanted = rerun.in_fp16(render(problem, config)), render(half, config)
        name = made.entries[0].function
        assert below_header(made.source).replace(name, wanted.name) == below_header(wanted.source)
        assert [e.args for e in made.entries] == [e.args for e in wanted.entries]
        assert (made.problem, made.limits) == (half, wanted.limits)
        assert rerun.in_fp16(wanted) is wanted
