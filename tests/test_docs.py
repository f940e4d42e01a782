"""README and docs: what they show runs or parses, what they name exists, and the README stays short."""

import ast
import dataclasses
import graphlib
import importlib
import itertools
import json
import os
import re
import runpy
import shlex
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer
from checkpoints import hf_config, random_tensors, write_checkpoint
from runs import random_model
from test_model import one_pass

from qspec_jax import demo
from qspec_jax.checkpoints import tensor_names
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.cli.app import app
from qspec_jax.drafts import registry
from qspec_jax.models.families import ARCHITECTURES, Architecture

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted(page for folder in (".", "kernels", "measurements") for page in (ROOT / "docs" / folder).glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
COMMAND = typer.main.get_command(app)
EMBEDDED = "qspec_jax/demo/model"
# Folders of the package from the bottom to the top.
FLOORS = [
    "demo",
    "models",
    "quantization",
    "caches",
    "checkpoints",
    "drafts",
    "states",
    "planning",
    "traces",
    "decoding",
    "evaluate",
    "training",
    "bench",
    "cli",
]

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def blocks(page: Path, language: str) -> list[str]:
    return [code for found, code in FENCE.findall(page.read_text()) if found == language]


def spans(page: Path) -> list[str]:
    """Code within the text of a page, but not the names that things had before."""
    text = FENCE.sub("", page.read_text()).split("## Names that have changed")[0]
    return [code.replace("\\|", "|") for code in re.findall(r"`([^`\n]+)`", text)]


def commands(text: str) -> list[list[str]]:
    lines = [line.strip().removeprefix(".venv/bin/") for line in text.splitlines()]
    return [shlex.split(line.partition(" | ")[0], comments=True)[1:] for line in lines if re.match(r"qspec( |$)", line)]


def leaf(arguments: list[str]):
    """The command that these arguments name, and the arguments behind its name."""
    command = COMMAND
    while arguments and arguments[0] in getattr(command, "commands", {}):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    return command, arguments


def options_of(command) -> set[str]:
    return {"--help"}.union(*(set(parameter.opts) | set(parameter.secondary_opts) for parameter in command.params))


def check_drafts(arguments: list[str]) -> None:
    for option, value in itertools.pairwise(arguments):
        if option == "--draft" and value != registry.AUTO and not value.startswith("NAME"):
            registry.parse_draft(value)


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_first_figures_are_the_gpus():
    table = next(line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("|"))
    assert "GPU" in table and "simulated" in table and "speed-up" in table


def test_first_figures_are_those_that_the_demo_shows():
    shown = [
        [cell.strip(" *") for cell in line.strip("|").split("|")]
        for line in (ROOT / "README.md").read_text().splitlines()
        if "k | H200 |" in line
    ]
    rows = json.loads((demo.MODEL.parent / "measured.json").read_text())["rows"]
    for row, (model, context, device, transformers, baseline, ms, speedup, rate) in zip(rows, shown, strict=True):
        assert (row["model"], f"{row['context'] // 1024}k", row["device"]) == (model, context, device)
        found = row["conditional_rate"], row["baseline_ms"], row["ms"], row["speedup"]
        assert found == (float(rate.removesuffix(", measured")), float(baseline), float(ms), float(speedup))
        assert (f"{row['transformers_ms']:.1f}" if row["transformers_ms"] else "") == transformers
        assert row["simulated"] == (not rate.endswith("measured"))


@each_page
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert found.is_relative_to(ROOT), target
        assert not anchor or anchor in anchors(found), target


@each_page
def test_commands_parse(page):
    for arguments in (found for code in blocks(page, "") for found in commands(code)):
        command, rest = leaf(arguments)
        assert not hasattr(command, "commands"), arguments
        command.make_context(" ".join(arguments), list(rest))  # raises for what it does not know, or misses
        check_drafts(rest)


@each_page
def test_commands_in_the_text_exist(page):
    whole = (re.sub(r"^(eval|bench) ", r"qspec \1 ", code) for code in spans(page))
    for arguments in (found for code in whole for found in commands(code)):
        command, rest = leaf(arguments)
        assert not hasattr(command, "commands") or not rest or rest[0] == "--version", arguments
        assert {word for word in rest if word.startswith("--")} <= options_of(command), arguments
        check_drafts(rest)


def test_the_table_of_commands_is_complete():
    def leaves(command) -> list:
        return [found for below in command.commands.values() for found in leaves(below)] if hasattr(command, "commands") else [command]

    table = (ROOT / "docs" / "cli.md").read_text().split("\n## ")[0]
    shown = [leaf(shlex.split(row))[0] for row in re.findall(r"^\| `qspec ([^`]+)` \|", table, re.M)]
    assert [command.name for command in leaves(COMMAND) if command not in shown] == []


@each_page
def test_options_in_the_text_exist(page):
    def all_options(command) -> set[str]:
        return options_of(command).union(*(all_options(below) for below in getattr(command, "commands", {}).values()))

    for code in (code for code in spans(page) if code.startswith("--")):
        words = shlex.split(code)
        assert words[0] in all_options(COMMAND), code
        check_drafts(words)


TABLES = re.findall(r"^([\w-]+)\)(?: #|$)", (ROOT / "notebooks" / "paper" / "measure.sh").read_text(), re.M)


@pytest.mark.parametrize("table", TABLES)
def test_the_papers_commands_parse(table, tmp_path):
    """Those of notebooks/paper/measure.sh, with a Python that only notes what it is asked."""
    python, asked = tmp_path / "python3", tmp_path / "asked"
    python.write_text(f'#!/bin/sh\n[ "$1" = -m ] || exit 0\nprintf "%s\\n" "$@" "--end" >> {asked}\n')
    python.chmod(0o755)
    command = ["bash", "notebooks/paper/measure.sh", table, str(tmp_path), EMBEDDED]
    subprocess.run(command, cwd=ROOT, check=True, env={"PATH": f"{tmp_path}:{os.environ['PATH']}"})
    calls = asked.read_text().split("\n--end\n")[:-1]
    assert calls
    for call in calls:
        module, *arguments = call.split("\n")[1:]
        command, rest = leaf(arguments)
        assert module == "qspec_jax.cli" and not hasattr(command, "commands")
        command.make_context(" ".join(arguments), list(rest))
        check_drafts(rest)
    assert len(TABLES) == 14


def test_targets_of_make_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in PAGES:
        for code in [*spans(page), *"".join(blocks(page, "")).splitlines()]:
            if found := re.match(r"make ([\w-]+)", code):
                assert found[1] in targets, code


@each_page
def test_names_exist(page):
    """Files and names of the packages."""
    for code in spans(page):
        if re.fullmatch(r"(qspec_jax|pallas_kernels|convert|tests|notebooks|docs)/[\w./-]*", code):
            assert (ROOT / code).exists(), code
        elif found := re.match(r"((?:qspec_jax|pallas_kernels)(?:\.\w+)+)(?:\(|$)", code):
            assert resolved(found[1]) is not None, code


def resolved(name: str):
    parts = name.split(".")
    for i in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            continue
        for part in parts[i:]:
            found = getattr(found, part)
        return found


@each_page
def test_python_is_python(page):
    """Every block compiles, and what it imports is there."""
    for code in blocks(page, "python"):
        tree = ast.parse(code)
        imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        exec(compile(ast.Module(imports, []), page.name, "exec"), {})


def test_the_readmes_python_runs(directory, capsys):
    (code,) = blocks(ROOT / "README.md", "python")
    assert (ROOT / EMBEDDED).samefile(demo.MODEL)
    names = {}
    exec(compile(code.replace(EMBEDDED, str(directory)), "README.md", "exec"), names)  # a model of one layer, which compiles faster
    assert names["out"].text[0] in capsys.readouterr().out


@pytest.mark.system
def test_the_python_pages_code_runs(directory):
    """All blocks of docs/python.md, one after the other."""
    names = {}
    for code in blocks(ROOT / "docs" / "python.md", "python"):
        exec(compile(code.replace(EMBEDDED, str(directory)), "python.md", "exec"), names)
    assert names["logprobs"].shape == (1, len(names["text"]) - 3)
    np.testing.assert_allclose(names["full"], names["int8"], atol=0.1)
    # The hidden states' logits are those that predict the text, and the loop's cache holds its tokens.
    expected = jax.nn.log_softmax(names["logits"][0])[jnp.arange(2, len(names["text"]) - 1), jnp.array(names["text"][3:])]
    np.testing.assert_allclose(expected, names["full"][0], atol=0.05)
    assert names["cache"].lengths.total.tolist() == [len(names["text"]) + 4]


@pytest.mark.system
def test_the_code_of_the_page_on_states_runs(directory, tmp_path, monkeypatch):
    names = {}
    page = "\n".join(blocks(ROOT / "docs" / "states.md", "python")).replace(EMBEDDED, str(directory))
    monkeypatch.chdir(tmp_path)
    exec(compile(page, "states.md", "exec"), names)
    assert names["first"].token_ids == names["again"].token_ids and (tmp_path / "handbook.state").exists()


def test_a_new_family_loads(monkeypatch, tmp_path):
    """A Llama whose heads have their channels in the order of interleaved pairs is the model of the page."""
    for entries in (ARCHITECTURES, tensor_names.TABLES):  # what the page adds is taken out afterwards
        monkeypatch.setitem(entries, "Ernie4_5ForCausalLM", None)
    config = hf_config(attention_bias=True, mlp_bias=True)
    tensors, (code,) = random_tensors(config), blocks(ROOT / "docs" / "add-a-model-family.md", "python")
    own = {"architectures": ["Ernie4_5ForCausalLM"], "model_type": "ernie4_5", "use_bias": True}
    order = np.arange(64).reshape(2, 32).T.reshape(-1)  # channel i of the first half, then channel i of the second
    turned = {
        name: x.reshape(-1, 64, *x.shape[1:])[:, order].reshape(x.shape) if "q_proj" in name or "k_proj" in name else x
        for name, x in tensors.items()
    }
    write_checkpoint(tmp_path / "ernie", config | own, tensors=turned)
    names = {}
    exec(compile(code.replace("path/of/a/checkpoint", str(tmp_path / "ernie")), "add-a-model-family.md", "exec"), names)
    llama, tokens = load_model(write_checkpoint(tmp_path / "llama", config, tensors=tensors)), np.arange(48)[None]
    assert names["model"].config.architecture == "Ernie4_5ForCausalLM" and names["model"].config.rope.interleaved
    np.testing.assert_allclose(one_pass(names["model"], tokens, 48), one_pass(llama, tokens, 48), rtol=0, atol=1e-4)


def test_the_page_on_families_names_every_field_of_one():
    page = (ROOT / "docs" / "add-a-model-family.md").read_text()
    assert [field.name for field in dataclasses.fields(Architecture) if f"`{field.name}`" not in page] == []


@pytest.mark.system
def test_a_new_draft_is_under_60_lines_and_runs(monkeypatch, shallow):
    monkeypatch.setattr(demo, "MODEL", shallow)
    monkeypatch.setattr(registry, "DRAFTS", dict(registry.DRAFTS))
    monkeypatch.setattr("qspec_jax.drafts.DRAFTS", registry.DRAFTS)
    (code,) = blocks(ROOT / "docs" / "add-a-draft.md", "python")
    assert len(code.splitlines()) < 60
    names = {}
    exec(compile(code, "add-a-draft.md", "exec"), names)
    assert names["out"].token_ids == names["alone"].token_ids
    assert all(row.num_accepted_draft_tokens > 0 and row.flushes > 0 for row in names["out"].stats.rows)
    # Where it has nothing to propose, the other draft of `combine` does.
    model = random_model(jnp.float32, num_hidden_layers=1)
    both = names["make_draft"]("combine:bigram+(quantspec:weight_bits=16)", model)
    config = names["GenerationConfig"](draft=both, max_new_tokens=24, group_size=8, ignore_eos=True)
    assert names["generate"](model, [[1, 2, 3]], config=config).stats.num_spec_steps < 12


def test_the_settings_of_drafts_and_caches_are_those_of_the_registries():
    """Generated: after a change of settings run `python docs/settings_tables.py`."""
    module = runpy.run_path(str(ROOT / "docs" / "settings_tables.py"))
    for page, generated in module["pages"]().items():
        assert module["with_generated"](page.read_text(), generated) == page.read_text(), "python docs/settings_tables.py"


def test_imports_run_one_way():
    """As docs/architecture.md has it: a folder imports only those below it, and the files on the ground floor no folder."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    listing = text.partition("\nqspec_jax/\n")[2].partition("\nconvert/")[0]
    assert re.findall(r"^  (\w+)/ ", listing, re.M) == FLOORS
    assert {path.parent.name for path in (ROOT / "qspec_jax").glob("*/__init__.py")} == set(FLOORS)
    ground = {path.name for path in (ROOT / "qspec_jax").glob("*.py")} - {"__init__.py"}
    assert set(re.findall(r"\w+\.py", listing)) == ground
    packages = {"pallas_kernels": set(), "convert": {"pallas_kernels", *FLOORS[:-1]}}
    packages |= {f"qspec_jax/{name}": set() for name in ground}
    for i, name in enumerate(FLOORS):
        packages[f"qspec_jax/{name}"] = {"pallas_kernels", *FLOORS[: i + 1]} | ({"convert"} if name == "cli" else set())
    for folder, below in packages.items():
        own = set() if folder.startswith("qspec_jax") else {folder}
        for path in [ROOT / folder] if folder.endswith(".py") else (ROOT / folder).rglob("*.py"):
            for name in imported(path):
                assert name not in {*FLOORS, "pallas_kernels", "convert"} - below - own, f"{path.relative_to(ROOT)} imports {name}"


def imported(path: Path) -> set[str]:
    """The folders and packages of ours that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            found |= set(rest[:1]) if first == "qspec_jax" else {first}
    return found


MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for folder in ("qspec_jax", "pallas_kernels", "convert")
    for path in (ROOT / folder).rglob("*.py")
}


def modules_imported(name: str, source: str) -> set[str]:
    """Modules of ours that the source of one imports, within functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {each if each in MODULES else node.module for each in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys() - {name}


def test_no_circle_of_imports():
    graph = {name: modules_imported(name, path.read_text()) for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
    planted = {"qspec_jax.errors": modules_imported("qspec_jax.errors", "def f():\n    from qspec_jax.decoding import engine")}
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | planted).prepare()


def test_files_fit_a_sitting():
    assert {name: lines for name, path in MODULES.items() if (lines := len(path.read_text().splitlines())) > 480} == {}
