"""`qspec train head`: its steps are those of the draft; runs, the checkpoint that they leave, mistakes; and the embedded model's head."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from heads import random_head
from runs import random_model
from safetensors.numpy import load_file

from pallas_kernels.formats.views import FULL_PRECISION
from qspec_jax import GenerationConfig, demo, generate, load
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.eagle3 import load_head
from qspec_jax.drafts.registry import make_draft
from qspec_jax.errors import InputError
from qspec_jax.training import corpus, head
from qspec_jax.training.head import HeadRecipe, HeadTrainer, head_config, made_head, save_head
from qspec_jax.training.pretraining import Settings
from qspec_jax.training.unrolled import read_by, unrolled

TEXT = "".join(f"value_{i} = table[{i % 7}]\n" for i in range(60))
SMALL = dict(steps=4, batch=2, length=24, window=8, unroll=2, layers=(0, 1), draft_vocab=64, progress=False)
WINDOW, STEPS = 9, 3
MIN_ACCEPTANCE = 0.05  # of the embedded model's head; of one with random weights it is 0

step = jax.jit(lambda head, *args: head(*args, view=FULL_PRECISION))


@pytest.fixture(scope="module")
def read():
    """A model, two rows of tokens, and the features of all."""
    model = random_model(jnp.float32, num_hidden_layers=3)
    tokens = jax.random.randint(jax.random.key(0), (2, 30), 0, 64)
    return model, tokens, jax.jit(lambda tokens: read_by(model, tokens, (0, 2)))(tokens)[1]


def test_the_features_are_those_of_decoding(read):
    """A target whose layers have windows of 4 tokens among them."""
    windowed = dict(layer_types=["full_attention", "sliding_attention"], sliding_window=4, architectures=["Qwen2ForCausalLM"])
    for model in (read[0], random_model(jnp.float32, **windowed, model_type="qwen2", use_sliding_window=True)):
        tokens = read[1]
        cache = CacheConfig("full").empty(model.config, batch=2, capacity=30, num_speculative_tokens=1, dtype=jnp.float32)
        one = jax.jit(lambda tokens, at, cache, model=model: model.watched(tokens, at, cache, view=FULL_PRECISION, taps=(0, 2)))
        seen, logits = [], []
        for i in range(12):
            found, cache, of_token = one(tokens[:, i : i + 1], jnp.full((2, 1), i), cache)
            seen.append(of_token.features)
            logits.append(found)
        at_once = jax.jit(lambda tokens, model=model: read_by(model, tokens, (0, 2)))(tokens[:, :12])
        np.testing.assert_allclose(at_once[0], jnp.concatenate(logits, 1), atol=1e-4)
        np.testing.assert_allclose(at_once[1], jnp.concatenate(seen, 1), atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"norm_output": True, "norm_before_residual": True}, {"num_hidden_layers": 2}], ids=str)
def test_the_unrolled_steps_are_those_of_the_draft(read, changes):
    """From each position, the head read the window of pairs before it, numbered from 0, then each step what the one before fed back."""
    model, tokens, features = read
    trained = random_head(model, taps=(0, 2), tokens=16, **changes)
    A = tokens.shape[1] - STEPS
    found = jax.jit(lambda: unrolled(trained, features[:, :A], tokens, steps=STEPS, window=WINDOW))()
    anchors = (WINDOW - 1, WINDOW, 20, A - 1) if trained.config.num_layers == 1 else (WINDOW - 1,)  # a second layer sees further back
    for a in anchors:
        first = a - WINDOW + 1
        cache = CacheConfig("full").empty(trained.config, batch=2, capacity=20, num_speculative_tokens=WINDOW, dtype=jnp.float32)
        positions = jnp.broadcast_to(jnp.arange(WINDOW), (2, WINDOW))
        logits, hidden, cache = step(trained, trained.fused(features[:, first : a + 1]), tokens[:, first + 1 : a + 2], positions, cache)
        chain, hidden = [logits[:, -1]], hidden[:, -1:]
        for i in range(1, STEPS):
            logits, hidden, cache = step(trained, hidden, tokens[:, a + i + 1, None], jnp.full((2, 1), WINDOW - 1 + i), cache)
            chain.append(logits[:, 0])
        for ours, drafts in zip(found, chain, strict=True):
            np.testing.assert_allclose(ours[:, a], drafts, rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def trained():
    """A trainer of a head for a random model, with its config.json, after some steps."""
    from tqdm import tqdm

    model, ids = random_model(jnp.float32), np.arange(0, 64, 2)
    s = Settings(24, 4, muon_learning_rate=0.02, adam_learning_rate=2e-3, evaluations=1)
    raw = head_config(model.checkpoint_config, taps=(1, 2), draft_vocab=32, window=8)
    trainer = HeadTrainer(HeadRecipe(raw, s, s, long_share=0, unroll=2, window=8), np.tile(np.arange(0, 64, 2), 60), model, ids)
    trainer.begin(seconds=0, steps=30)
    trainer.train(float("inf"), lambda params: 0.0, tqdm(disable=True))
    return trainer


def test_it_learns(trained):
    nats = trained.progress.train_nats
    assert np.mean(nats[-3:]) < 0.8 * np.mean(nats[:3])


def test_what_is_written_is_what_was_trained(trained, tmp_path):
    """In bfloat16, as SpecForge lays it out, for engines that number layers either way."""
    model, raw = trained.target, trained.recipe.model
    save_head(trained.params, trained.settings, raw, np.asarray(trained.ids), tmp_path)
    written, loaded = load_file(tmp_path / "model.safetensors"), load_head(tmp_path, model)
    layer = {f"self_attn.{n}_proj" for n in "qkvo"} | {f"mlp.{n}_proj" for n in ("gate", "up", "down")}
    layer |= {"input_layernorm", "hidden_norm", "post_attention_layernorm"}
    assert set(written) == {f"midlayer.{n}.weight" for n in layer} | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert (written["d2t"].dtype, written["t2d"].dtype) == (np.int64, bool) and written["t2d"].nonzero()[0].tolist() == [*range(0, 64, 2)]
    assert (raw["eagle_aux_hidden_state_layer_ids"], raw["eagle_config"]["eagle_aux_hidden_state_layer_ids"]) == ([1, 2], [0, 1])
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["model_type"] == "llama"
    assert loaded.settings == trained.settings and loaded.embedding.get_value() is model.embedding.get_value()
    rounded = {path: array.astype(jnp.bfloat16).astype(jnp.float32) for path, array in trained.params.items()}
    ours = made_head(trained.settings, rounded, model, trained.ids)
    features, tokens = jax.random.normal(jax.random.key(1), (1, 10, 128)), jnp.arange(12)[None]
    ours, theirs = (jax.jit(lambda h: unrolled(h, features, tokens, steps=2, window=8))(h) for h in (ours, loaded))
    np.testing.assert_array_equal(ours, theirs)
    draft = make_draft(f"eagle3:model={tmp_path}", model)
    assert (draft.sinks, draft.window) == (0, 7)


def test_an_interrupted_run_is_the_same_run(tmp_path, model, tokenizer, monkeypatch):
    """One that a segment's time ended, and then a signal."""
    whole = head.run(tmp_path / "whole", model, tokenizer, [TEXT], **SMALL)
    cut, settings = tmp_path / "cut", SMALL | {"segment_minutes": 1e-9}
    first = head.run(cut, model, tokenizer, [TEXT], **settings)
    assert (first.step, first.completed, first.held_out) == (1, False, []) and [path.name for path in cut.iterdir()] == [head.STATE]
    taken, real_step = [], HeadTrainer._step

    def interrupted(self, *args):
        taken.append(1)
        if len(taken) == 2:
            raise KeyboardInterrupt
        return real_step(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(HeadTrainer, "_step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            head.run(cut, model, tokenizer, [TEXT], **SMALL)
    with pytest.raises(InputError, match="other settings"):
        head.run(cut, model, tokenizer, [TEXT], **SMALL | {"window": 9})
    with pytest.raises(InputError, match=r"--steps 5: .* a run of 4 steps"):
        head.run(cut, model, tokenizer, [TEXT], **SMALL | {"steps": 5})
    last = head.run(cut, model, tokenizer, [TEXT], **SMALL)
    assert last.completed and last.step == 4 and len(last.held_out) == 2
    assert last.held_out == whole.held_out and last.held_out_while_training == whole.held_out_while_training
    names = {"config.json", "model.safetensors", "training.json"}
    assert {path.name for path in cut.iterdir()} == {path.name for path in (tmp_path / "whole").iterdir()} == names
    assert len({path.stat().st_mode for path in cut.iterdir()}) == 1
    for name in ("config.json", "model.safetensors"):
        assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cut", "whole"]


def test_the_command_leaves_a_checkpoint(run, fails, directory, model, tmp_path):
    output, text = tmp_path / "head", tmp_path / "text"
    text.write_text(TEXT)
    command = ["train", "head", "--model", directory, "--output", output, "--file", text, "--steps", 1, "--batch", 1, "--length", 24]
    code, out, err = run(*command, "--window", 8, "--layers", "0,1", "--unroll", 1, "--json")
    report, record = json.loads(out), json.loads((output / "training.json").read_text())
    assert code == 0 and report["completed"] and len(report["held_out"]) == 1, err
    assert record["settings"]["window"] == 8 and record["covered_by_draft_vocab"] == 1
    loaded = load_head(output, model)
    assert loaded.settings.has_whole_vocabulary and loaded.taps == (0, 1)
    fails([*command, "--layers", "0,1"], f"--output {output}", "holds a checkpoint, whose training is completed")


def test_a_command_that_is_interrupted_says_how_it_goes_on(run, directory, model, tmp_path, monkeypatch):
    output, text = tmp_path / "head", tmp_path / "text"
    text.write_text(TEXT)

    def step(self, *args):
        raise KeyboardInterrupt

    monkeypatch.setattr(HeadTrainer, "_step", step)
    command = ["train", "head", "--model", directory, "--output", output, "--file", text, "--steps", 1, "--batch", 1, "--length", 24]
    command += ["--window", 8, "--layers", "0,1"]
    code, _, err = run(*command)
    assert code == 130 and err.endswith("qspec: interrupted, before anything was saved\n")
    (output / head.STATE).write_bytes(b"")
    monkeypatch.setattr(HeadTrainer, "load", step)
    assert run(*command)[2].endswith(f"qspec: interrupted; the same command goes on from {output / head.STATE}\n")
    with pytest.raises(InputError, match="its training is not completed; `qspec train head` goes on with it"):
        load_head(output, model)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--layers is missing", "which has 1", "from 0 to 1"]),
        (["--layers", "1,0"], ["--layers 1,0", "in order"]),
        (["--layers", "0,2"], ["--layers 0,2", "from 0 to 1"]),
        (["--layers", "0;1"], ["--layers 0;1", "commas"]),
        (["--layers", "0,1", "--length", 129], ["--length 129", "128 positions"]),
        (["--layers", "0,1", "--length", 7], ["--length 7", "at least 8"]),
        (["--layers", "0,1", "--draft-vocab", 4097], ["--draft-vocab 4097", "4096 tokens"]),
        (["--layers", "0,1", "--length", 120], ["--file", "tokens", "--length 120"]),
        (["--layers", "0,1", "--window", 0], ["--window"]),
        (["--layers", "0,1", "--window", 61], ["--window 61", "at most --length 60"]),
        (["--file", "missing.txt"], ["missing.txt"]),
        (["--model", "missing"], ["missing"]),
        (["--output", "TEXT"], ["--output", "text"]),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_mistakes(fails, directory, tmp_path, options, words):
    output, text = tmp_path / "head", tmp_path / "text"
    text.write_text(TEXT[:300])
    given = [text if option == "TEXT" else option for option in options]
    command = ["train", "head", "--model", directory, "--output", output, "--file", text, "--length", 60, "--window", 8, *given]
    fails(command, *words)
    assert not (output / "config.json").exists() and text.read_text() == TEXT[:300]


# The head of the embedded model --------------------------------------------------------------------------------------


def test_the_embedded_models_head_loads():
    """In the size that is meant for it, with the record of its training."""
    model, files = load(demo.MODEL, dtype="float32")[0], list(demo.HEAD.iterdir())
    assert {path.name for path in files} == {"config.json", "model.safetensors", "training.json"}
    assert sum(path.stat().st_size for path in files) < 4e6
    loaded, record = load_head(demo.HEAD, model), json.loads((demo.HEAD / "training.json").read_text())
    assert loaded.taps == (2, 3, 4) and record["completed"] and record["parameters"] * 2 < (demo.HEAD / "model.safetensors").stat().st_size
    assert [step["agreement"] > 0.42 for step in record["held_out"]] == [True] * 3


def test_the_embedded_models_head_drafts():
    """For held-out source code."""
    model, tokenizer = load(demo.MODEL, dtype="float32")
    prompt = tokenizer(corpus.held_out_files()[0].read_text(encoding="utf-8"))["input_ids"][:600]
    config = GenerationConfig(draft=f"eagle3:model={demo.HEAD}", num_speculative_tokens=3, max_new_tokens=64, ignore_eos=True)
    out = generate(model, [prompt], config=config)
    alone = generate(model, [prompt], config=dataclasses.replace(config, draft="none"))
    assert out.token_ids == alone.token_ids
    assert out.stats.draft_acceptance_rate > MIN_ACCEPTANCE
