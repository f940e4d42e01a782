"""Prefill and the decode loop, compiled ahead of time for an H100 (tests/h100.py), where jax's CUDA plugin is installed."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import jax
import pytest

pytestmark = [
    pytest.mark.skipif(jax.version.__version_info__ < (0, 11), reason="the kernels need jax >= 0.11"),
    pytest.mark.skipif(not importlib.util.find_spec("jax_cuda13_plugin"), reason="needs jax's CUDA plugin: pip install '.[cuda13]'"),
]


def said_by(name: str) -> list[dict]:
    """The JSON objects that a script of this folder prints."""
    script = Path(__file__).with_name(name)
    root = str(script.parents[1])
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env={"PATH": "", "PYTHONPATH": root}, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    return list(map(json.loads, run.stdout.splitlines()))


@pytest.fixture(scope="module")
def methods() -> dict:
    return {found["method"]: found for found in said_by("h100.py")}


def test_a_model_on_two_devices_compiles():
    """XLA adds up embeddings and, in each of two layers, what the target finds; of the draft only what comes after the last layer."""
    said = said_by("h100_divided.py")
    assert {each["draft"]: each["all_reduces"] for each in said} == {"none": 1 + 4, "quantspec": 2 + 4 + 1, "sparse:budget=0.2": 2 + 4 + 1}
    assert [each["copied"] for each in said] == [0, 0, 0]


def test_the_matmul_of_many_rows_keeps_all_in_registers(tmp_path):
    script = Path(__file__).with_name("h100_registers.py")
    environment = {"PATH": "", "PYTHONPATH": str(script.parents[1]), "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": str(tmp_path)}
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    said = [path.read_text() for path in tmp_path.glob("*.ptxas")]
    assert len(said) == 3
    for text in said:
        # Products that are under way are not waited for earlier than they need be, of which ptxas would warn.
        assert " 0 bytes spill stores" in text and "wgmma" not in text, text


def test_prefill_keeps_one_layer_in_full_precision(methods):
    for found in methods.values():
        few, many = found["prefill"]
        assert many <= 1.02 * few, found


def test_prefill_copies_neither_all_queries_nor_keys():
    """To take the last queries out, or to quantize some heads at a time, of an array that XLA would have turned round whole for it."""
    (found,) = said_by("h100_prefill.py")
    assert found["64 queries"] < found["0 queries"] + 0.1, found
    assert found["quantizing"] < 1, found  # numbers of one head in eight, in float32, and what comes of them


def test_the_loop_with_kernels_makes_nothing_of_cache_size(methods):
    assert {name: found["faults"] for name, found in methods.items()} == {name: [] for name in methods}
    # Two layers, of draft and target each: attention with RoPE and append (parts and their merging); all between attentions in one
    # in the draft, two norms and two matmuls in the target; a flush; and before and after the layers a norm of the draft and a matmul, a
    # norm of each, and with one row the draft's logits.
    # Listed groups are read, and attention is observed, by the same launches.
    layer = 2
    target = 2 * 2  # its matmuls of weights that share their input
    quantspec = 2 * ((layer + 1) + (layer + 2) + 1) + 2 + 2 + target
    assert {name: found["kernels"] for name, found in methods.items()} == {
        "quantspec": quantspec,
        "quantspec, one row": quantspec + 1,
        "sparse": quantspec,
        "sparse, paged": quantspec,
        "autoregressive, int8": 2 * (layer + 2 + 1) + 1 + target,
        "autoregressive, full": 2 * (layer + 2) + 1 + target,
    }
