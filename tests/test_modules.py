"""Generated modules are real files: named by their content, and nothing breaks when files go."""

from __future__ import annotations

import ast
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from triton.runtime import JITFunction

from fagen.cli.main import main
from fagen.config import Config
from fagen.errors import CacheError
from fagen.generate import build as building
from fagen.generate.build import BuildFailed, build, load_module, write_module
from fagen.generate.families import FAMILIES
from fagen.generate.program import Program
from fagen.generate.render import render
from fagen.generate.space import SearchSpace
from fagen.outcome import Status
from fagen.problem import Problem, make_problem
from fagen.target import preset, toolchain

H200 = preset("h200")
MINOR = toolchain().triton_minor
PROBLEMS = [
    make_problem(8192, 128),
    make_problem(1000, 64, causal=True),
    make_problem(300, 80, seq_kv=77, causal=True, causal_align="bottom_right", dtype="fp16"),
    make_problem(512, 40, head_dim_v=24, dtype="fp32", layout="any"),
    make_problem(16, 256, seq_kv=900, scale_sign="any"),
    make_problem(1, 1, dtype="fp32", layout="any", causal=True),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of generated kernels, and a process that has loaded none of them."""
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "cache"))
    for name in [name for name in sys.modules if name.startswith("fagen_generated.")]:
        monkeypatch.delitem(sys.modules, name)
    return tmp_path / "cache"


def small(rows: int = 64) -> Program:
    """A program that compiles quickly."""
    knobs = FAMILIES["flash"].Knobs(rows, 32, 4, 1)
    return render(make_problem(256, 16, dtype="fp16"), Config("flash", knobs), MINOR)


def without(program: Program) -> str:
    """The statements of a program, without what its name and header say."""
    text = program.source.replace(program.name, "kernel")
    return ast.unparse(ast.parse(text).body[1:])


# R03: text that is only executed can't be compiled.


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_r03_every_rendered_module_loads_from_a_file_of_its_own_name(
    problem: Problem, cache: Path
) -> None:
    configs = SearchSpace.of(problem, H200).configs
    families = {config.family: config for config in configs}
    for config in {*families.values(), *configs[:: max(1, len(configs) // 40)]}:
        program = render(problem, config, MINOR)
        module = load_module(program)
        path = Path(str(module.__file__))
        assert path == write_module(program)
        assert path.is_relative_to(cache) and path.stem == program.name
        assert path.read_text(encoding="utf-8") == program.source
        for entry in program.entries:
            function = getattr(module, entry.function)
            assert isinstance(function, JITFunction)  # not the interpreter's, which takes any text
            assert f"def {entry.function}(" in function.src


@pytest.mark.parametrize("problem", PROBLEMS[:3], ids=str)
def test_r03_two_variants_never_share_a_name(problem: Problem) -> None:
    sources: dict[str, str] = {}
    for config in SearchSpace.of(problem, H200).configs[::3]:
        program = render(problem, config, MINOR)
        assert sources.setdefault(program.name, program.key) == program.key
    other = replace(problem, layout="any" if problem.layout == "aligned16" else "aligned16")
    for config in SearchSpace.of(other, H200).configs[::9]:
        program = render(other, config, MINOR)
        assert sources.setdefault(program.name, program.key) == program.key
    assert len(sources) == len(set(sources.values())) > 100


def test_r03_the_name_is_that_of_the_content_alone(cache: Path) -> None:
    first, again = small(), small()
    assert (first.name, first.source) == (again.name, again.source)
    assert first.name.endswith(f"_{first.key[:8]}")
    longer = render(replace(first.problem, shape=replace(first.problem.shape, seq_q=9)),
                    first.config, MINOR)  # fmt: skip
    assert (longer.name, without(longer)) == (first.name, without(first))
    assert load_module(first) is load_module(longer)


def test_r03_a_path_may_hold_spaces_and_any_letters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    folder = tmp_path / "mit Leerzeichen, ü 漢字 'x' %20"
    monkeypatch.setenv("FAGEN_CACHE", str(folder))
    built = build(small(), H200)
    assert Path(built.module_path).is_relative_to(folder)
    assert built.kernels[0].registers > 0


def test_r03_files_that_go_after_loading_are_not_missed(
    cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))  # nothing compiled yet
    first, second = small(64), small(16)
    load_module(first)
    shutil.rmtree(cache)
    [entry] = first.entries
    assert building.compile_entry(first, entry, H200).asm["cubin"]
    assert not cache.exists()
    assert write_module(second).is_file()  # the folder is made again
    shutil.rmtree(cache)
    assert building.compile_entry(first, entry, H200).asm["cubin"]


def test_r03_an_error_shows_the_generated_line(cache: Path) -> None:
    program = small()
    lines = program.source.splitlines()
    number = next(i for i, line in enumerate(lines) if "s = tl.dot(q, k.T" in line)
    wrong = lines[number].replace("k.T", "k.no_such_thing")
    source = "\n".join([*lines[:number], wrong, *lines[number + 1 :], ""])
    with pytest.raises(BuildFailed) as failed:
        build(replace(program, source=source, name=program.name), H200)
    assert failed.value.status is Status.BUILD_ERROR
    said = str(failed.value)
    assert program.name in said
    assert wrong.strip() in said
    assert "no_such_thing" in said


def test_r03_a_module_that_does_not_load_names_its_file_and_is_not_kept(cache: Path) -> None:
    program = small()
    broken = replace(program, source=program.source + "\nraise ValueError('at the end')\n")
    for _ in range(2):
        with pytest.raises(BuildFailed, match="at the end") as failed:
            load_module(broken)
        assert str(cache) in str(failed.value)
    assert load_module(program).__name__.endswith(program.name)


# C02: a generated file that was cut short.


@pytest.mark.parametrize("content", ["", "half", "other", "no text"])
def test_c02_a_file_that_was_cut_short_is_written_again(
    content: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = small()
    path = write_module(program)
    source = program.source
    half, other = source[: len(source) // 2].encode(), b"raise SystemExit"
    path.write_bytes({"": b"", "half": half, "other": other, "no text": b"\xff\xfe"}[content])
    assert getattr(load_module(program), program.name) is not None
    assert path.read_text(encoding="utf-8") == source
    [warning] = caplog.messages
    assert str(path) in warning
    assert [p.name for p in path.parent.iterdir() if p.suffix == ".tmp"] == []


def test_another_header_alone_is_replaced_without_a_warning(
    cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After an update of fagen, or of a template, that leaves what is emitted as it was."""
    program = small()
    path = write_module(program)
    path.write_text(program.source.replace("Generated by fagen from", "Made by fagen 0.1 of"))
    assert write_module(program) == path
    assert path.read_text(encoding="utf-8") == program.source
    assert caplog.messages == []


# C04 and R03: folders that can't be written.

AS_A_USER = """
import ctypes, os, sys
import fagen
from fagen import settings
from fagen.config import Config
from fagen.errors import FagenError
from fagen.generate.build import build, load_module, write_module
from fagen.generate.families import FAMILIES
from fagen.generate.render import render
from fagen.problem import make_problem
from fagen.target import preset, toolchain

program = render(
    make_problem(256, 16, dtype="fp16"),
    Config("flash", FAMILIES["flash"].Knobs(64, 32, 4, 1)),
    toolchain().triton_minor,
)
if os.getuid() == 0:  # give up CAP_DAC_OVERRIDE, by which no file mode stops root
    libc = ctypes.CDLL(None)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # _LINUX_CAPABILITY_VERSION_3, this process
    rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, of 0 to 31, then 32 up
    assert libc.capget(header, rights) == 0
    rights[0] &= ~2
    rights[1] &= ~2
    assert libc.capset(header, rights) == 0
"""


def as_a_user(code: str, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run as a user whom file modes stop."""
    done = subprocess.run(
        [sys.executable, "-c", AS_A_USER + code, *words],
        env={**os.environ, "HOME": str(home)},
        cwd=home.parent,  # what Triton takes "~" for where there is no home
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.fixture
def locked(tmp_path: Path) -> Iterator[Path]:
    """A folder that can't be written once it is made."""
    folder = tmp_path / "locked"
    folder.mkdir()
    yield folder
    for path in [folder, *folder.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)


def lock(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def test_r03_kernels_in_a_folder_that_can_not_be_written_load(
    locked: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAGEN_CACHE", str(locked))
    path = write_module(small())
    lock(locked)
    code = """
print(load_module(program).__file__)
try:
    write_module(render(program.problem, Config("flash", FAMILIES["flash"].Knobs(64, 64, 4, 1))))
except FagenError as error:
    print(type(error).__name__, error.next_step)
"""
    loaded, refused = as_a_user(code, tmp_path).stdout.splitlines()
    assert loaded == str(path)
    assert re.fullmatch(r"CacheError Set FAGEN_CACHE to .*", refused)


HOMES = """
import pwd, shutil
import torch, triton.compiler  # once for all
for name in ("FAGEN_DB", "FAGEN_CACHE", "TRITON_CACHE_DIR", "XDG_CACHE_HOME", "XDG_DATA_HOME"):
    os.environ.pop(name, None)

def unknown(uid):
    raise KeyError(uid)

pwd.getpwuid = unknown
for home in sys.argv[1:]:
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0, home
        continue
    os.environ["HOME"] = home
    if not home:
        del os.environ["HOME"]
    path = build(program, preset("h200")).module_path
    mode = os.stat(settings.kernel_dir()).st_mode & 0o777
    kernel = fagen.get(seq=256, head_dim=64, dtype="fp32", target="h200")  # nothing is shipped
    print(path, oct(mode), kernel.origin, flush=True)
    shutil.rmtree(settings.kernel_dir().parent.parent)
    os._exit(0)
"""


def test_c04_a_home_that_can_not_be_written_gives_a_private_folder_and_a_kernel(
    locked: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    lock(locked)
    homes = [locked, tmp_path / "nowhere", Path("/"), tmp_path / "file" / "home", ""]
    done = as_a_user(HOMES, locked, *map(str, homes))
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [words[1:] for words in lines] == [["0o700", "default"]] * len(homes)
    folders = {Path(words[0]).parents[3] for words in lines}
    assert len(folders) == len(homes)  # nobody can know its name before
    assert not any(folder.is_relative_to(tmp_path) for folder in folders)
    assert done.stderr.count("no home directory that can be written") == len(homes)
    assert list(locked.iterdir()) == []


def test_c04_tune_says_where_it_can_not_write_before_anything_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def started(*_args: object, **_words: object) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr("fagen.tune.children.subprocess.Popen", started)
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "sub" / "t.db"
    words = ["tune", "--seq", "64", "--head-dim", "16", "--target", "h200", "--db", str(path)]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert out == "" and str(path) in err and "Traceback" not in err


def test_c04_a_named_folder_that_can_not_be_used_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(CacheError, match="Can't make the folder") as refused:
        write_module(small())
    assert "FAGEN_CACHE" in refused.value.next_step


def test_c04_a_folder_of_another_user_or_open_to_others_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAGEN_CACHE", str(tmp_path))
    folder = write_module(small()).parent.parent
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o777)
    with pytest.raises(CacheError, match="can be written by others"):
        write_module(small())
    folder.chmod(0o700)
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(CacheError, match="belongs to another user"):
        write_module(small())


# R04: a parent that imported fagen may fork.


def test_r04_a_forked_child_can_use_fagen_and_the_device_was_never_touched() -> None:
    code = """
import os, sys
import torch

def touched(*_args):
    os.write(2, b"the device was touched")
    os._exit(9)

torch.cuda._lazy_init = touched
torch._C._cuda_init = touched
import fagen
parents = fagen.get(seq=256, head_dim=64, target="h200")
pid = os.fork()
if pid == 0:
    kernel = fagen.get(seq=512, head_dim=32, target="h200")
    os.write(1, f"{kernel.origin} {kernel.config != None}".encode())
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "default True"), done.stderr
