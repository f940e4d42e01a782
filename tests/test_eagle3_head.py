"""EAGLE-3 heads: logits and drafts of each layout, what is shared with the target, and mistakes.

The heads in tests/goldens/heads are of random weights, written by speculators 0.9.0; eagle3-specforge has such tensors by the names of
SpecForge. golden.npz has the residual streams of eagle3-target, by transformers 5.24.0, and for each head the results of a plain float32
forward pass in PyTorch, which agrees with that of speculators to 1e-5: logits of a first pass over two prompts, and of a greedy chain of
five drafts.
"""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from read_checkpoints import edit_json, refused
from safetensors.numpy import load_file, save_file

from pallas_kernels.formats.views import FULL_PRECISION
from qspec_jax.bench.architectures import architecture, random_model
from qspec_jax.caches.compact import CompactCache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.checkpoints.eagle3 import load_head
from qspec_jax.checkpoints.eagle3_config import residual_taps
from qspec_jax.checkpoints.huggingface import load_config
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.random_head import random_head
from qspec_jax.errors import InputError
from qspec_jax.models.llama import Llama
from qspec_jax.quantization.outline import is_outline, outline

HEADS = Path(__file__).parent / "goldens" / "heads"
SPECFORGE, SPECULATORS, NORMED, WHOLE = "eagle3-specforge", "eagle3-speculators", "eagle31-norm-output", "eagle3-qwen3-full-vocabulary"
NAMES = SPECFORGE, SPECULATORS, NORMED, WHOLE
DRAFTS = 5


@pytest.fixture(scope="module")
def target() -> Llama:
    return load_model(HEADS / "eagle3-target", dtype="float32")


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    with np.load(HEADS / "golden.npz") as arrays:
        return dict(arrays)


@pytest.fixture
def copied(tmp_path):
    """A copy of a head, which a test changes."""
    return lambda name: Path(shutil.copytree(HEADS / name, tmp_path / name))


step = jax.jit(lambda head, *args: head(*args, view=FULL_PRECISION))


def first_pass(head, golden, dtype=jnp.float32, begin=0):
    """A pass over the prompts from this position on, each token's features with the token after it."""
    tokens = jnp.concatenate([golden["input_ids"][:, 1:], golden["next_ids"][:, None]], 1)
    batch, n = tokens.shape
    cache = CacheConfig("full").empty(head.config, batch=batch, capacity=n + DRAFTS, num_speculative_tokens=n, dtype=dtype)
    positions = jnp.broadcast_to(jnp.arange(begin, n), (batch, n - begin))
    return step(head, head.fused(golden["features"][:, begin:]), tokens[:, begin:], positions, cache)


def chain(head, golden):
    """Logits of the last position of the first pass and of each step after it, and the drafts by the target's ids."""
    first, fed_back, cache = first_pass(head, golden)
    batch, n = first.shape[:2]
    logits, drafts = [first[:, -1]], []
    for i in range(DRAFTS):
        drafts.append(head.in_targets_vocabulary(logits[-1]).argmax(-1))
        if i < DRAFTS - 1:
            more, fed_back, cache = step(head, fed_back[:, -1:], drafts[-1][:, None], jnp.full((batch, 1), n + i), cache)
            logits.append(more[:, 0])
    return jnp.stack(logits, 1), jnp.stack(drafts, 1)


def close(found, wanted, share=1e-4) -> bool:
    """Whether two arrays differ by no more than this share of the range of the wanted one."""
    return float(jnp.abs(found - wanted).max()) <= share * float(np.ptp(wanted))


@pytest.mark.parametrize("name", NAMES)
def test_logits_and_drafts_are_the_goldens(name, target, golden):
    head = load_head(HEADS / name, target)
    assert head.taps == tuple(golden["taps"]) and head.dtype == jnp.float32
    first, (logits, drafts) = first_pass(head, golden)[0], chain(head, golden)
    assert first.dtype == logits.dtype == jnp.float32
    assert close(first, golden[f"{name}.first_pass_logits"])
    assert close(logits, golden[f"{name}.chain_logits"])
    assert np.array_equal(drafts, golden[f"{name}.chain_ids"])


def test_in_bfloat16_the_head_is_nearly_the_same(target, golden):
    head = load_head(HEADS / NORMED, load_model(HEADS / "eagle3-target"))
    assert head.dtype == head.fused(golden["features"]).dtype == jnp.bfloat16
    first, fed_back, _ = first_pass(head, golden, jnp.bfloat16)
    assert fed_back.dtype == jnp.bfloat16
    assert first.dtype == jnp.float32 and close(first, golden[f"{NORMED}.first_pass_logits"], 0.05)
    assert load_head(HEADS / NORMED, target, dtype="bfloat16").embedding.get_value().dtype == jnp.bfloat16


def test_logits_in_the_targets_vocabulary(target):
    head, logits = load_head(HEADS / SPECFORGE, target), jnp.arange(320.0).reshape(1, 2, 160)
    ids = np.arange(160) + load_file(HEADS / SPECFORGE / "model.safetensors")["d2t"]
    found = np.asarray(head.in_targets_vocabulary(logits))
    assert found.shape == (1, 2, 320) and np.array_equal(found[..., ids], logits)
    assert np.isneginf(np.delete(found, ids, -1)).all()
    whole = load_head(HEADS / WHOLE, target)
    assert whole.target_ids is None and whole.in_targets_vocabulary(found) is found


def test_ids_that_say_nothing(target, copied):
    """Offsets of 0: of a part of the vocabulary its first tokens, of the whole all of it."""
    directory = copied(SPECFORGE)
    ids(np.zeros_like)(directory)
    assert np.array_equal(load_head(directory, target).target_ids.get_value(), np.arange(160))
    directory = copied(WHOLE)
    change_tensors(directory, lambda tensors: tensors.update(d2t=np.zeros(320, np.int64)))
    assert load_head(directory, target).target_ids is None


def test_over_a_compact_cache(target, golden):
    """Which holds the prompt's keys and values, the step after the prompt is the same."""
    head = load_head(HEADS / NORMED, target)
    batch, n = golden["input_ids"].shape
    first, fed_back, cache = first_pass(head, golden)
    rows = jnp.full(batch, n)
    layer = CompactCache.make_layer(*cache.tokens(0, jnp.arange(n)[None, None]), kind="full", appended=1)
    compact = CompactCache.of([layer], kept=rows // 4, ring=rows - rows // 4, taken=rows)
    drafts = head.in_targets_vocabulary(first[:, -1:]).argmax(-1)
    logits = step(head, fed_back[:, -1:], drafts, rows[:, None], compact)[0]
    assert close(logits[:, 0], golden[f"{NORMED}.chain_logits"][:, 1])


def test_what_a_head_lacks_or_has_alike_is_the_targets_array(target, copied):
    for name in (SPECFORGE, SPECULATORS):  # without an embedding, and with a copy of the target's
        head = load_head(HEADS / name, target)
        assert head.embedding.get_value() is target.embedding.get_value()
        assert head.head.get_value().shape == (160, 64)
    directory = copied(WHOLE)
    change_tensors(directory, lambda tensors: tensors.pop("lm_head.weight"))
    head = load_head(directory, target)
    assert head.head.get_value() is target.head.get_value()
    change_tensors(directory, lambda tensors: tensors.update({"embed_tokens.weight": 2 * tensors["embed_tokens.weight"]}))
    head = load_head(directory, target)
    assert np.array_equal(head.embedding.get_value(), 2 * target.embedding.get_value())


def test_a_tied_targets_head_is_its_embedding(copied):
    directory, tied = copied(WHOLE), copied("eagle3-target")
    change_tensors(directory, lambda tensors: tensors.pop("lm_head.weight"))
    edit_json(tied / "config.json", lambda config: config.update(tie_word_embeddings=True))
    change_tensors(tied, lambda tensors: tensors.pop("lm_head.weight"))
    target = load_model(tied, dtype="float32")
    assert load_head(directory, target).head.get_value() is target.embedding.get_value()


def test_older_names_and_switches(target, golden, copied):
    """The norms of taps by their first names and switch, the switches of ModelOpt, and buffers and masks, which are not read."""
    directory = copied(NORMED)
    older = {f"fc_norm.{i}.weight": f"aux_norm_{name}.weight" for i, name in enumerate(("low", "mid", "high"))}

    def rename(tensors):
        found = {older.get(name, name).replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
        tensors.clear()
        tensors |= found | {"midlayer.self_attn.rotary_emb.inv_freq": np.ones(16, np.float32)}

    def switch(config):
        config |= {"fc_norm": None, "use_aux_norm": True, "eagle_aux_hidden_state_layer_ids": None}
        nested = {"norm_output": config.pop("norm_output"), "norm_before_residual": config.pop("norm_before_residual")}
        config["eagle_config"] = nested | {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}

    change_tensors(directory, rename)
    edit_json(directory / "config.json", switch)
    assert close(first_pass(load_head(directory, target), golden)[0], golden[f"{NORMED}.first_pass_logits"])


def test_the_residual_stream_without_a_switch(target, copied):
    """A head of speculators adds to the norm of the hidden states if config.json does not say, any other to the hidden states."""
    directory = copied(SPECULATORS)
    edit_json(directory / "config.json", lambda config: config.pop("norm_before_residual"))
    assert load_head(directory, target).settings.norm_before_residual
    assert not load_head(HEADS / SPECFORGE, target).settings.norm_before_residual


def test_further_layers_are_plain(target, golden, copied):
    """A second layer that adds nothing changes nothing."""
    directory = copied(SPECULATORS)

    def deepen(tensors):
        first = {name: tensor for name, tensor in tensors.items() if name.startswith("layers.0.") and "hidden_norm" not in name}
        second = {name.replace("layers.0.", "layers.1."): tensor for name, tensor in first.items()}
        for part in ("q", "k", "v"):
            second[f"layers.1.self_attn.{part}_proj.weight"] = second[f"layers.1.self_attn.{part}_proj.weight"][:, :64]
        for output in ("self_attn.o_proj", "mlp.down_proj"):
            second[f"layers.1.{output}.weight"] = np.zeros_like(second[f"layers.1.{output}.weight"])
        tensors |= {name: np.ascontiguousarray(tensor) for name, tensor in second.items()}

    change_tensors(directory, deepen)
    edit_json(directory / "config.json", lambda config: config["transformer_layer_config"].update(num_hidden_layers=2))
    head = load_head(directory, target)
    assert head.config.num_layers == 2
    assert close(first_pass(head, golden)[0], golden[f"{SPECULATORS}.first_pass_logits"])


def test_a_window_of_a_llama_layer(target, golden, copied):
    """The last tokens of the prompts in a window of 12 are predicted as after the last 12 pairs alone."""
    directory = copied(SPECULATORS)
    layers(layer_types=["sliding_attention"], sliding_window=12, use_sliding_window=True)(directory)
    windowed, full = load_head(directory, target), load_head(HEADS / SPECULATORS, target)
    assert (windowed.config.windowed_layers, windowed.config.sliding_window) == ((0,), 12)
    whole = first_pass(windowed, golden)[0][:, -1]
    assert close(whole, first_pass(full, golden, begin=28)[0][:, -1])
    assert not close(whole, golden[f"{SPECULATORS}.first_pass_logits"][:, -1])
    layers(sliding_window=4096)(directory)
    assert load_head(directory, target).config.sliding_window == 4096  # longer than its positions
    layers(layer_types=["full_attention"])(directory)
    assert load_head(directory, target).config == full.config


def test_own_sizes(target, copied):
    """A head may have another hidden size than the target's, which its features have; then it has its own embedding."""
    directory = copied(SPECULATORS)
    edit_json(directory / "config.json", lambda config: config.update(target_hidden_size=64))
    edit_json(directory / "config.json", lambda config: config["transformer_layer_config"].update(hidden_size=32))
    halves = lambda tensor: np.ascontiguousarray(tensor[:, :32])

    def narrow(tensors):
        for name, tensor in tensors.items():
            if name in ("embed_tokens.weight", "lm_head.weight") or name.endswith(("gate_proj.weight", "up_proj.weight")):
                tensors[name] = halves(tensor)
            elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                tensors[name] = np.ascontiguousarray(tensor[:, :64])
            elif name == "fc.weight" or name.endswith(("o_proj.weight", "down_proj.weight", "norm.weight")):
                tensors[name] = np.ascontiguousarray(tensor[:32])

    change_tensors(directory, narrow)
    head = load_head(directory, target)
    assert head.fused(jnp.ones((1, 2, 192))).shape == (1, 2, 32) and head.embedding.get_value().shape == (320, 32)
    change_tensors(directory, lambda tensors: tensors.pop("embed_tokens.weight"))
    refused(directory, "missing embed_tokens.weight", read=lambda directory: load_head(directory, target))


def test_of_an_outline_the_head_is_one(copied):
    """By config.json alone."""
    directory = copied(SPECFORGE)
    (directory / "model.safetensors").unlink()
    target = outline(load_config(HEADS / "eagle3-target"))
    head = load_head(directory, target)
    assert head.embedding.get_value() == target.embedding.get_value()
    assert head.target_ids.get_value() == jax.ShapeDtypeStruct((160,), jnp.int32)
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(head))


# The target's layers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "layers", "taps"),
    [
        ({}, 32, (2, 16, 29)),
        ({"eagle_aux_hidden_state_layer_ids": None, "eagle_config": None}, 36, (2, 18, 33)),
        ({"eagle_aux_hidden_state_layer_ids": [], "eagle_config": {"eagle_aux_hidden_state_layer_ids": []}}, 7, (2, 3, 4)),
        ({"eagle_aux_hidden_state_layer_ids": [0, 9, 32]}, 32, (0, 9, 32)),
        ({"aux_hidden_state_layer_ids": [3, 8]}, 32, (3, 8)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}}, 32, (2, 16, 29)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [31]}}, 32, (32,)),
        ({"aux_hidden_state_layer_ids": [2, 5], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4]}}, 32, (2, 5)),
    ],
)
def test_conventions_of_layer_numbers(raw, layers, taps):
    assert residual_taps(raw, layers) == taps


@pytest.mark.parametrize(
    ("raw", "layers", "named"),
    [
        ({}, 6, ("eagle_aux_hidden_state_layer_ids is missing", "6 layers", "needs 7")),
        ({"eagle_aux_hidden_state_layer_ids": [2, 9, 33]}, 32, ("[2, 9, 33]", "from 0 to 32")),
        ({"eagle_aux_hidden_state_layer_ids": [9, 2, 30]}, 32, ("[9, 2, 30]", "in order")),
        ({"aux_hidden_state_layer_ids": [2, 2, 3]}, 32, ("aux_hidden_state_layer_ids is [2, 2, 3]", "in order")),
        ({"aux_hidden_state_layer_ids": [2, True]}, 32, ("[2, True]",)),
        ({"aux_hidden_state_layer_ids": "2,16,29"}, 32, ("'2,16,29'", "should list layers")),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 32]}}, 32, ("eagle_config.eagle_aux", "from 0 to 31")),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [-1, 3]}}, 32, ("[-1, 3]", "from 0")),
        ({"eagle_config": [2, 16]}, 32, ("eagle_config is [2, 16]", "object")),
        (
            {"eagle_aux_hidden_state_layer_ids": [2, 5], "eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 5]}},
            32,
            ("name different layers", "counts from 1 less"),
        ),
    ],
)
def test_wrong_layer_numbers(raw, layers, named):
    with pytest.raises(InputError) as error:
        residual_taps(raw, layers, source="some.json")
    assert str(error.value).startswith("some.json: ") and all(part in str(error.value) for part in named), error.value


# Mistakes -------------------------------------------------------------------------------------------------------------


def change_tensors(directory: Path, change) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def config(**changes):
    """Changes the top level of config.json; ... takes a key out."""

    def edit(directory):
        whole = json.loads((directory / "config.json").read_text()) | changes
        (directory / "config.json").write_text(json.dumps({key: value for key, value in whole.items() if value is not ...}))

    return edit


def layers(**changes):
    return lambda directory: edit_json(directory / "config.json", lambda raw: raw["transformer_layer_config"].update(changes))


def tensors(change):
    return lambda directory: change_tensors(directory, change)


def ids(change):
    return tensors(lambda found: found.update(d2t=change(found["d2t"].copy())))


def at(i, value):
    def change(offsets):
        offsets[i] = value
        return offsets

    return ids(change)


def renamed(name):
    return lambda directory: (directory / "model.safetensors").rename(directory / name)


MISTAKES = [
    (SPECFORGE, renamed("pytorch_model.bin"), ("model.safetensors: missing", "pytorch_model.bin", "not read")),
    (SPECFORGE, renamed("eagle3.pt"), ("model.safetensors: missing", "eagle3.pt", "not read")),
    (SPECFORGE, lambda d: (d / "config.json").unlink(), ("config.json", "cannot be read")),
    (SPECFORGE, config(architectures=["LlamaForCausalLM"], draft_vocab_size=...), ("LlamaForCausalLM is no EAGLE-3 head",)),
    (SPECFORGE, config(architectures=["DFlashDraftModel"], draft_vocab_size=...), ("DFlashDraftModel is no EAGLE-3 head",)),
    (SPECFORGE, config(model_type="llama4"), ("model_type llama4", "llama or qwen3")),
    (SPECFORGE, config(model_type=...), ("model_type is missing", "llama or qwen3")),
    (SPECFORGE, config(hidden_size=96, head_dim=32), ("hidden_size is 96, should be 64",)),
    (SPECFORGE, config(target_hidden_size=128), ("target_hidden_size is 128, should be 64",)),
    (SPECFORGE, config(vocab_size=512), ("vocab_size is 512, should be 320",)),
    (SPECFORGE, config(draft_vocab_size=400), ("draft_vocab_size is 400, should be at most 320",)),
    (SPECFORGE, config(draft_vocab_size=128), ("d2t has shape [160], should have [128]", "lm_head.weight has shape [160, 64]")),
    (SPECFORGE, config(draft_vocab_size="all"), ("draft_vocab_size is 'all'",)),
    (SPECFORGE, config(quantization_config={"quant_method": "fp8"}), ("quantization_config", "unquantized")),
    (SPECFORGE, config(num_hidden_layers=2), ("missing layers.1.input_layernorm.weight",)),
    (SPECFORGE, config(num_aux_hidden_states=4), ("num_aux_hidden_states is 4, should be 3",)),
    (SPECFORGE, config(eagle_config={"use_aux_hidden_state": False}), ("use_aux_hidden_state", "false")),
    (SPECFORGE, config(eagle_aux_hidden_state_layer_ids=[2, 4]), ("fc.weight has shape [64, 192], should have [64, 128]",)),
    (SPECFORGE, config(fc_norm=True), ("missing fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight",)),
    (SPECFORGE, config(norm_before_fc=True), ("missing input_norm.weight",)),
    (SPECFORGE, config(norm_output="yes"), ("norm_output is 'yes', not true or false",)),
    (SPECFORGE, config(rope_scaling={"rope_type": "spiral"}), ("rope type spiral",)),
    (SPECFORGE, tensors(lambda t: t.pop("fc.weight")), ("no EAGLE-3 head", "fc.weight")),
    (SPECFORGE, tensors(lambda t: t.pop("d2t")), ("missing d2t",)),
    (SPECFORGE, tensors(lambda t: t.pop("lm_head.weight")), ("missing lm_head.weight",)),
    (SPECFORGE, tensors(lambda t: t.pop("midlayer.hidden_norm.weight")), ("missing midlayer.hidden_norm.weight",)),
    (SPECFORGE, tensors(lambda t: t.update(mask_hidden=t["fc.weight"][:1])), ("unexpected mask_hidden",)),
    (SPECFORGE, tensors(lambda t: t.update({"layers.0.hidden_norm.weight": t["norm.weight"]})), ("unexpected layers.0.hidden_norm",)),
    (SPECFORGE, ids(lambda d2t: d2t.astype(np.float32)), ("d2t has dtype F32", "I32, I64")),
    (SPECFORGE, at(159, 161), ("d2t", "makes 320 of 159", "below 320")),
    (SPECFORGE, at(0, -1), ("d2t", "makes -1 of 0")),
    (SPECFORGE, ids(lambda d2t: np.where(np.arange(160) == 1, d2t[0] - 1, d2t)), ("d2t", "of several")),
    (SPECULATORS, config(speculators_model_type="dflash"), ("speculators_model_type dflash", "eagle3 is")),
    (SPECULATORS, config(speculators_model_type="peagle"), ("speculators_model_type peagle", "eagle3 is")),
    (SPECULATORS, config(transformer_layer_config=...), ("transformer_layer_config is missing",)),
    (SPECULATORS, config(transformer_layer_config=[1]), ("transformer_layer_config is [1], should be an object",)),
    (SPECULATORS, layers(num_attention_heads=3), ("transformer_layer_config: num_attention_heads 3",)),
    (SPECULATORS, layers(hidden_act="gelu"), ("transformer_layer_config: hidden_act gelu",)),
    (SPECULATORS, layers(intermediate_size=96), ("layers.0.mlp.up_proj.weight has shape [128, 64], should have [96, 64]",)),
    (SPECULATORS, layers(layer_types=["sliding_attention"]), ("transformer_layer_config: sliding_window is missing",)),
    (SPECULATORS, layers(attention_bias=True), ("missing layers.0.self_attn.k_proj.bias",)),
    (NORMED, config(fc_norm=False), ("unexpected fc_norm.0.weight",)),
    (WHOLE, tensors(lambda t: t.pop("layers.0.self_attn.q_norm.weight")), ("missing layers.0.self_attn.q_norm.weight",)),
    (WHOLE, tensors(lambda t: t.update(d2t=np.array([1, -1] + [0] * 318))), ("d2t", "should be 0 everywhere")),
]


def test_a_head_of_random_weights_has_the_usual_sizes():
    """Those of heads for Llama-3.1-8B; and for shapes of fewer layers it reads others of the target's."""
    head = random_head(outline(architecture("llama-3.1-8b")))
    weights = head.weights()
    assert head.taps == (2, 16, 29) and weights["fc.weight"].shape == (4096, 3 * 4096)
    assert weights["head"].shape == (32000, 4096) and weights["embedding"].shape == (128256, 4096) and is_outline(head)
    assert [random_head(outline(architecture("tiny", layers))).taps for layers in (1, 2)] == [(0, 1), (0, 1, 2)]
    head, target = random_head(small := random_model(architecture("tiny"))), small.head.get_value()
    assert head.head.get_value() is target and head.settings.has_whole_vocabulary and head.dtype == small.dtype


@pytest.mark.parametrize(("name", "edit", "named"), MISTAKES, ids=lambda v: v[0] if isinstance(v, tuple) else None)
def test_mistakes_are_one_sentence(name, edit, named, target, copied):
    directory = copied(name)
    edit(directory)
    refused(directory, *named, read=lambda directory: load_head(directory, target))
