"""Programs that are compiled while weights are loaded: those for an outline of the model are those that the model runs."""

import itertools
import types

import jax
import pytest
from checkpoints import hf_config, write_checkpoint
from quantized_checkpoints import write_quantized
from tiers import in_system

from convert import convert
from qspec_jax import generate
from qspec_jax.checkpoints.loading import load_model, outline_model
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding import ahead
from qspec_jax.decoding.ahead import compile_ahead
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.programs import DECODE
from qspec_jax.drafts.int4 import int4_model

PROMPTS = [[1, 2, 3], [4] * 20]
KINDS = ("plain", "tied", "awq", "converted", "converted awq")
DEQUANTIZED = {"weights": "dequantized:head_bits=8"}


@pytest.fixture
def waited(monkeypatch):
    """Compiling ahead is over when `compile_ahead` returns."""

    def started(target, **_):
        return types.SimpleNamespace(start=target)

    monkeypatch.setattr(ahead, "threading", types.SimpleNamespace(Thread=started))  # its own alone: compiling starts threads too


def shapes_of(model) -> tuple:
    return jax.tree.structure(model), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(model)]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, {}) for kind in KINDS),
        ("awq", DEQUANTIZED),
        *in_system(*itertools.product(KINDS, [{"dtype": "bfloat16"}]), *((kind, DEQUANTIZED) for kind in KINDS if kind != "awq")),
    ],
    ids=str,
)
def test_an_outline_has_the_shapes_of_the_model(kind, how, tmp_path):
    if "awq" in kind:
        write_quantized(tmp_path / "hf", "awq")
    else:
        write_checkpoint(tmp_path / "hf", hf_config(num_hidden_layers=1, tie_word_embeddings=kind == "tied"))
    if "converted" in kind:
        convert(tmp_path / "hf", tmp_path / "converted", progress=False)
    directory = tmp_path / ("converted" if "converted" in kind else "hf")
    model, outline = load_model(directory, **how, progress=False), outline_model(directory, **how)
    assert shapes_of(outline) == shapes_of(model)
    assert shapes_of(int4_model(outline)) == shapes_of(int4_model(model))


@pytest.mark.parametrize("draft", ["sparse:budget=0.5", *in_system("none")])
def test_what_was_compiled_ahead_is_not_compiled_again(draft, directory, waited):
    Compiled.forget()
    config = GenerationConfig(draft=draft, max_new_tokens=6, num_speculative_tokens=2)
    compile_ahead(outline_model(directory), PROMPTS, config, None)
    made = {id(program) for compiled in Compiled._all for program in compiled.programs.values() if program.executable}
    assert len(DECODE.programs) == 1
    out = generate(load_model(directory, progress=False), PROMPTS, config=config)
    later = [each for each in Compiled._all if any(id(program) not in made for program in each.programs.values())]
    assert [each._function.__name__ for each in later] in ([], ["_window"])  # which fetches new tokens
    assert out.finish_reason == ["length"] * 2


def test_auto_is_resolved_once(directory, waited, caplog):
    caplog.set_level("INFO")
    config = compile_ahead(outline_model(directory), PROMPTS, GenerationConfig(max_new_tokens=4), None)
    assert config.draft == "none"
    generate(load_model(directory, progress=False), PROMPTS, config=config)
    assert caplog.text.count("draft auto") == 1


@pytest.mark.parametrize(
    ("draft", "cache"), [("quantspec:skip=auto", None), ("small-model:model={directory}", None), ("none", "int8:host=lower")]
)
def test_what_depends_on_weights_waits_for_them(draft, cache, directory, waited, monkeypatch):
    monkeypatch.setattr(ahead, "Run", None)
    config = GenerationConfig(draft=draft.format(directory=directory), cache=cache, max_new_tokens=4)
    assert compile_ahead(outline_model(directory), PROMPTS, config, None).draft == config.draft


def test_an_error_of_the_compiler_is_left_for_later(directory, waited, monkeypatch, caplog):
    caplog.set_level("INFO")
    config = GenerationConfig(draft="none", max_new_tokens=4)
    monkeypatch.setattr(ahead.Run, "compile", lambda self: 1 // 0)
    compile_ahead(outline_model(directory), PROMPTS, config, None)
    assert "could not be compiled before the weights were loaded: integer division" in caplog.text


def test_rounds_are_compiled_beside_prefill(directory, monkeypatch):
    """Before anything runs; not where one token is asked for."""
    model = load_model(directory, progress=False)
    monkeypatch.setattr("qspec_jax.decoding.prefill.Prefill.run", lambda *_: 1 // 0)
    for tokens, programs in ((1, 0), (2, 1)):
        Compiled.forget()
        with pytest.raises(ZeroDivisionError):
            generate(model, PROMPTS, config=GenerationConfig(draft="none", max_new_tokens=tokens))
        assert len(DECODE.programs) == programs


def test_a_command_compiles_before_it_reads_weights(directory, run, monkeypatch):
    events = []
    monkeypatch.setattr(
        "qspec_jax.cli.generate.compile_ahead", lambda outline, prompts, config, tokenizer: events.append(prompts) or config
    )
    loaded = load_model
    monkeypatch.setattr("qspec_jax.checkpoints.loading.load_model", lambda *args, **how: events.append("weights") or loaded(*args, **how))
    assert run("generate", "--model", directory, "--prompt", "import os", "--max-new-tokens", 2, "--draft", "none")[0] == 0
    assert [type(event) for event in events] == [list, str]
    assert events[0] == [load_tokenizer(directory)("import os")["input_ids"]]
