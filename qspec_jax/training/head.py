"""`qspec train head`: an EAGLE-3 head for a model, trained on text with the model's own hidden states (arXiv 2503.01840).

The model, which stays as it is, reads rows of text in a plain causal pass. At each position the head is given the features there and the
next token, and is trained on the distribution that the model has for the token after that one. Then it makes the further steps that it
makes when it drafts, from what it fed back, along the real text; each of them has a loss of its own. It attends to a window of recent
pairs, which its config.json states, so that it drafts alike at any context. Needs the extra `train`.
"""

import dataclasses
import functools
import hashlib
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int
from rich.console import RenderableType
from rich.table import Table
from safetensors import SafetensorError
from safetensors.numpy import save_file

from qspec_jax.checkpoints.eagle3 import STATE, shapes_of_head, specforge_names
from qspec_jax.checkpoints.eagle3_config import read_head_config, residual_taps
from qspec_jax.errors import InputError, writing
from qspec_jax.evaluate.texts import token_stream
from qspec_jax.files import check_writable, real, whole_file, whole_folder, write_json
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.eagle3 import Eagle3Config, Eagle3Head
from qspec_jax.models.llama import Llama
from qspec_jax.progress import progress_bar, working
from qspec_jax.reports import Run, this_run
from qspec_jax.training import corpus
from qspec_jax.training.pretraining import INITIAL_STD, Params, Settings, make_optimizer
from qspec_jax.training.trainer import Recipe, Trainer
from qspec_jax.training.unrolled import read_by, unrolled

WIDTH, LEARNING_RATE = 256, 5e-3  # of a model, and of its head's matrices; a step of Muon changes spectral norms by as much at any width
ADAM_SHARE = 0.1  # of that rate, for the head's vocabulary, which begins as the model's, and for norms
STEP_DECAY = 0.8  # from the weight of an unrolled step's loss to that of the next
HELD_OUT_SHARE = 0.05  # of given files
RECORD = "training.json"
_OWN = "embedding", "target_ids"  # weights that are not trained


@dataclasses.dataclass(frozen=True)
class HeadRecipe(Recipe):
    """What is trained, and how.

    Attributes:
        unroll: the number of steps of the head from each position.
        window: the number of pairs that a pair attends to, itself included.
        made_of: a digest of the model and of the tokens.
    """

    unroll: int = 3
    window: int = 512
    made_of: str = ""


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """How a step of the head does on held-out text.

    Attributes:
        nats: cross-entropy with the model's distribution, mean over tokens.
        agreement: share of the tokens where the head's most probable token is the model's.
        overlap: mean sum over tokens of the lesser of the two probabilities: the chance that a draft is accepted at temperature 1.
    """

    nats: float
    agreement: float
    overlap: float


@dataclasses.dataclass(frozen=True)
class HeadReport(Run):
    """How far a training run of a head has come.

    Attributes:
        directory: of the run.
        parameters: of the head, without the model's embedding.
        completed: whether all steps are taken, and the directory is a checkpoint.
        step: steps taken.
        steps: of the whole run.
        tokens_seen: in all steps so far.
        train_seconds: of the steps alone.
        tokens_per_second: in training steps alone.
        nats: weighted mean loss of the last 20 steps, on training text.
        held_out_while_training: tokens seen and weighted mean loss at every evaluation.
        held_out: figures of each unrolled step, the first one first; empty until training is completed.
    """

    directory: str
    parameters: int
    completed: bool
    step: int
    steps: int
    tokens_seen: int
    train_seconds: float
    tokens_per_second: float
    nats: float
    held_out_while_training: list[list[float]]
    held_out: list[StepFigures]

    def table(self) -> RenderableType:
        """The figures, one to a line."""
        grid = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
        state = "completed" if self.completed else "not completed: run it again to go on"
        grid.add_row("head", f"{self.directory}: {self.parameters / 1e6:,.1f} M parameters, {state}")
        grid.add_row("steps", f"{self.step:,} of {self.steps:,}, {self.tokens_seen / 1e6:,.1f} M tokens")
        grid.add_row("training", f"{self.train_seconds:,.0f} s, {self.tokens_per_second:,.0f} tokens/s on {self.device}")
        grid.add_row("training text", f"{self.nats:.4f} nats (last 20 steps)")
        for tokens, nats in self.held_out_while_training:
            grid.add_row(f"after {tokens / 1e6:,.2f} M tokens", f"{nats:.4f} nats on held-out text")
        for i, step in enumerate(self.held_out, 1):
            grid.add_row(f"step {i}", f"{step.nats:.4f} nats, agreement {step.agreement:.3f}, overlap {step.overlap:.3f}")
        return grid


# The head as it is trained


def made_head(settings: Eagle3Config, params: Params, target: Llama, ids: Int[Array, "draft"]) -> Eagle3Head:
    """The head with these weights, in the target's dtype, and with its embedding. ids: the target's id of each of the head's tokens."""

    def make(path: str, shape: tuple[int, ...]) -> Array:
        return ids if path == "target_ids" else params[path].astype(target.dtype)

    return Eagle3Head(settings, make, embedding=target.embedding.get_value())


def step_figures(
    settings: Eagle3Config, recipe: HeadRecipe, params: Params, target: Llama, ids: Array, tokens: Int[Array, "B T"]
) -> Float[Array, "steps 3"]:
    """The fields of `StepFigures` of each unrolled step, over all positions from which all steps can be made."""
    wanted, features = read_by(target, tokens, settings.taps)
    A = tokens.shape[1] - recipe.unroll
    head, rows = made_head(settings, params, target, ids), []
    for i, logits in enumerate(unrolled(head, features[:, :A], tokens, steps=recipe.unroll, window=recipe.window), 1):
        of_target = wanted[:, i : i + A]
        log_p = of_target[..., ids] - jax.nn.logsumexp(of_target, -1, keepdims=True)
        p, log_q = jnp.exp(log_p), jax.nn.log_softmax(logits)
        agrees = ids[logits.argmax(-1)] == of_target.argmax(-1)
        rows.append(jnp.stack([-(p * log_q).sum(-1).mean(), agrees.mean(), jnp.minimum(p, jnp.exp(log_q)).sum(-1).mean()]))
    return jnp.stack(rows)


def mean_loss(nats: Float[Array, "steps"]) -> Float[Array, ""]:
    """The mean of the steps' losses, by which the head is trained, weighted by `STEP_DECAY`."""
    weights = STEP_DECAY ** jnp.arange(len(nats))
    return (weights * nats).sum() / weights.sum()


class HeadTrainer(Trainer):
    """A training run of a head.

    Args:
        recipe: what is trained.
        stream: the tokens that it is trained on.
        target: the model.
        ids: the target's id of each token that the head predicts.
    """

    recipe: HeadRecipe

    def __init__(self, recipe: HeadRecipe, stream: np.ndarray, target: Llama, ids: np.ndarray):
        self.target, self.ids = target, jnp.asarray(ids, jnp.int32)
        self.settings = read_head_config(recipe.model, target.checkpoint_config)
        super().__init__(recipe, stream)
        self.optimizer = make_optimizer(recipe.short, others=("fc.weight",))
        self.figures = jax.jit(functools.partial(step_figures, self.settings, recipe))

    def _config(self) -> LlamaConfig:
        return self.settings.layers

    def _shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        shapes = shapes_of_head(self.settings)
        return {path: jax.ShapeDtypeStruct(shape, jnp.float32) for path, shape in shapes.items() if path not in _OWN}

    def _initial(self) -> Params:
        """Matrices are normal, norms 1. Keys begin as queries, so that a pair first attends to itself, values as what the norms leave of
        the token's embedding, which attention adds to the hidden states. The last norm and the head's vocabulary begin as the target's."""
        rng, target, c = np.random.default_rng(self.recipe.short.seed), self.target, self.config
        params = {}
        for path, shape in ((path, outline.shape) for path, outline in self._shapes().items()):
            params[path] = np.ones(shape) if len(shape) == 1 else rng.normal(0, shape[1] ** -0.5, shape)
        for path in ("layers.0.down_proj.weight", "head"):
            params[path] = INITIAL_STD / 2 * rng.normal(size=params[path].shape)
        D, H, group = c.hidden_size, c.head_dim, c.num_heads // c.num_kv_heads
        keys = params["layers.0.k_proj.weight"].reshape(c.num_kv_heads, 1, H, 2 * D)
        params["layers.0.q_proj.weight"] = np.broadcast_to(keys, (c.num_kv_heads, group, H, 2 * D)).reshape(-1, 2 * D)
        values = np.eye(c.num_kv_heads * H, 2 * D)
        values[:, D:] = 0
        by_head = np.broadcast_to(values[:, :D].reshape(c.num_kv_heads, 1, H, D) / group, (c.num_kv_heads, group, H, D))
        params |= {"layers.0.v_proj.weight": values, "layers.0.o_proj.weight": by_head.reshape(-1, D).T}
        params = {path: jnp.asarray(array, jnp.float32) for path, array in params.items()}
        params["norm.weight"] = target.norm.weight.get_value().astype(jnp.float32) + target.config.norm_offset
        if isinstance(vocabulary := (target.embedding if target.head is None else target.head).get_value(), jax.Array):
            params["head"] = vocabulary[self.ids].astype(jnp.float32)
        return params

    def _made(self, s: Settings, args: tuple) -> Callable:
        settings, recipe, optimizer = self.settings, self.recipe, self.optimizer

        def loss(params: Params, target: Llama, ids: Array, tokens: Array) -> Array:
            return mean_loss(step_figures(settings, recipe, params, target, ids, tokens)[:, 0])

        @functools.partial(jax.jit, donate_argnums=(2, 3))
        def step(target, ids, params, state, stream, starts, scale):
            tokens = stream[starts[:, None] + jnp.arange(s.context)].astype(jnp.int32)
            nats, gradient = jax.value_and_grad(loss)(params, target, ids, tokens)
            updates, state = optimizer.update(gradient, state, params)
            return jax.tree.map(lambda p, u: p + scale * u, params, updates), state, nats

        before = self.target, self.ids
        return functools.partial(step.lower(*before, *args).compile(), *before)

    def evaluated(self, params: Params, rows: Sequence[np.ndarray]) -> list[StepFigures]:
        """Figures of each step over rows of held-out text, all of one length."""
        found = [np.asarray(self.figures(params, self.target, self.ids, jnp.asarray(row[None], jnp.int32))) for row in rows]
        return [StepFigures(*map(float, step)) for step in np.mean(found, 0)]


# A run


def run(
    directory: Path,
    target: Llama,
    tokenizer: Any,
    texts: Sequence[str] = (),
    *,
    steps: int = 2000,
    batch: int = 8,
    length: int = 2048,
    window: int = 512,
    unroll: int = 3,
    learning_rate: float | None = None,
    layers: Sequence[int] | None = None,
    draft_vocab: int | None = None,
    seed: int = 0,
    segment_minutes: float = 0.0,
    progress: bool | None = None,
) -> HeadReport:
    """Trains a head on one device, or goes on with a run that was interrupted. The directory becomes a checkpoint when all steps are taken.

    Args:
        directory: of the run. Until it is completed, it holds the state, saved at each evaluation and at the end of a segment.
        target: the model that the head will draft for.
        tokenizer: of the model.
        texts: to train on, except for the end, on which the head is evaluated; none: the demo's corpus and its held-out files.
        steps: of the whole run.
        batch: rows of a step.
        length: tokens of a row.
        window: the number of pairs that a pair attends to, itself included.
        unroll: the number of steps of the head from each position.
        learning_rate: of the matrices; None: by the width of the model.
        layers: whose inputs the head reads, in order, see `Eagle3Config`; None: 2, half of all, and the last but two.
        draft_vocab: the number of tokens that the head predicts, those that are frequent in the texts; None: the model's whole vocabulary.
        seed: of the initial weights and of the order of the text.
        segment_minutes: time of this call until the state is saved and it returns; 0: until the run is completed.
        progress: see `progress_bar`.

    Raises:
        InputError: for settings that are impossible, too little text, and a directory that cannot be written or holds something else.
    """
    until = time.monotonic() + 60 * segment_minutes if segment_minutes else float("inf")
    directory = real(Path(directory))
    config = target.checkpoint_config
    check_directory(directory)
    if length > config.max_length:
        raise InputError(f"--length {length} should be at most the model's {config.max_length} positions")
    if length < 2 * unroll + 2:
        raise InputError(f"--length {length} should be at least {2 * unroll + 2} for --unroll {unroll}")
    if window > length:
        raise InputError(f"--window {window} should be at most --length {length}: the head would never read a whole window")
    if draft_vocab is not None and draft_vocab > config.vocab_size:
        raise InputError(f"--draft-vocab {draft_vocab} should be at most the model's {config.vocab_size} tokens")
    taps = _taps(layers, config.num_layers)
    with writing(f"--output {directory}"):
        directory.mkdir(parents=True, exist_ok=True)
        check_writable(directory / STATE)  # before the minutes of training, and not after
    held_out_texts = None if texts else [path.read_text(encoding="utf-8") for path in corpus.held_out_files()]
    stream, held_out = _tokens(tokenizer, texts, held_out_texts, wanted=steps * batch * length + 2 * length, length=length, seed=seed)
    ids = _draft_ids(stream, config.vocab_size, draft_vocab)
    rate = LEARNING_RATE * (WIDTH / config.hidden_size) ** 0.5 if learning_rate is None else learning_rate
    s = Settings(length, batch, muon_learning_rate=rate, adam_learning_rate=ADAM_SHARE * rate, evaluations=10, held_out_rows=16, seed=seed)
    raw = head_config(config, taps=taps, draft_vocab=len(ids), window=window)
    made_of = _digest(stream, np.asarray(target.embedding.get_value()), np.asarray(target.norm.weight.get_value()))
    recipe = HeadRecipe(raw, s, s, long_share=0, unroll=unroll, window=window, made_of=made_of)
    trainer = HeadTrainer(recipe, stream, target, ids)
    state = directory / STATE
    if state.exists():
        trainer.load(state)
        if trainer.progress.steps != steps:
            raise InputError(f"--steps {steps}: {directory} holds a run of {trainer.progress.steps} steps; give another --output")
    else:
        trainer.begin(seconds=0, steps=steps)
    starts = np.unique(np.linspace(0, len(held_out) - length, s.held_out_rows).astype(int))
    rows = [held_out[start : start + length] for start in starts]

    def save() -> None:
        with writing(f"--output {directory}", SafetensorError):
            trainer.save(state)

    def evaluate(params: Params) -> float:
        return float(mean_loss(jnp.asarray([step.nats for step in trainer.evaluated(params, rows)])))

    done = trainer.progress
    if not done.completed:
        with progress_bar(progress=progress, total=done.steps, unit="step") as bar:
            trainer.train(until, evaluate, bar, evaluated=save)
        if not done.completed:
            save()
    report = HeadReport(
        **this_run(),
        **trainer.figures_so_far(),
        directory=str(directory),
        nats=trainer.recent_nats,
        held_out=trainer.evaluated(trainer.params, rows) if done.completed else [],
    )
    if done.completed:
        record = dataclasses.asdict(report) | {
            "settings": dataclasses.asdict(s) | {"window": window, "unroll": unroll, "step_decay": STEP_DECAY},
            "versions": report.versions | {"optax": optax.__version__},
            "corpus": {"texts": "given files" if texts else "the demo's corpus", "tokens": len(stream), "held_out_tokens": len(held_out)},
            "held_out_rows": len(rows),
            "covered_by_draft_vocab": round(float(np.isin(held_out, ids).mean()), 4),
        }
        del record["directory"], record["earlier"]
        with writing(f"--output {directory}", SafetensorError), whole_folder(directory, lambda: check_directory(directory)) as folder:
            save_head(trainer.params, trainer.settings, raw, ids, folder)
            write_json(folder / RECORD, record)
    return report


def check_directory(directory: Path) -> None:
    """Raises InputError unless the directory is missing, empty, or of a run that is not completed."""
    if directory.exists() and not directory.is_dir():
        raise InputError(f"--output {directory}: is no directory")
    if directory.is_dir() and (held := {path.name for path in directory.iterdir()} - {STATE}):
        completed = ", whose training is completed" if RECORD in held else ""
        what = f"a checkpoint{completed}" if "config.json" in held else sorted(held)[0]
        raise InputError(f"--output {directory}: holds {what}; give another directory, or an empty one")


def _taps(layers: Sequence[int] | None, number: int) -> tuple[int, ...]:
    """The layers that the head reads, checked against the model's number of layers."""
    try:
        return residual_taps({} if layers is None else {"eagle_aux_hidden_state_layer_ids": list(layers)}, number)
    except InputError:
        given = "is missing" if layers is None else ",".join(map(str, layers))
        raise InputError(
            f"--layers {given}: it should name layers of the model, which has {number}, in order, as numbers from 0 to {number}"
        ) from None


def _tokens(
    tokenizer: Any, texts: Sequence[str], held_out_texts: Sequence[str] | None, *, wanted: int, length: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Tokens to train on, and held-out ones; of the demo's corpus no more than about `wanted`, of files in random order.

    Raises InputError for texts that are too short for a row of `length` tokens.
    """
    if held_out_texts is None:
        stream = np.asarray(token_stream(tokenizer, texts), np.int32)
        kept = max(length, round(HELD_OUT_SHARE * len(stream)))
        if len(stream) < kept + 2 * length:
            raise InputError(f"--file: the texts have {len(stream)} tokens, should have {3 * length} or more for --length {length}")
        return stream[:-kept], stream[-kept:]
    with working("reading the corpus"):
        documents = corpus.read_corpus().documents
    random.Random(seed).shuffle(documents)
    parts, size = [], 0
    for document in documents:
        if size < wanted:
            parts.append(np.asarray(token_stream(tokenizer, [document.text]), np.int32))
            size += len(parts[-1])
    held_out = np.asarray(token_stream(tokenizer, held_out_texts), np.int32)
    if min(size, len(held_out)) < 2 * length:
        raise InputError(f"the corpus has {min(size, len(held_out))} tokens, too few for --length {length}; give texts with --file")
    return np.concatenate(parts), held_out


def _draft_ids(stream: np.ndarray, vocab_size: int, number: int | None) -> np.ndarray:
    """The ids of the most frequent tokens, in order."""
    counts = np.bincount(stream, minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[: number or vocab_size])


def _digest(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).view(np.uint8))
    return digest.hexdigest()


# What is written


def head_config(target: LlamaConfig, *, taps: Sequence[int], draft_vocab: int, window: int) -> dict[str, Any]:
    """The config.json of a head with a layer of the target's sizes.

    The layers that the head reads are named in both ways that engines read: at the top level the residual streams, see `Eagle3Config`,
    and in `eagle_config` the layers that have these outputs.
    """
    of_outputs = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in taps]} if min(taps) else {}  # no layer has the embeddings
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": target.vocab_size,
        "draft_vocab_size": draft_vocab,
        "hidden_size": target.hidden_size,
        "target_hidden_size": target.hidden_size,
        "intermediate_size": target.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "max_position_embeddings": target.max_length,
        "layer_types": ["sliding_attention"],
        "sliding_window": window,
        "use_sliding_window": True,
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": list(taps),
        "eagle_config": {"use_aux_hidden_state": True} | of_outputs,
        "norm_before_residual": False,
        "norm_output": False,
        "torch_dtype": "bfloat16",
    }


def save_head(params: Params, settings: Eagle3Config, raw: dict[str, Any], ids: np.ndarray, directory: Path) -> None:
    """Writes config.json and model.safetensors (bfloat16) in SpecForge's layout, without the target's embedding.

    Args:
        params: the weights by their paths.
        settings: of the head.
        raw: its config.json.
        ids: the target's id of each of the head's tokens, in order.
        directory: to write to.
    """
    names = specforge_names(settings)
    tensors = {names[path]: np.asarray(array.astype(jnp.bfloat16)) for path, array in params.items()}
    if not settings.has_whole_vocabulary:
        tensors["d2t"] = ids.astype(np.int64) - np.arange(len(ids))
        tensors["t2d"] = np.isin(np.arange(settings.layers.vocab_size), ids)
    with whole_file(directory / "model.safetensors") as unfinished:
        save_file(tensors, unfinished, metadata={"format": "pt"})
    write_json(directory / "config.json", raw)
