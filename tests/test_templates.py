"""What every generated module keeps, and the text of some, read as text: no Triton, no device."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import jinja2.nodes
import pytest

from fagen import settings
from fagen.errors import BadConfig
from fagen.generate.families import FAMILIES, config_from_dict, family_of
from fagen.generate.program import Program, source_key
from fagen.generate.render import environment, render
from fagen.generate.space import SearchSpace
from fagen.problem import Problem, make_problem
from fagen.target import preset
from golden_cases import CASES, NEWEST, OTHER_IN_NEWEST, golden_programs

GOLDEN = Path(__file__).parent / "golden"

PROBLEMS = [
    make_problem(8192, 128),
    make_problem(1000, 64, causal=True, dtype="fp16"),
    make_problem(77, 80, seq_kv=300, causal=True, causal_align="bottom_right"),
    make_problem(512, 192, head_dim_v=128, layout="any"),
    make_problem(200, 40, dtype="fp32", scale_sign="any"),
    make_problem(1, 256, seq_kv=5000, heads=32, kv_heads=8),
]


@pytest.mark.parametrize("program", golden_programs(), ids=lambda program: program.name)
def test_generated_text_is_the_golden_one(program: Program, update_golden: bool):
    path = GOLDEN / f"{program.name}.py"
    if update_golden:
        path.write_text(program.source)
    assert path.read_text() == program.source


def test_golden_folder_holds_nothing_else(update_golden: bool):
    wanted = {f"{program.name}.py" for program in golden_programs()}
    if update_golden:
        for path in GOLDEN.glob("*.py"):
            if path.name not in wanted:
                path.unlink()
    assert {path.name for path in GOLDEN.glob("*.py")} == wanted


def _assigned(nodes: list[ast.AST]) -> list[tuple[str, str | None]]:
    """(name, name it copies or None) of every assignment in the nodes, in the text's order."""
    found = []
    for node in nodes:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
                found.append((inner.lineno, inner.id, None))
            if isinstance(inner, ast.Assign) and isinstance(inner.value, ast.Name):
                found += [
                    (inner.lineno + 0.5, target.id, inner.value.id)
                    for target in inner.targets
                    if isinstance(target, ast.Name)
                ]
    return [(name, copied) for _, name, copied in sorted(found, key=lambda f: f[0])]


def _lost(function: ast.FunctionDef) -> set[tuple[str, str]]:
    """Copies in a loop of names that are copies of each other where the loop begins."""
    lost = set()
    for loop in (n for n in ast.walk(function) if isinstance(n, ast.While | ast.For)):
        same: set[tuple[str, str]] = set()
        for name, copied in _assigned([n for n in function.body if n.lineno < loop.lineno]):
            same = {pair for pair in same if name not in pair}
            same |= {(name, copied)} if copied else set()
        lost |= {(x, y) for x, y in _assigned(list(loop.body)) if y and (x, y) in same}
    return lost


@pytest.mark.parametrize("program", golden_programs(), ids=lambda program: program.name)
def test_no_name_is_copied_before_a_loop_and_in_it(program: Program):
    """Triton 3.6 to 3.9 carry only names whose value a first walk through the body changed: with
    `x = y` before a loop and `x = y; y = ...` in it, x stays what it was before."""
    functions = [n for n in ast.walk(ast.parse(program.source)) if isinstance(n, ast.FunctionDef)]
    assert {f.name: lost for f in functions if (lost := _lost(f))} == {}


def test_a_copy_before_a_loop_and_in_it_is_found():
    text = "def f(a):\n    b = a\n    while a:\n        b = a\n        a = g(a)\n"
    (function,) = ast.parse(text).body
    assert isinstance(function, ast.FunctionDef)
    assert _lost(function) == {("b", "a")}


@pytest.mark.parametrize(
    "program",
    [p for p in golden_programs() if p.problem.direction == "forward"],
    ids=lambda program: program.name,
)
def test_no_forward_kernel_reads_the_lse(program: Program):
    """All launches of a device may share the memory of an LSE that nobody asked for."""
    stores = [line for line in program.source.splitlines() if re.search(r"\bLSE\b", line)]
    assert any("store(" in line or "lse_base" in line for line in stores)
    assert not [line for line in stores if "load" in line or "atomic" in line]


def test_golden_files_take_every_branch_of_every_template(monkeypatch: pytest.MonkeyPatch):
    marking = Marking(**_like(environment()))
    monkeypatch.setattr("fagen.generate.render.environment", lambda: marking)
    text = "".join(program.source for program in golden_programs())
    assert marking.branches
    assert sorted(mark for mark in marking.branches if mark not in text) == []


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_every_valid_config_renders_a_module_that_keeps_its_promises(problem: Problem):
    space = SearchSpace.of(problem, preset("h200"))
    assert space.seeds
    for config in [*space.seeds, *space.configs[::29]]:
        program = render(problem, config)
        assert "{{" not in program.source
        assert "{%" not in program.source
        functions = _functions(program.source)
        for entry in program.entries:
            arguments = functions[entry.function].args
            fixed = len(arguments.args) - len(arguments.defaults)
            assert [a.arg for a in arguments.args[:fixed]] == [a.name for a in entry.args]
        assert program.name in functions
        # Gluon hands a kernel's state on as arguments, in lists that are long.
        width = 110 if program.interpretable else 320
        assert max(len(line) for line in program.source.splitlines()) <= width


def test_seeds_of_every_family_are_choices_of_its_knobs():
    for problem in PROBLEMS:
        space = SearchSpace.of(problem, preset("h200"))
        assert set(space.seeds) <= set(space.configs)
        assert {c.family for c in space.seeds} == {c.family for c in space.configs}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_template_uses_only_the_documented_words(name: str):
    family = FAMILIES[name]
    text = (settings.template_dir() / family.TEMPLATE).read_text()
    words = jinja2.meta.find_undeclared_variables(environment().parse(text))
    problem, config = next(case for case in CASES if case[1].family == name)
    shared = {"header", "name", "problem", "knobs", "triton_minor", "launch"}
    shared |= {"tl_dtype", "precision"}
    assert words <= shared | set(family.context(problem, config.knobs))


def test_misspelt_word_names_itself_and_its_file(monkeypatch: pytest.MonkeyPatch):
    problem, config = CASES[0]
    family = family_of(config)
    monkeypatch.setattr(family, "context", lambda problem, knobs: {})
    with pytest.raises(jinja2.UndefinedError, match=r"is undefined"):
        render(problem, config)


@pytest.mark.parametrize(
    "knobs", [{"block_m": "64"}, {"block_m": 96}, {"block_k": 64}, {"loads": None}, {"order": []}]
)
def test_config_with_an_unknown_knob_or_value_is_refused(knobs: dict[str, object]):
    with pytest.raises(BadConfig, match="flash"):
        config_from_dict({"family": "flash", "knobs": knobs})


def test_config_read_back_has_the_same_key():
    for _, config in CASES:
        assert config_from_dict(config.to_dict()).key == config.key
    whole = {"family": "flash", "knobs": {"rescale_tau": 8, "rescale_skip": "branch"}}
    exact = {"family": "flash", "knobs": {"rescale_tau": 8.0, "rescale_skip": "branch"}}
    assert config_from_dict(whole).key == config_from_dict(exact).key


def test_equal_input_gives_equal_bytes_and_other_knobs_another_name():
    problem, config = CASES[0]
    first, again = render(problem, config), render(problem, config)
    assert first == again
    names = {render(p, c).name for p, c in CASES}
    assert len(names) == len(CASES)
    # Where the dialects differ, so do the sources; elsewhere a key holds for every release.
    other = {render(p, c, NEWEST).name for p, c in OTHER_IN_NEWEST}
    assert names.isdisjoint(other)
    assert render(problem, config, NEWEST) == first


def test_key_ignores_name_header_and_sizes_that_the_source_does_not_hold():
    config = CASES[0][1]
    short, long = (render(make_problem(n, 128), config) for n in (512, 8192))
    assert short.key == long.key
    assert short.source == long.source
    assert render(make_problem(512, 64), config).key != short.key


@pytest.mark.parametrize("program", golden_programs(), ids=lambda program: program.name)
def test_key_can_be_found_from_the_text_alone(program: Program):
    assert source_key(program.source, program.name) == program.key
    assert source_key(program.source + "\n", program.name) != program.key
    below = program.source.split('"""', 2)[2]
    assert source_key(f'"""Another header."""{below}', program.name) == program.key


def test_default_layout_is_that_of_contiguous_tensors():
    assert make_problem(64, 128).layout == "aligned16"
    assert make_problem(64, 100).layout == "any"
    assert make_problem(64, 100, dtype="fp32").layout == "aligned16"
    assert make_problem(64, 128, head_dim_v=1).layout == "any"


# C01
def test_every_knob_is_in_the_key():
    problem = make_problem(300, 64, causal=True, dtype="fp16")
    space = SearchSpace.of(problem, preset("h200"))
    keys = {render(problem, config).key for config in space.configs[::7]}
    assert len(keys) == len(space.configs[::7])


def _functions(source: str) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in ast.parse(source).body if isinstance(n, ast.FunctionDef)}


class Marking(jinja2.Environment):
    """Puts a mark into each branch of each {% if %}, so that the text says which were taken."""

    branches: set[str]

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all(jinja2.nodes.If):
            for kind, body in (("if", node.body), ("else", node.else_)):
                if body:
                    mark = f"<{name}:{node.lineno}:{kind}>"
                    self.branches.add(mark)
                    body.insert(0, jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]))
                    body[0].set_lineno(node.lineno)
        return tree


def _like(plain: jinja2.Environment) -> dict[str, Any]:
    names = ("loader", "undefined", "trim_blocks", "lstrip_blocks", "keep_trailing_newline")
    Marking.branches = set()
    return {name: getattr(plain, name) for name in names}
