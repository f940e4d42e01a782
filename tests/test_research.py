"""The loop as research code uses it: settings as arguments under jit and vmap, rows over devices by shard_map; and a profile of it."""

import dataclasses
import gzip
import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import simulated_devices
from jax.sharding import Mesh, PartitionSpec
from runs import prepared, random_model, random_prompts

from pallas_kernels.formats.views import BOTH_PLANES
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.round import decode
from qspec_jax.decoding.sampling import make_sampler
from qspec_jax.drafts import make_draft
from qspec_jax.models.viewed import ViewedModel

CONFIG = GenerationConfig(draft="quantspec", max_new_tokens=20, group_size=8, ignore_eos=True, temperature=0.7)


@pytest.fixture(scope="module")
def loop():
    """A function of sampler, state and limits, and these for two rows."""
    model = random_model(jnp.float32, num_hidden_layers=1)
    draft = make_draft("quantspec", model)
    state, _, limits = prepared(model, random_prompts([20, 30]), CONFIG, draft=draft)
    target = ViewedModel(model, BOTH_PLANES)
    return lambda *args: decode(target, draft, *args, jnp.int32(100)), make_sampler(CONFIG, CONFIG), state, limits


@pytest.mark.system
def test_settings_are_a_batch_axis(loop):
    run, sampler, state, limits = loop

    def tokens(temperature, gamma):
        sampled, bounded = dataclasses.replace(sampler, temperature=temperature), dataclasses.replace(limits, num_speculative_tokens=gamma)
        done = run(sampled, state, bounded)
        return done.tokens, done.counts.rounds

    temperatures, gammas = jnp.array([[0.2, 0.2], [0.7, 1.5], [1.5, 0.7]]), jnp.array([[1, 1], [4, 2], [4, 4]])
    together, alone = jax.jit(jax.vmap(tokens))(temperatures, gammas), jax.jit(tokens)
    for i, settings in enumerate(zip(temperatures, gammas)):
        for ours, theirs in zip(together, alone(*settings)):
            np.testing.assert_array_equal(ours[i], theirs)
    assert len({tuple(rounds.tolist()) for rounds in together[1]}) == 3


@pytest.mark.system
def test_rows_over_devices(loop):
    if len(jax.devices()) < 2:  # two in a process of its own
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"{__file__}::test_rows_over_devices"]
        done = subprocess.run(command, env=simulated_devices.environment(2), capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout
        return
    run, sampler, state, limits = loop
    mesh = Mesh(np.array(jax.devices()[:2]), ("rows",))
    assert mesh.size == 2
    by_row = lambda tree: jax.tree.map(lambda _: PartitionSpec("rows"), tree)
    specs = by_row(sampler), by_row(state), dataclasses.replace(by_row(limits), eos_token_ids=PartitionSpec())
    divided = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=by_row(state), check_vma=False)
    ours, theirs = jax.jit(divided)(sampler, state, limits), jax.jit(run)(sampler, state, limits)
    np.testing.assert_array_equal(ours.tokens, theirs.tokens)
    np.testing.assert_array_equal(ours.counts.accepted, theirs.counts.accepted)
    assert len(ours.tokens.sharding.device_set) == 2


def test_profile(run, fails, directory, tmp_path, caplog):
    arguments = ["generate", "--model", directory, "--prompt", "def main():", "--max-new-tokens", "8", "--profile"]
    code, out, _ = run(*arguments, tmp_path / "profile")
    assert code == 0 and out.strip()
    (trace,) = (tmp_path / "profile").rglob("perfetto_trace.json.gz")
    assert f"the profile is in {trace}; open it at ui.perfetto.dev" in caplog.messages
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert {"prefill", "rounds"} <= names
    (tmp_path / "file").write_text("")
    fails([*arguments, tmp_path / "file"], "--profile", "should be a folder")
