"""Documentation can't rot: generated pages equal the code, and what README shows exists."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from pathlib import Path
from types import ModuleType

import click
import pytest

import fagen
from fagen import errors, settings
from fagen.cli.main import cli


@pytest.fixture(scope="module")
def generator(root: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", root / "docs/generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_generated_pages_say_what_the_code_says(generator: ModuleType) -> None:
    assert generator.differing() == [], "run: make docs"


def test_a_page_that_differs_is_named(
    generator: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "DOCS", tmp_path)
    (tmp_path / "configuration.md").write_text(generator.configuration(), encoding="utf-8")
    (tmp_path / "commands.md").write_text(generator.commands() + "\n", encoding="utf-8")
    (tmp_path / "measured.md").write_text(generator.measured(), encoding="utf-8")
    (tmp_path / "replays.md").write_text(generator.replays(), encoding="utf-8")
    (tmp_path / "searches.md").write_text(generator.searches(), encoding="utf-8")
    (tmp_path / "tuners.md").write_text(generator.tuners(), encoding="utf-8")
    assert generator.differing() == ["commands.md"]


def test_a_result_that_changes_changes_the_tables(
    generator: ModuleType, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "h200-forward-full.json"
    text = (root / "benchmarks/results" / name).read_text(encoding="utf-8")
    found = json.loads(text)
    for cell in found["cells"]:
        cell["times_best_peer"] = [0.5, 0.5, 0.5]
    for path in (root / "benchmarks/results").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / name).write_text(json.dumps(found), encoding="utf-8")
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    assert generator.differing() == ["measured.md", "README.md"]
    assert generator.readme().count(" 0.500 |") == 18
    assert "N512 D64 full 0.500, " in generator.readme()
    for cell in found["cells"]:  # what was raced twice counts by its worst
        cell["times_best_peer"] = [5.0, 5.0, 5.0]
    (tmp_path / name).write_text(json.dumps(found), encoding="utf-8")
    assert generator.readme().count(" 5.000 |") == 18 - 3
    assert "| N4096 | 1.079 |" in generator.readme()  # with FlashAttention-4
    found["cells"][0]["times_best_peer"] = None  # no peer could run it
    (tmp_path / name).write_text(json.dumps(found), encoding="utf-8")
    assert generator.readme().count(" 5.000 |") == 17 - 3
    replayed = tmp_path / "replay_d128-full.json"
    scores = json.loads(replayed.read_text(encoding="utf-8"))
    scores["strategies"]["random"]["64"]["p10"] = 0.1234
    replayed.write_text(json.dumps(scores), encoding="utf-8")
    assert ", 0.1234, " in generator.replays()
    assert "Geometric mean of 17:" in generator.measured()


def test_results_of_the_backward_pass_have_tables_of_their_own(
    generator: ModuleType, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generator, "RESULTS", tmp_path)
    for path in (root / "benchmarks/results").glob("h200-forward*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    text = (tmp_path / "h200-forward-full.json").read_text(encoding="utf-8")
    alone, shown = generator.measured(), generator.readme()
    assert "backward pass" not in alone
    found = json.loads(text)
    cells = found["cells"] = found["cells"][:3]
    for cell, ratio in zip(cells, ([1.5, 1, 2], [2.0, 1, 3], None), strict=True):
        problem = cell["problem"]
        problem["direction"] = "backward"
        problem["text"] = problem["text"].replace("forward", "backward")
        cell["deterministic"] = {"times_best_peer": ratio}
        cell["kernel_us"]["fagen-deterministic"] = cell["call_us"]["fagen-deterministic"] = 0.1
    cells[0]["call_us"] = {}
    (tmp_path / "h200-backward.json").write_text(json.dumps(found), encoding="utf-8")
    page = generator.measured()
    assert page.startswith(alone) and generator.readme() == shown
    added = page[len(alone) :]
    assert "## h200-backward.json" in added and ", of those that repeat 1.732." in added
    assert "\n| bf16 B32 H32 N512 D64 full |" in added and "| faster | repeating |" in added
    assert [f" | {text} | " in added for text in ("1.500 | - | -", "2.000", "-")] == [True] * 3
    assert " 0 |" not in added  # no kernel of fagen's is taken for a peer's call


def test_there_are_at_most_eight_variables_and_no_other_is_read(root: Path) -> None:
    assert len(settings.VARIABLES) <= 8
    named = {
        name
        for path in (root / "fagen").rglob("*.py")
        for name in re.findall(r"\bFAGEN_[A-Z_]+\b", path.read_text(encoding="utf-8"))
    }
    assert named <= set(settings.VARIABLES)


def test_every_error_says_what_it_means() -> None:
    found = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.FagenError)
    ]
    assert len(found) > 10
    assert [kind.__name__ for kind in found if not kind.__doc__] == []


def command_lines(text: str) -> list[list[str]]:
    """Every line of a code block, fenced or indented, that runs fagen: words, no comment."""
    fenced = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^    (fagen .*)$", text, flags=re.MULTILINE)
    lines = re.findall(r"(?:^|&& )(fagen [a-z].*)$", "\n".join(fenced + indented), re.MULTILINE)
    return [shlex.split(line, comments=True)[1:] for line in lines]


def parse(words: list[str]) -> None:
    """Let click parse a command line, and run nothing. Raises UsageError."""
    command: click.Command = cli
    context = click.Context(cli)
    while isinstance(command, click.Group):
        name, command_or_none, words = command.resolve_command(context, words)
        assert command_or_none is not None
        command = command_or_none
        context = click.Context(command, parent=context, info_name=name)
    command.parse_args(context, list(words))


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "fagen/__init__.py"])
def test_command_lines_shown_are_understood(root: Path, page: str) -> None:
    for words in command_lines((root / page).read_text(encoding="utf-8")):
        parse(words)


def test_readme_shows_command_lines_and_a_wrong_one_is_noticed(root: Path) -> None:
    shown = command_lines((root / "README.md").read_text(encoding="utf-8"))
    assert ["tune", "--seq", "8192", "--head-dim", "128"] in shown
    assert len(shown) >= 5
    with pytest.raises(click.UsageError):
        parse(["tune", "--sequence", "8192"])


def test_readme_has_exactly_two_commands_of_set_up(root: Path) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    section = text.split("## Two commands")[1].split("\n## ")[0]
    blocks = re.findall(r"```\n(.*?)\n```", section, flags=re.DOTALL)
    assert blocks == [
        "pip install -c requirements-cpu.txt . && fagen tune --seq 8192 --head-dim 128",
        "make test",
    ]


def test_continuous_integration_runs_make_test(root: Path) -> None:
    assert (root / ".ci/run").read_text().splitlines()[-1] == "exec make test"
    assert (root / ".ci/run").stat().st_mode & 0o111


def test_links_between_pages_lead_somewhere(root: Path) -> None:
    pages = [*root.glob("*.md"), *(root / "docs").glob("*.md")]
    missing = [
        f"{page.name}: {link}"
        for page in pages
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert missing == []


def test_make_targets_named_in_the_pages_exist(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(), flags=re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        text = (root / page).read_text(encoding="utf-8")
        for words in re.findall(r"(?:^|`)make ([a-z -]+?)(?:\s*#.*)?(?:$|`)", text, re.MULTILINE):
            assert set(words.split()) <= targets, f"{page}: make {words}"


def test_every_public_name_can_be_had_and_is_documented() -> None:
    for name in fagen.__all__:
        assert getattr(fagen, name) is not None
    for name in set(fagen.__all__) - {"__version__"}:
        assert getattr(fagen, name).__doc__, name
