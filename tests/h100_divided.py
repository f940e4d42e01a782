"""Compiles a model that is divided over two H100s, on a machine without one: prefill, the decode loop, and loops of its steps.

python tests/h100_divided.py        a JSON object for each draft: how many kernels and all-reduces the decode loop has, and how many bytes
                                    of its cache it copies, where it should change them in place
"""

import dataclasses
import json
import os
from unittest import mock

os.environ |= {"JAX_NUM_CPU_DEVICES": "2"}

import h100  # first, as it keeps JAX from looking for a GPU
import jax
import numpy as np
from checkpoints import hf_config
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from qspec_jax.bench.architectures import random_int4, random_model
from qspec_jax.bench.decode_steps import StepsOfRound
from qspec_jax.bench.timing import Bandwidth, loop
from qspec_jax.decoding.compiled import Call
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.sampling import make_sampler, prompt_keys
from qspec_jax.drafts.registry import make_draft
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.sharding import model_mesh

# NVLink, without which XLA would not take its own kernel to add up.
TARGET = h100.TARGET.replace("cuda_compute_capability", "device_interconnect_info { active_links: 18 } cuda_compute_capability")
# Each device has an odd number of groups of inputs of down_proj, as of Llama-2-7B's.
SHAPE = dict(hidden_size=1024, intermediate_size=768, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=8, head_dim=128)
PROMPT = [1] * 900


def main() -> None:
    h100.use_first_kernels()
    topology = topologies.get_topology_desc(platform="cuda", target_config=TARGET, topology="1x1x2")
    mesh, here = model_mesh(list(topology.devices)), model_mesh(jax.devices())

    def there(leaf) -> jax.ShapeDtypeStruct:
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else PartitionSpec()
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))

    def compiled(call: Call) -> jax.stages.Compiled:
        return dataclasses.replace(call, args=jax.tree.map(there, call.args)).compile()[0]

    config = LlamaConfig.from_hf(hf_config(vocab_size=4096, max_position_embeddings=4096, **SHAPE))
    model = random_model(config, mesh=here)
    for name in ("none", "quantspec", "sparse:budget=0.2"):
        draft = None if name == "none" else make_draft(name, model, int4=random_int4(model))
        gamma = 3 if draft else 0
        settings = GenerationConfig(draft=name, cache="int8" if draft else "full", max_new_tokens=64, num_speculative_tokens=gamma)
        sampler, limits = make_sampler(settings), make_limits(model, settings)
        with mock.patch.object(jax, "default_backend", return_value="gpu"):
            engine = Engine.for_configs(model, draft, [settings], prompt_tokens=len(PROMPT))
            prefill = engine.prefill_of([PROMPT], sampler, prompt_keys(jax.random.key(0), 1), limits)
            state = prefill.shapes()
            compiled(prefill.first)
            rounds = engine.rounds_call(state, sampler, limits, 1, lazy=True)
            loop_of_rounds = compiled(rounds)
            sizes = dict(batch_size=1, context=len(PROMPT), gamma=gamma, bandwidth=Bandwidth(3000.0, None))
            steps = StepsOfRound(engine.target, sampler, settings.cache_config, state.cache, **sizes)
            tokens = jax.ShapeDtypeStruct((1, gamma + 1), np.int32, sharding=jax.numpy.zeros(()).sharding)
            for step in steps.of(state, rounds.args[1]):
                compiled(Call(loop(step.function, step.trips), ((tokens, state.cache, step.kept(state.draft)), step.inputs)))
        text, in_place = loop_of_rounds.as_text(), loop_of_rounds.memory_analysis().alias_size_in_bytes
        found = {"kernels": text.count('custom_call_target="mosaic_gpu'), "all_reduces": text.count(" all-reduce(")}
        found["copied"] = max(0, state.cache.num_bytes // mesh.size - in_place)
        print(json.dumps({"draft": name, **found}), flush=True)


if __name__ == "__main__":
    main()
