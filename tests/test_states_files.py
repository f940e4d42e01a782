"""Files of states: damaged, killed, of a full disk, and made up; each time the old state or the new one, or one sentence."""

import dataclasses
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import time
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import CASES, hf_config, write_checkpoint
from runs import random_model, random_prompts
from safetensors.flax import load_file

from qspec_jax.checkpoints.loading import load_model
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.decoding.reading import extend, prefill
from qspec_jax.decoding.saving import load_state, save_state
from qspec_jax.drafts.cascade import FIRST_GAMMA
from qspec_jax.drafts.registry import with_first_gamma
from qspec_jax.errors import InputError
from qspec_jax.files import UNLOCKED
from qspec_jax.planning.choice import DraftChoice
from qspec_jax.states import file

TEXT = random_prompts([100])[0]
SETTINGS = GenerationConfig(draft="sparse", group_size=8, num_speculative_tokens=3, max_new_tokens=12)

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(scope="module")
def model():
    return random_model("float64")


@pytest.fixture(scope="module")
def state(model):
    return extend(prefill(model, TEXT[:40], config=SETTINGS, room=60), TEXT[40:70])


@pytest.fixture
def saved(state, tmp_path):
    save_state(state, path := tmp_path / "state")
    return path


def rewritten(path, change):
    """Writes the file with a changed header and changed arrays, and the checksum that this content has."""
    header, arrays = file.read_header(path), load_file(path)
    change(header, arrays)
    file.write(path, header, arrays)


def with_header_bytes(path, old, new):
    """Writes the file with a part of its safetensors header replaced, and the checksum that this content has."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = content[8 : 8 + size].replace(old.encode(), new.encode(), 1)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[8 + size :])
    digest, at = file._digest(path)
    with path.open("r+b") as changed:
        changed.seek(at)
        changed.write(digest.encode())


def put(name, value, part=None):
    def change(header, arrays):
        (header if part is None else header[part])[name] = value

    return change


def array(name, function):
    def change(header, arrays):
        key = next(key for key in arrays if name in key)
        arrays[key] = function(arrays[key])

    return change


HUGE = 1 << 40
MADE_UP = {
    "huge room": (put("capacity", HUGE, "room"), "its room is"),
    "negative room": (put("gamma", -1, "room"), "its room is"),
    "room for less": (put("capacity", 69, "room"), "its room is|room for 69"),
    "larger room": (put("capacity", 1200, "room"), "is needed"),
    "huge tokens": (put("tokens", HUGE), "positions for 4096"),
    "negative tokens": (put("tokens", -1), "it has -1 tokens"),
    "other tokens": (lambda header, arrays: header.update(tokens=69, cached=69), "is needed"),
    "cached beyond the tokens": (put("cached", 71), "71 are cached"),
    "cached far below": (put("cached", 60), "60 are cached"),
    "one less cached": (put("cached", 69), "not those of 69 tokens"),
    "queries": (put("num_queries", 71), "queries of 71"),
    "no number": (put("cached", "70"), "cached is '70'"),
    "a truth value": (put("cached", True), "cached is True"),
    "version": (put("format", 99), "has version 99"),
    "another name": (put("more", 1), "its header has"),
    "no room": (lambda header, arrays: header.pop("room"), "its header has"),
    "a list for a room": (put("room", [1]), "room is|its header has"),
    "other settings": (put("settings", {"color": "red"}), "its settings are"),
    "a cache that is none": (put("cache", "nothing", "settings"), "should be one of"),
    "a draft that is a number": (put("draft", 3, "settings"), "its settings are"),
    "gamma": (put("num_speculative_tokens", -3, "settings"), "num_speculative_tokens -3"),
    "identity": (put("cache", "int8", "identity"), "another cache"),
    "no identity": (put("identity", {}), "its header has"),
    "tokens outside": (array("tokens", lambda x: x.at[3].set(64)), "outside the vocabulary of 64"),
    "negative token": (array("tokens", lambda x: x.at[3].set(-1)), "outside the vocabulary of 64"),
    "tokens of another type": (array("tokens", lambda x: x.astype(jnp.int16)), "is I16"),
    "NaN in logits": (array("logits", lambda x: x.at[0, 3].set(jnp.nan)), "has numbers that are none"),
    "NaN in the cache": (array("buffer", lambda x: x.at[0].set(jnp.nan)), "has numbers that are none"),
    "lengths": (array("quantized", lambda x: x + 8), "lengths of its cache"),
    "buffered": (array("buffered", lambda x: x + 1), "lengths of its cache"),
    "wrong type": (array("logits", lambda x: x.astype(jnp.float32)), "is F32"),
    "an array less": (lambda header, arrays: arrays.pop(next(key for key in arrays if "logits" in key)), "lacks own"),
    "an array more": (lambda header, arrays: arrays.update(more=jnp.zeros(3)), "holds more"),
    "no logits": (put("logits", False, "known"), "holds own"),
}


@pytest.mark.system
@pytest.mark.parametrize("name", MADE_UP)
def test_content_that_is_made_up_with_its_checksum(model, saved, name):
    """One sentence, and nothing is allocated of the sizes that it names."""
    change, words = MADE_UP[name]
    rewritten(saved, change)
    tracemalloc.start()
    with pytest.raises(InputError, match=words) as error:
        load_state(saved, model, config=None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "\n" not in str(error.value) and len(str(error.value)) < 600
    assert peak < saved.stat().st_size + (8 << 20)


def test_headers_of_safetensors_that_are_made_up(model, saved):
    """Shapes, places and types that the file does not have; no JSON; no state."""
    content, of_tokens = saved.read_bytes(), '"tokens":{"dtype":"I32","shape":[70],"data_offsets":['
    text = content[8 : 8 + int.from_bytes(content[:8], "little")].decode()
    assert of_tokens in text.replace(" ", "")
    for old, new in (
        ('"shape":[70]', f'"shape":[{HUGE}]'),
        ('"shape":[70]', '"shape":[-70]'),
        ('"shape":[70]', '"shape":[35]'),
        ('"dtype":"I32","shape":[70]', '"dtype":"I64","shape":[70]'),
        ('"dtype":"I32","shape":[70]', '"dtype":"F32","shape":[70]'),
        ('"dtype":"I32","shape":[70]', '"dtype":"X","shape":[70]'),
        ('"data_offsets":[0,', '"data_offsets":[8,'),
        ('"qspec_state"', '"other_state"'),
        ('"tokens":{', '"tokens":['),
    ):
        saved.write_bytes(content)
        with_header_bytes(saved, old, new)
        with pytest.raises(InputError) as error:
            load_state(saved, model)
        assert str(error.value).startswith(f"{saved}: ") and "\n" not in str(error.value)


def mutations(path, model, count):
    """Loads the file `count` times with a byte changed, cut off or added. Returns the growth of the process, in bytes."""
    content, r, before = path.read_bytes(), np.random.default_rng(0), None
    for i in range(count):
        at = int(r.integers(len(content) if i % 2 else 4000))
        changed = [content[:at], content[:at] + bytes([content[at] ^ int(r.integers(1, 256))]) + content[at + 1 :], content + b"0"][i % 3]
        path.write_bytes(changed)
        with pytest.raises(InputError):
            load_state(path, model)
        if i == 20:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10


@pytest.mark.system
def test_two_thousand_mutated_files(model, saved):
    size = saved.stat().st_size
    assert mutations(saved, model, 2000) < 4 * size + (32 << 20)


@pytest.mark.parametrize("fails", ["replace", "fsync", "write"])
def test_a_save_that_fails_leaves_the_old_file(model, state, saved, monkeypatch, fails):
    before, other = saved.read_bytes(), generate(model, state, config=SETTINGS).states[0]
    full = OSError(errno.ENOSPC, "No space left on device")
    # JAX's cache of compiled programs calls these functions, too: all that saving needs is compiled now.
    save_state(other, first := saved.with_name("first"))
    first.unlink()

    def failing(*args, **kwargs):
        raise full

    if fails in ("replace", "fsync"):
        monkeypatch.setattr(os, fails, failing)
    else:
        monkeypatch.setattr(file, "_bytes_of", failing)
    with pytest.raises(InputError, match=r"state: cannot be written .*No space left"):
        save_state(other, saved)
    monkeypatch.undo()
    assert saved.read_bytes() == before and list(saved.parent.iterdir()) == [saved]
    assert len(load_state(saved, model)) == 70


SAVES = """
import itertools, sys
from pathlib import Path
import jax.numpy as jnp
from qspec_jax.states import file
for i in itertools.count():
    file.write(Path(sys.argv[1]), {"number": i}, {"x": jnp.full(200_000, i)})
    print(i, flush=True)
"""


@pytest.mark.system
def test_a_save_that_is_killed_leaves_the_old_file_or_the_new_one(tmp_path):
    """At any moment; the next save removes what is left of it."""
    path, r, remains = tmp_path / "state", np.random.default_rng(0), 0
    for _ in range(12):
        process = subprocess.Popen([sys.executable, "-c", SAVES, path], stdout=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        with process:
            last = int(process.stdout.readline())
            time.sleep(r.random() * 0.1)
            process.send_signal(signal.SIGKILL)
            last = max([last, *map(int, process.stdout.read().split())])
        number = file.read_header(path)["number"]
        assert number in (last, last + 1)
        [found] = file.read(path, {"x": jax.ShapeDtypeStruct((200_000,), jnp.int32)}).values()
        assert (found == number).all()
        remains += len(list(tmp_path.iterdir())) - 1
    assert remains, "no save was killed in its middle"
    file.write(path, {}, {"x": jnp.zeros(3)})
    # A process that was killed just as it made a folder leaves it empty.
    assert not [one for one in tmp_path.rglob("*") if one.is_file() and one != path and one.name != UNLOCKED]


@pytest.mark.system
@pytest.mark.parametrize("config", [hf_config(head_dim=16, max_position_embeddings=512, vocab_size=300), CASES["gemma3-window"]])
def test_another_process_generates_the_same(config, tmp_path):
    """The command line, in float64: tokens and acceptance, from a state and after an extension, of layers with windows too."""
    checkpoint = write_checkpoint(tmp_path / "hf", config)
    model = load_model(checkpoint, dtype="float64")
    text = np.random.default_rng(0).integers(0, model.config.vocab_size, 60).tolist()
    found = extend(prefill(model, text[:40], config=SETTINGS), text[40:])
    save_state(found, path := tmp_path / "state")
    script = """
import dataclasses, json, sys
from qspec_jax import GenerationConfig, generate, load_state
from qspec_jax.checkpoints.loading import load_model
model = load_model(sys.argv[1], dtype="float64")
found = generate(model, load_state(sys.argv[2], model), config=GenerationConfig(max_new_tokens=12))
print(json.dumps([found.token_ids, dataclasses.asdict(found.stats.rows[0])]))
"""
    env = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1"}
    out = subprocess.run([sys.executable, "-c", script, checkpoint, path], env=env, capture_output=True, text=True, check=True).stdout
    here = generate(model, found, config=SETTINGS)
    assert json.loads(out) == [here.token_ids, vars(here.stats.rows[0])]
    assert here.stats.num_accepted_draft_tokens


CASCADE = "cascade:first=prompt-lookup,middle=quantspec"


@pytest.mark.parametrize(("draft", "stored"), [("eagle3:model=random,window=9", None), (f"{CASCADE},first_gamma={FIRST_GAMMA}", CASCADE)])
def test_a_file_of_the_version_before_goes_on(model, tmp_path, monkeypatch, draft, stored):
    """It has no features that a head kept; and of a cascade that left it open, the number of drafts that was the default then."""

    def choose_gammas(setting, draft, **sizes):
        return DraftChoice(with_first_gamma(draft, FIRST_GAMMA + 1), 3, "another number")

    config = dataclasses.replace(SETTINGS, draft=draft)
    state = prefill(model, TEXT[:40], config=config, room=60)
    save_state(state, path := tmp_path / "state")
    expected = generate(model, state, config=config).token_ids

    def as_before(header, arrays):
        header["format"] = 2
        if stored:
            header["settings"]["draft"] = stored
        for name in [name for name in arrays if ".kept." in name]:
            del arrays[name]

    rewritten(path, as_before)
    monkeypatch.setattr("qspec_jax.decoding.resolve.choose_gammas", choose_gammas)
    again = load_state(path, model)
    assert again.reader.settings["draft"] == draft
    assert generate(model, again, config=config).token_ids == expected
