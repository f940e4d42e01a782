"""A model that is divided over devices: every token as on one, and nothing gathered that is not meant to be."""

import dataclasses
import functools
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulated_devices
from checkpoints import hf_config, write_checkpoint
from heads import write_head
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from problems.fused_layer import random_layer
from runs import with_draft

from convert import convert
from pallas_kernels import dispatch
from pallas_kernels.fused_layer import between_attentions
from qspec_jax.bench.architectures import architecture, random_int4, random_model
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding.batch import Request, run_batch
from qspec_jax.decoding.compiled import Compiled
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.prefill import PREFILL
from qspec_jax.decoding.programs import DECODE
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.drafts.registry import make_draft
from qspec_jax.drafts.step_bytes import weight_bytes
from qspec_jax.errors import InputError
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.sharding import AXES, model_mesh, on_each_device

VOCABULARY = 64
# Groups of inputs are then the same on each of 8 devices as on one: 128 of 1,024.
SHAPE = dict(hidden_size=32, num_hidden_layers=1, num_attention_heads=8, head_dim=128, intermediate_size=1024, max_position_embeddings=512)
CONFIG = GenerationConfig(draft="quantspec", group_size=8, ignore_eos=True, num_speculative_tokens=3)
# A draft, over how many devices a copy of the model is divided, and how many copies there are.
CASES = (
    ("combine:prompt-lookup+sparse:budget=0.3,heads=by-mass,memory=0.2", 2, 2),
    ("quantspec:sensitive_layers=1", 4, 1),
    ("triforce:model={small},middle=(retrieval:budget=48,chunk=4,rebuild=8)", 8, 1),
    ("cascade:first=(eagle3:model={head},window=20),middle=quantspec", 2, 1),
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """With 4 KV heads: of 8 devices each two have the same."""
    return write_checkpoint(tmp_path_factory.mktemp("divided") / "hf", hf_config(num_key_value_heads=4, **SHAPE))


@pytest.fixture(scope="session")
def small(tmp_path_factory):
    """Whose heads no mesh divides."""
    changes = dict(num_attention_heads=1, num_key_value_heads=1, hidden_size=16, intermediate_size=40, num_hidden_layers=1)
    return write_checkpoint(tmp_path_factory.mktemp("small") / "hf", hf_config(**changes, max_position_embeddings=512))


@pytest.fixture(scope="session")
def head(checkpoint, tmp_path_factory):
    return write_head(tmp_path_factory.mktemp("head") / "head", load_model(checkpoint, dtype="float32"))


def some_requests(draft: str) -> list[Request]:
    """Greedy and sampled, of different lengths."""
    r, config = np.random.default_rng(0), dataclasses.replace(CONFIG, draft=draft)
    settings = lambda i: dict(max_new_tokens=int(r.integers(20, 40)), temperature=(0.0, 0.9)[i % 2])
    return [
        Request(r.integers(0, VOCABULARY, n).tolist(), dataclasses.replace(config, **settings(i)), jax.random.key(i))
        for i, n in enumerate((20, 45, 33, 58))
    ]


def rows_of(run) -> list[tuple[list[int], int, int]]:
    """Tokens of each row, and how many drafts there were for them and were accepted."""
    of = lambda result: (result.token_ids, result.stats.num_draft_tokens, result.stats.num_accepted_draft_tokens)
    found = {result.index: of(result) for result in run}
    return [found[index] for index in range(len(found))]


@pytest.fixture
def eight(request):
    return simulated_devices.devices(request, 8)


@pytest.mark.system
def test_with_simulated_devices(request):
    simulated_devices.run_those_of(request, 8)


def is_key(leaf: jax.Array) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def collectives(executable) -> dict[str, list[int]]:
    """The sizes, in numbers, of what each collective operation of a program makes."""
    found: dict[str, list[int]] = {}
    names = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    for shape, name in re.findall(rf"= \(?\w+\[([\d,]*)\][^=]*? ({names})(?:-start)?\(", executable.as_text()):
        found.setdefault(name, []).append(math.prod(map(int, filter(None, shape.split(",")))))
    return found


@pytest.mark.several_devices
def test_rows_are_as_on_one_device(checkpoint, small, head, eight):
    """In float64, refilled; with several devices for a copy of the model, several copies, and more devices than KV heads."""
    with jax.enable_x64(True):
        whole, divided = load_model(checkpoint, dtype="float64"), {}
        for text, size, copies in CASES:
            text = text.format(small=small, head=head)
            meshes = [model_mesh(eight[i * size : (i + 1) * size]) for i in range(copies)]
            if size not in divided:
                divided[size] = load_model(checkpoint, dtype="float64", mesh=meshes[0])
            one = run_batch(whole, some_requests(text), batch_size=2)
            several = run_batch(divided[size], some_requests(text), batch_size=2, devices=meshes)
            assert rows_of(several) == rows_of(one), (text, size, copies)


@pytest.mark.several_devices
def test_what_devices_have(checkpoint, eight):
    """Each has its part of weights and caches, all have the same of the rest, and only logits and shares of attention are gathered."""
    mesh = model_mesh(eight[:4])
    model = load_model(checkpoint, dtype="float32", mesh=mesh)
    for path, weight in model.weights().items():
        parts = {shard.data.size for shard in weight.addressable_shards}
        assert parts == {weight.size // (4 if any(name in path for name in AXES) else 1)}, path
    draft = make_draft("sparse:budget=0.3", model)
    config, prompts = dataclasses.replace(CONFIG, max_new_tokens=12, draft="sparse:budget=0.3"), [[1] * 50, [2, 3] * 20]
    Compiled.forget()
    engine = Engine.for_configs(model, draft, [config], prompt_tokens=50)
    sampler, limits, keys = make_sampler(config, config), make_limits(model, config, config), prompt_keys(jax.random.key(0), 2)
    state = engine.rounds(engine.prefill(prompts, sampler, keys, limits), sampler, limits)
    assert (np.asarray(state.emitted) == 12).all()
    for leaf in jax.tree.leaves(state):
        parts = (
            [np.asarray(shard.data) for shard in jax.random.key_data(leaf).addressable_shards]
            if is_key(leaf)
            else [np.asarray(shard.data) for shard in leaf.addressable_shards]
        )
        if leaf.is_fully_replicated:
            assert all(np.array_equal(part, parts[0], equal_nan=part.dtype.kind == "f") for part in parts)
    layer = state.cache.layers[0]
    assert layer.buffer.keys.sharding.shard_shape(layer.buffer.keys.shape)[1] == layer.keys.upper.addressable_shards[0].data.shape[1] == 1
    most = 2 * (CONFIG.num_speculative_tokens + 1) * VOCABULARY  # logits of a round
    assert most < min(weight.size for path, weight in model.weights().items() if "proj" in path) // 4
    for compiled in (PREFILL, DECODE):
        (program,) = compiled.programs.values()
        found = collectives(program.executable)
        assert set(found) == {"all-gather", "all-reduce"} and max(found["all-gather"]) <= most, found


@pytest.mark.several_devices
def test_stored_drafts(checkpoint, eight, tmp_path, caplog):
    """A converted directory restores to the devices, its INT4 draft too."""
    convert(checkpoint, tmp_path / "out", draft_bits=4, progress=False)
    found = []
    for count in (1, 4, 8):
        mesh = None if count == 1 else model_mesh(eight[:count])
        model = load_model(tmp_path / "out", mesh=mesh)
        draft = make_draft("quantspec", model)
        weights = draft.step.model.weights()
        codes = weights["layers.0.down_proj.weight"].codes
        assert codes.sharding.shard_shape(codes.shape)[1] * count == codes.shape[1]
        if count == 8:
            twice = weights["layers.0.k_proj.weight"].codes
            heads = np.asarray(twice).reshape(8, -1)
            assert all(np.array_equal(heads[2 * i], heads[2 * i + 1]) for i in range(4))
        found.append(generate(model, [[1, 2, 3] * 9], config=with_draft(dataclasses.replace(CONFIG, max_new_tokens=8), draft)).token_ids)
    assert found[0] == found[1] == found[2] and "made anew" not in caplog.text


@pytest.mark.parametrize(
    ("changes", "count", "words"),
    [
        (
            dict(hidden_size=96, num_attention_heads=6, num_key_value_heads=3),
            4,
            "4 devices do not divide the model's 6 attention heads evenly; 1, 3, 6 do",
        ),
        (
            dict(hidden_size=96, num_attention_heads=12, num_key_value_heads=3),
            2,
            "2 devices neither divide the model's 3 KV heads nor hold them equally",
        ),
        (dict(intermediate_size=90), 4, "4 devices do not divide the model's 90 columns of the MLP evenly; 1, 2 do"),
    ],
)
def test_what_cannot_be_divided(tmp_path, changes, count, words):
    source = write_checkpoint(tmp_path / "hf", hf_config(**changes))
    with pytest.raises(InputError, match=words):
        load_model(source, mesh=Mesh(np.array(jax.devices()[:1] * count), ("model",)))


def test_a_mesh_of_other_axes(directory):
    with pytest.raises(InputError, match="the mesh has axes rows 1; a model is divided over a mesh of one axis, model"):
        load_model(directory, mesh=Mesh(np.array(jax.devices()[:1]), ("rows",)))


def test_nothing_without_elements_crosses_into_a_device_program():
    """XLA for GPUs ends the process over an array without elements that goes into a `shard_map` or comes out of it, also a constant."""
    mesh, x, empty = model_mesh(jax.devices()[:1]), jnp.ones((2, 3)), jnp.ones((2, 0))

    def function(x, empty):
        # The places of a whole slice are a constant without elements.
        return {"x": jax.lax.fori_loop(0, 3, lambda _, x: x.at[:, :3].add(1), x), "empty": empty, "more": empty[:1]}

    run, shapes = on_each_device(function, mesh, (x, empty))
    jaxpr = jax.make_jaxpr(run)(x, empty)
    (inner,) = (equation for equation in jaxpr.eqns if equation.primitive.name == "shard_map")
    assert all(variable.aval.size for variable in [*inner.invars, *inner.outvars])
    found, of_one = run(x, empty), function(x, empty)
    jax.tree.map(np.testing.assert_array_equal, found, of_one)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, shapes)


@pytest.mark.several_devices
def test_an_array_without_elements_lies_where_it_should(eight):
    """What a program returns can be given to it again, and the program is not compiled again for it."""
    divided = NamedSharding(model_mesh(eight[:2]), PartitionSpec("model", None))
    weight, empty = (jax.device_put(jnp.ones(shape), divided) for shape in ((4, 3), (4, 0)))
    program = Compiled(lambda weight, empty: (jnp.concatenate([empty, weight], 1), empty))
    for _ in range(2):
        executable, _ = program.compile(weight, empty)
        weight, empty = executable(weight, empty)
        assert weight.sharding == empty.sharding == divided and len(program.programs) == 1


@pytest.mark.several_devices
def test_more_heads_than_rows_divide(tmp_path, eight):
    """A KV head on three devices, none of which could have a third of it; and an oracle that would choose by a part of its queries."""
    changes = dict(hidden_size=96, num_attention_heads=3, num_key_value_heads=1, head_dim=64, intermediate_size=96, num_hidden_layers=1)
    source = write_checkpoint(tmp_path / "hf", hf_config(**changes))
    convert(source, tmp_path / "out", progress=False)
    config, found = dataclasses.replace(CONFIG, max_new_tokens=6, draft="none"), []
    for directory in (source, tmp_path / "out"):
        model = load_model(directory, mesh=jax.make_mesh((3,), ("model",), devices=eight[:3]))  # whatever kind of axis that is
        found.append(generate(model, [[1, 2, 3] * 9], config=config).token_ids)
    assert found[0] == found[1] == generate(load_model(source), [[1, 2, 3] * 9], config=config).token_ids
    with pytest.raises(InputError, match="no more devices than there are KV heads"):
        make_draft("exact-topk:weight_bits=16", model)
    for cache in ("h2o", "specache"):
        with pytest.raises(InputError, match=f"cache {cache} is for no more devices than there are KV heads"):
            generate(model, [[1, 2, 3]], config=dataclasses.replace(config, cache=cache, num_speculative_tokens=0))


@pytest.mark.several_devices
def test_copies_on_other_meshes(checkpoint, eight):
    model = load_model(checkpoint, mesh=model_mesh(eight[:2]))
    for place, words in (
        (model_mesh(eight[:4]), "divided over 2 devices, and a copy of it should be divided over 4"),
        (eight[0], "on a device"),
    ):
        with pytest.raises(InputError, match=words):
            list(run_batch(model, some_requests("none"), devices=[place, place]))
    with pytest.raises(InputError, match="the model is on one device, and a copy of it should be divided over 2"):
        list(run_batch(load_model(checkpoint), some_requests("none"), devices=[model_mesh(eight[:2])]))


@pytest.mark.several_devices
def test_bench(run, one_layer, request):
    simulated_devices.devices(request, 2)
    code, out, err = run("bench", "all-reduce", "--devices", 2, "--rows", 2, "--width", 32, "--repeats", 2, "--json")
    report = json.loads(out)
    assert (code, report["devices"], [row["error"] for row in report["rows"]]) == (0, 2, [""]), err
    sizes = ["--context", 64, "--max-new-tokens", 16, "--gamma", 2, "--repeats", 2, "--simulate-acceptance", 0.9]
    code, out, err = run("bench", "decode", "--arch", "tiny", *sizes, "--devices", 2, "--method", "autoregressive", "--json")
    report = json.loads(out)
    assert (code, report["devices"], [row["status"] for row in report["rows"]]) == (0, 2, ["measured"]), err
    model = random_model(architecture("tiny"))
    whole = weight_bytes(model)
    step = report["rows"][0]["steps"]["target"]["bytes"]
    assert whole / 2 < step < whole / 2 + 1_000_000


def test_one_device_has_nothing_to_add_up(fails):
    fails(["bench", "all-reduce", "--devices", 1], "there is one device; an all-reduce needs two or more")


two_gpus = pytest.mark.skipif(jax.default_backend() != "gpu" or len(jax.devices()) < 2, reason="needs two NVIDIA GPUs")


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("draft", ["quantspec", "sparse:budget=0.2"])
def test_two_gpus_run_the_kernels_of_one(draft):
    """In bfloat16: the same kernels, and the same chances up to rounding."""
    shape = dict(hidden_size=1024, intermediate_size=2048, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4, head_dim=128)
    config = LlamaConfig.from_hf(hf_config(vocab_size=4096, max_position_embeddings=4096, **shape))
    settings = GenerationConfig(draft=draft, max_new_tokens=150, num_speculative_tokens=3, ignore_eos=True, output_logprobs=True)
    prompt, kernels, found = np.random.default_rng(0).integers(0, 4096, 900).tolist(), [], []
    for mesh in (None, model_mesh(jax.devices()[:2])):
        model = random_model(config, mesh=mesh)
        Compiled.forget()
        with dispatch.watched() as seen:
            found.append(generate(model, [prompt], config=with_draft(settings, make_draft(draft, model, int4=random_int4(model)))))
        # The target's layers are compositions of kernels, and plain matrix products go by their shapes.
        kernels.append({(choice.kernel, choice.implementation) for choice in seen if choice.kernel != "matmul"})
    assert kernels[0] == kernels[1] and {("append_attend", "mosaic_gpu"), ("fused_layer", "mosaic_gpu")} <= kernels[1], kernels
    one, two = (run.logprobs[0][0] for run in found)
    assert abs(one - two) < 0.05
    rates = [run.stats.draft_acceptance_rate for run in found]
    assert abs(rates[0] - rates[1]) < 0.2, rates


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("following", [True, False])
def test_two_gpus_add_up_within_a_launch(rows, following):
    """As the composition does, and with the same bits each time: neither reads what is not there yet, nor what was there before."""
    mesh = model_mesh(jax.devices()[:2])
    args = random_layer(4096, 4096, 11008, (4096, 1024, 1024) if following else (), rows)
    outputs, inputs, whole = PartitionSpec("model"), PartitionSpec(None, "model"), PartitionSpec()
    layer = functools.partial(between_attentions, eps=1e-5, axis="model")

    def on_both(function):
        specs = (whole, inputs, inputs, whole, outputs, outputs, inputs, whole, outputs)
        found = whole, inputs if following else whole, whole
        with dispatch.on(*mesh.devices.flat):
            return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=specs, out_specs=found, check_vma=False))(*args)

    def composed(*args):
        return *layer(*args, implementation="reference")[:2], jnp.int32(0)

    def fused_many_times(*args):
        *first, handoff = layer(*args, implementation="mosaic_gpu")

        def again(_, carry):
            handoff, wrong = carry
            *found, handoff = layer(*args, handoff, implementation="mosaic_gpu")
            return handoff, wrong + sum((a != b).any().astype(jnp.int32) for a, b in zip(found, first))

        return *first, jax.lax.psum(jax.lax.fori_loop(0, 1000, again, (handoff, jnp.int32(0)))[1], "model")

    *found, wrong = on_both(fused_many_times)
    assert int(wrong) == 0
    for ours, others in zip(found, on_both(composed)[:2]):
        ours, others = np.asarray(ours, np.float32), np.asarray(others, np.float32)
        assert np.linalg.norm(ours - others) <= 2e-2 * np.linalg.norm(others)
