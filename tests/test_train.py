"""`qspec train benchmark-model` on models that a CPU trains at once: segments, the checkpoint that they leave, and what is refused."""

import dataclasses
import json
import math
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import sharing
import simulated_devices
from tokenizers import Tokenizer
from tqdm import tqdm

pytest.importorskip("optax", reason="the extra train is not installed")

from qspec_jax.checkpoints import loading
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.errors import InputError
from qspec_jax.evaluate import needle
from qspec_jax.training import benchmark_model, corpus, embedded_model
from qspec_jax.training import trainer as training
from qspec_jax.training.pretraining import CausalAttention, Settings, initial_params, log_probabilities
from qspec_jax.training.trainer import Recipe, Trainer

SHORT = Settings(context=16, batch=2, evaluations=2, timed_steps=1)
TINY = Recipe(
    benchmark_model.SMOKE.model | {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32},
    SHORT,
    dataclasses.replace(SHORT, context=64, batch=1),
    long_share=0.4,
)
COMPILED = {}  # of TINY's steps, shared by the tests
STREAM = np.tile(np.random.default_rng(0).permutation(64).astype(np.uint16), 40)


def trained(trainer: Trainer, until: float = math.inf) -> Trainer:
    # A figure in place of an evaluation, which depends on the parameters.
    evaluate = lambda params: float(jnp.abs(params["embedding"]).sum())
    trainer.train(until, evaluate, tqdm(disable=True))
    return trainer


def made() -> Trainer:
    trainer = Trainer(TINY, STREAM)
    trainer.compiled = COMPILED
    return trainer


def begun(**settings) -> Trainer:
    trainer = made()
    trainer.begin(**({"seconds": 0, "steps": 5} | settings))
    return trainer


def test_segments_are_one_run(tmp_path):
    whole = trained(begun())
    path, contexts = tmp_path / "state.safetensors", []
    trainer = begun()
    for step in range(1, 6):
        contexts.append(trainer._phase()[0].context)
        trained(trainer, until=-math.inf).save(path)
        assert trainer.progress.step == step
        trainer = made()
        trainer.load(path)
    assert contexts == [16, 16, 16, 64, 64]
    assert trainer.progress.completed and trainer.tokens_seen == 3 * 2 * 16 + 2 * 64
    ours, theirs = (jax.tree_util.tree_leaves_with_path((t.params, t.state)) for t in (trainer, whole))
    assert [path for path, _ in ours] == [path for path, _ in theirs]
    for (_, a), (_, b) in zip(ours, theirs):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)
    assert trainer.progress.train_nats == whole.progress.train_nats
    assert trainer.progress.held_out == whole.progress.held_out and len(whole.progress.held_out) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_it_learns():
    nats = trained(begun(steps=100)).progress.train_nats
    assert nats[0] == pytest.approx(math.log(64), abs=0.1)
    assert np.mean(nats[-3:]) < 0.3 * nats[0]


def test_time_decides_the_steps(monkeypatch):
    monkeypatch.setattr(Trainer, "_seconds_of_a_step", lambda self, s: {16: 2.0, 64: 7.0}[s.context])
    # Three steps of 2 s, two of 7.
    assert begun(seconds=200, steps=0).progress.steps == 50


@pytest.mark.parametrize("until", [60, 150, 1e9])
def test_evaluations_are_part_of_the_time(monkeypatch, until):
    """The learning rate reaches 0 before the time is over, although evaluations take more of it than steps."""
    clock, scales = [0.0], []

    def takes(seconds: float) -> float:
        clock[0] += seconds
        return 1.0

    def step(self, s, starts, scale):
        scales.append(scale)
        return takes(2.0 if s.context == 16 else 7.0)

    monkeypatch.setattr(training, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Trainer, "_step", step)
    monkeypatch.setattr(Trainer, "_compile", lambda self, s: None)
    trainer, evaluate = made(), lambda params: takes(5.0)
    trainer.begin(seconds=200, until=until, evaluate=evaluate)
    trainer.train(until, evaluate, tqdm(disable=True))
    steps = trainer.progress.steps
    assert trainer.progress.completed and scales[-1] == pytest.approx(1 / steps / SHORT.decay)
    assert clock[0] <= until and trainer.progress.held_out[0] == [0, 1.0]
    # A step more, with its evaluations, would not have ended in time.
    assert steps == 50 if until == 1e9 else clock[0] + 7 + 5 > 0.98 * until


def test_timing_changes_nothing():
    trainer = begun(seconds=1e-9, steps=0)
    assert trainer.progress.steps == 1 and trainer.progress.step == 0
    assert [s.context for s in COMPILED] == [16, 64]
    for name, array in initial_params(trainer.config, SHORT.seed).items():
        np.testing.assert_array_equal(trainer.params[name], array)
    fresh = trainer.optimizer.init(trainer.params)
    jax.tree.map(np.testing.assert_array_equal, trainer.state, fresh)


def test_a_loss_that_is_not_finite_ends_it():
    trainer = begun()
    trainer.params["norm.weight"] = trainer.params["norm.weight"] * jnp.nan
    with pytest.raises(InputError, match="step 0"):
        trained(trainer)


def test_a_state_of_another_recipe(tmp_path):
    path = tmp_path / "state.safetensors"
    begun().save(path)
    for other in (dataclasses.replace(TINY, long_share=0.2), dataclasses.replace(TINY, needles=0.2)):
        with pytest.raises(InputError, match="other settings"):
            Trainer(other, STREAM).load(path)
    assert "needles" not in training._recipe_json(TINY)  # runs of versions without the setting go on
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(InputError, match="not a whole safetensors file"):
        Trainer(TINY, STREAM).load(path)


@pytest.fixture
def small_corpus(monkeypatch):
    paths = corpus.held_out_files()[:2]
    documents = [corpus.Document("tests", path, path.read_text(encoding="utf-8")[:20_000]) for path in paths]
    read = corpus.Corpus(documents, {"bytes": sum(len(document.text) for document in documents), "left_out_files": {}})
    monkeypatch.setattr(corpus, "read_corpus", lambda *args, **settings: read)
    monkeypatch.setattr(corpus, "held_out_by_name", lambda: {paths[0].stem: paths[:1]})


@pytest.fixture
def one_layer(monkeypatch):
    """The recipes of --smoke with models of one layer, which compile in half the time."""
    for module in (benchmark_model, embedded_model):
        monkeypatch.setattr(module, "SMOKE", dataclasses.replace(module.SMOKE, model=module.SMOKE.model | {"num_hidden_layers": 1}))


@pytest.mark.system
def test_the_command_leaves_a_checkpoint(run, fails, small_corpus, one_layer, tmp_path):
    directory = tmp_path / "model"
    command = ["train", "benchmark-model", "--output", directory, "--smoke", "--steps", 2, "--segment-minutes", 0]
    code, out, err = run(*command, "--json")
    first = json.loads(out)
    assert (code, err) == (0, "")
    assert (first["step"], first["steps"], first["completed"]) == (1, 2, False)
    assert first["held_out_bits_per_byte"] == {} and not (directory / "config.json").exists()
    code, out, _ = run(*command)
    assert code == 0
    assert "2 of 2" in out and "not completed" not in out and "at a context of 512" in out
    report = json.loads((directory / "training.json").read_text())
    assert report["completed"] and len(report["train_nats_per_token"]) == 2
    assert report["recipe"]["model"] == benchmark_model.SMOKE.model

    # What was trained, in bfloat16, and to the model's code the same function.
    trainer = Trainer(benchmark_model.SMOKE, np.load(directory / "smoke.npy"))
    trainer.load(directory / "state.safetensors")
    model = loading.load_model(directory, dtype="float32", progress=False)
    assert load_tokenizer(directory).bos_token_id == 0
    for name, weight in model.weights().items():
        np.testing.assert_array_equal(weight, trainer.params[name].astype(jnp.bfloat16).astype(jnp.float32))
    rows = jnp.asarray(np.asarray(trainer.stream[:129])[None].astype(np.int32))
    forward = jax.jit(lambda model, tokens: model(tokens, jnp.arange(128)[None], CausalAttention(model.config.num_kv_heads))[0])
    logits = forward(model, rows[:, :-1])
    expected = jnp.take_along_axis(jax.nn.log_softmax(logits), rows[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(log_probabilities(trainer.config, trainer.params, rows)[0], expected, atol=0.1)

    # Once completed, it stays.
    state = (directory / "state.safetensors").stat().st_mtime_ns
    code, out, _ = run(*command, "--json")
    assert json.loads(out)["completed"] and (directory / "state.safetensors").stat().st_mtime_ns == state
    command[command.index("--steps") + 1] = 3
    fails(command, "--steps 3", "a run of 2 steps")


@pytest.mark.system
def test_the_embedded_model_in_small(run, small_corpus, one_layer, tmp_path):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    code, out, err = run("train", "embedded", "--output", tmp_path / "model", "--smoke", "--steps", 2, "--json")
    report, record = json.loads(out), json.loads((tmp_path / "model" / "training.json").read_text())
    assert code == 0 and (report["step"], report["steps"], report["completed"]) == (2, 2, True), err
    assert len(record["train_nats_per_token"]) == 2 and [tokens for tokens, _ in record["held_out_while_training"]] == [0, 1024, 2048]
    assert record["settings"] == dataclasses.asdict(embedded_model.SMOKE.short) and record["held_out_bits_per_byte"]["all"]["bytes"] > 0
    assert (tmp_path / "model" / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    model = loading.load_model(tmp_path / "model", progress=False)
    assert model.config.num_layers == 1 and load_tokenizer(tmp_path / "model").bos_token_id == 0


def test_bad_input(fails, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    fails(["train", "benchmark-model"], "--output")
    fails(["train", "benchmark-model", "--output", file, "--smoke"], file)
    fails(["train", "benchmark-model", "--output", file / "below", "--smoke"], file / "below")
    fails(["train", "benchmark-model", "--output", tmp_path / "x", "--smoke", "--minutes", -1], "--minutes")
    fails(["train", "benchmark-model", "--output", tmp_path / "x", "--smoke", "--steps", "many"], "--steps")
    fails(["train", "benchmark-model", "--output", tmp_path / "x", "--smoke", "--needles", 1], "--needles")
    assert not (tmp_path / "x").exists()


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_it_needs_a_gpu(fails, tmp_path):
    fails(["train", "benchmark-model", "--output", tmp_path / "model"], "GPU", "--smoke")


def test_it_needs_the_extra(fails, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "optax", None)
    for name in ("training.benchmark_model", "training.embedded_model", "training.trainer", "training.pretraining"):
        monkeypatch.delitem(sys.modules, f"qspec_jax.{name}")
    monkeypatch.delattr("qspec_jax.training.benchmark_model")
    fails(["train", "benchmark-model", "--output", tmp_path / "model", "--smoke"], "needs optax: pip install optax tokenizers")


@pytest.mark.system
def test_the_command_line_does_without_it():
    """What trains is imported by the command that trains alone."""
    training = {"qspec_jax.training.pretraining", "qspec_jax.training.benchmark_model"}
    code = f"import sys, qspec_jax.cli.app; print(sorted({training} & set(sys.modules)))"
    root = str(Path(__file__).parents[1])
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": root}, check=True, timeout=120
    )
    assert out.stdout.strip() == "[]"


def test_needles_are_a_share_of_the_tokens():
    tokenizer, text = Tokenizer.from_file(str(benchmark_model.TOKENIZER)), np.ones(100_000, np.uint16)
    np.testing.assert_array_equal(benchmark_model.with_needles(text, tokenizer, 0.0), text)
    stream = benchmark_model.with_needles(text, tokenizer, 0.2)
    longest = 60_000  # tokens; the last document may go beyond the share
    assert 1 - len(text) / len(stream) >= 0.2 and len(stream) < len(text) / 0.8 + longest
    np.testing.assert_array_equal(stream[: len(text)], text)
    first, second = (int(at) for at in np.flatnonzero(stream == 0)[:2])
    assert tokenizer.decode(stream[first + 1 : second].tolist()) == needle.training_text("python", 0)


def test_a_full_run_does_not_read_the_small_corpus(tmp_path, monkeypatch):
    tokenizer = Tokenizer.from_file(str(benchmark_model.TOKENIZER))
    document = lambda text: corpus.Document("a", Path("a.py"), text)
    read = lambda *args, max_bytes=None: corpus.Corpus([document("x = 1\n" * (1 if max_bytes else 50))], {"small": bool(max_bytes)})
    monkeypatch.setattr(corpus, "read_corpus", read)
    for _ in range(2):
        (small, about), (full, about_full) = (benchmark_model._read_tokens(tmp_path, tokenizer, smoke=smoke) for smoke in (True, False))
        assert len(full) > 20 * len(small) and (about, about_full) == ({"small": True}, {"small": False})
    (tmp_path / "corpus.npy").write_bytes(b"\x93NUMPY")
    with pytest.raises(InputError, match="not a whole file of tokens"):
        benchmark_model._read_tokens(tmp_path, tokenizer, smoke=False)


def test_what_cannot_be_saved_leaves_nothing(tmp_path, monkeypatch):
    def fail(*args, **settings):
        Path(args[1]).write_bytes(b"half")
        raise OSError("no space left")

    path = tmp_path / "state.safetensors"
    path.write_bytes(b"before")
    monkeypatch.setattr(training, "save_file", fail)
    with pytest.raises(InputError, match="no space left"), benchmark_model._write_errors(tmp_path):
        begun().save(path)
    assert [file.name for file in tmp_path.iterdir()] == [path.name] and path.read_bytes() == b"before"


def test_another_model_is_not_overwritten(tmp_path):
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(InputError, match=f"--output {tmp_path}: holds a checkpoint"):
        benchmark_model.run(tmp_path, minutes=0, segment_minutes=1, steps=1, smoke=True, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"] and (tmp_path / "config.json").read_text() == "{}"


SHARING = """
import json, jax
import test_train as t
for devices in (jax.devices()[:1], jax.devices()):
    trainer = t.Trainer(t.TINY.across(2), t.STREAM, devices)
    trainer.begin(seconds=0, steps=3)
    nats = t.trained(trainer).progress.train_nats
    sums = ["all-reduce" in step.as_text() for step in trainer.compiled.values()]
    print(json.dumps([trainer.report(".").devices, trainer.tokens_seen, sums, nats]))
"""


@pytest.mark.system
def test_devices_share_the_rows_of_a_step():
    environment = simulated_devices.environment(2) | sharing.environment()
    command = [sys.executable, "-c", SHARING]
    done = subprocess.run(command, cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (*one, alone), (*two, shared) = map(json.loads, done.stdout.splitlines())
    assert one == [1, 2 * 4 * 16 + 2 * 64, [False, False]]
    assert two == [2, 2 * 4 * 16 + 2 * 64, [True, True]]
    # The losses after the first step depend on the gradient over all rows.
    np.testing.assert_allclose(shared, alone, rtol=1e-4)
