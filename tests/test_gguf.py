"""GGUF files: values are those of the package gguf, models those of the same checkpoint in safetensors, and mistakes are one sentence."""

import json
import os
import struct
from pathlib import Path

import jax.numpy as jnp
import made_tokenizers
import numpy as np
import pytest
from checkpoints import hf_config, random_tensors, rope_settings, write_checkpoint
from conversions import bits
from read_checkpoints import loaded, refused

from convert import convert, verify
from qspec_jax.checkpoints.gguf_file import read_gguf
from qspec_jax.checkpoints.huggingface import load_config
from qspec_jax.checkpoints.info import model_info
from qspec_jax.checkpoints.loading import load_model
from qspec_jax.checkpoints.tokenizers import check_same_tokens, load_tokenizer
from qspec_jax.decoding.run_identity import of_checkpoint
from qspec_jax.errors import InputError

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
from made_gguf import Kind, paired, write_gguf  # noqa: E402

# Models --------------------------------------------------------------------------------------------------------------


def both(folder: Path, config: dict, *, dtype: str = "float32", **settings) -> tuple[Path, Path]:
    """A checkpoint of random weights as safetensors and as a GGUF file."""
    tensors = random_tensors(config, dtype=dtype)
    source = write_checkpoint(folder / "hf", config, tensors=tensors)
    extra = settings.pop("tensors", {})
    return source, write_gguf(folder / "model.gguf", config, tensors | extra, **settings)


LINEAR = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 512}
MODELS = {
    "llama": (hf_config(), {}),
    "tied": (hf_config(tie_word_embeddings=True, num_key_value_heads=4), {}),
    "biases": (hf_config(attention_bias=True, mlp_bias=True), {}),
    "head_dim from the sizes": (
        hf_config(head_dim=16),
        {f"llama.{key}": None for key in ("attention.key_length", "attention.value_length")},
    ),
    "linear": (hf_config(**rope_settings("linear")), LINEAR),
    "old linear": (hf_config(**rope_settings("linear")), {"llama.rope.scale_linear": 4.0}),
    "qwen2": (hf_config("Qwen2ForCausalLM", **rope_settings("yarn")), {f"qwen2.{key}": value for key, value in YARN.items()}),
    "qwen3": (hf_config("Qwen3ForCausalLM", head_dim=128), {}),
    "zero keys": (hf_config(), {"llama.expert_count": 0, "llama.something.new": False}),
    "per layer, all the same": (hf_config(), {"llama.attention.head_count_kv": [2, 2]}),
    "three ends": (hf_config(eos_token_id=[2, 5, 7]), {"tokenizer.ggml.eot_token_id": 5, "tokenizer.ggml.eom_token_id": 7, **{}}),
}


@pytest.mark.parametrize("case", MODELS)
def test_a_model_is_that_of_the_checkpoint_it_was_made_from(case, tmp_path):
    config, metadata = MODELS[case]
    if case == "three ends":
        metadata = metadata | {"tokenizer.ggml.eos_token_id": 2}
    source, path = both(tmp_path, config, metadata=metadata)
    assert load_config(path) == load_config(source)
    assert bits(load_model(path)) == bits(load_model(source))
    assert model_info(path) == model_info(source)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_floats_are_read_as_they_are(dtype, tmp_path, caplog):
    config = hf_config(dtype=dtype)
    source, path = both(tmp_path, config, dtype=dtype)
    assert load_config(path) == load_config(source)
    for wanted in (None, "float32", "bfloat16"):
        assert bits(load_model(path, dtype=wanted)) == bits(load_model(source, dtype=wanted))


def llama3_factors(theta: float, head_dim: int, original: int) -> np.ndarray:
    """As llama.cpp's converter computes them for factor 8."""
    factors = []
    for i in range(head_dim // 2):
        wavelength = 2 * np.pi * theta ** (2 * i / head_dim)
        if wavelength < original / 4:
            factors.append(1.0)
        elif wavelength > original:
            factors.append(8.0)
        else:
            blend = (original / wavelength - 1) / 3
            factors.append(1 / ((1 - blend) / 8 + blend))
    return np.array(factors, np.float32)


@pytest.mark.parametrize("original", [8192, 32])
def test_factors_of_rope(original, tmp_path):
    """Those of Llama 3 become its own settings again; any others divide the frequencies."""
    config = hf_config(**rope_settings("llama3", original_max_position_embeddings=original), head_dim=64)
    theta = config["rope_parameters"]["rope_theta"]
    source, path = both(tmp_path, config, tensors={"rope_freqs.weight": llama3_factors(theta, 64, original)})
    found, wanted = load_config(path), load_config(source)
    if original == 8192:
        assert found == wanted
        return
    assert found.rope.rope_type == "longrope" and found.max_length == wanted.max_length
    tokens = jnp.arange(48)[None] % 64
    logits = [logits_of(load_model(each), tokens) for each in (path, source)]
    np.testing.assert_allclose(*logits, atol=1e-4 * np.ptp(logits[1]))


def logits_of(model, tokens) -> np.ndarray:
    from models import _logits

    return np.asarray(_logits(model, tokens, jnp.array([tokens.shape[1]]), tokens.shape[1], None))


# Values --------------------------------------------------------------------------------------------------------------


def random_blocks(kind: Kind):
    """Blocks of random bytes with scales that are finite; their values are whatever gguf says."""
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    scales = {Kind.Q4_0: [0], Kind.Q8_0: [0], Kind.Q5_0: [0], Kind.Q4_1: [0, 2], Kind.Q5_1: [0, 2], Kind.Q6_K: [size - 2]}
    scales |= {Kind.Q4_K: [0, 2], Kind.Q5_K: [0, 2], Kind.Q2_K: [size - 4, size - 2], Kind.Q3_K: [size - 2]}

    def encode(x: np.ndarray):
        random = np.random.default_rng(len(x))
        blocks = random.integers(0, 256, (x.size // numbers, size), np.uint8)
        for at in scales[kind]:
            blocks[:, at : at + 2] = random.uniform(-0.1, 0.1, (len(blocks), 1)).astype(np.float16).view(np.uint8)
        return blocks.reshape(len(x), -1), kind

    return encode


KINDS = [Kind[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_dequantized_values_are_those_of_the_package(kind, tmp_path, monkeypatch):
    monkeypatch.setattr("qspec_jax.checkpoints.gguf_file._PART", 3000)  # some rows at a time
    config = hf_config(hidden_size=256, intermediate_size=256, num_hidden_layers=1, head_dim=64)
    tensors, encode = random_tensors(config), random_blocks(kind)
    path = write_gguf(tmp_path / "model.gguf", config, tensors, encode=encode)
    model = load_model(path, dtype="float32")
    assert load_config(path).dtype == "bfloat16"
    for name, found in loaded(model).items():
        if found.ndim == 1:
            continue
        stored = gguf.quants.dequantize(*encode(tensors[name]))  # in the order of the file
        heads = {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        np.testing.assert_array_equal((paired(found, heads) if heads else found).view(np.uint32), stored.view(np.uint32))


def quantized(folder: Path, name: str = "model.gguf", **settings) -> tuple[Path, dict]:
    config = hf_config(head_dim=64)
    encode = lambda x: (gguf.quants.quantize(x, Kind.Q8_0), Kind.Q8_0)
    return write_gguf(folder / name, config, random_tensors(config), encode=encode, **settings), config


def test_shards(tmp_path):
    """Any of them is the whole model, and so is their folder."""
    whole, _ = quantized(tmp_path)
    wanted = bits(load_model(whole))
    (tmp_path / "shards").mkdir()
    first, _ = quantized(tmp_path / "shards", max_tensors=6)
    files = sorted(first.parent.iterdir())
    assert len(files) > 2 and files[0].name.startswith("model-00001-of-0000")
    (first.parent / "mmproj-model.gguf").write_bytes(b"a vision model")
    for path in (first, files[-1], first.parent):
        assert bits(load_model(path)) == wanted
    merged, _ = quantized(tmp_path, "merged.gguf", metadata={"split.no": 0, "split.count": 0, "split.tensors.count": 21})
    assert bits(load_model(merged)) == wanted
    before = of_checkpoint(first)
    os.utime(files[1], (1, 1))
    assert of_checkpoint(first) != before
    files[1].rename(tmp_path / "elsewhere")
    refused(first.parent, f"{files[1].name}: missing", "all of them in one folder")
    (tmp_path / "elsewhere").rename(files[1])
    other = files[1].read_bytes()
    files[1].write_bytes(files[2].read_bytes())
    refused(first.parent, f"{files[1].name}: is shard 3 of", "and 2 of")
    files[1].write_bytes(other)
    quantized(first.parent, "second.gguf")
    refused(first.parent, "it holds 2 models in GGUF", "second.gguf", "give one of these files")


# Tokenizers ----------------------------------------------------------------------------------------------------------

TEXTS = ["the cats mew 12345 m", "  two  blanks\n\nand lines", "Ünï¢ödé 日本 🙂", "<s>cats</s><think>", "don't WE'LL", ""]


def tokenizer_metadata(tokenizer, kind: str, **more) -> dict:
    """The metadata of a tokenizer of made_tokenizers."""
    whole = json.loads(tokenizer.to_str())
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.token_to_id)
    merges = [" ".join(pair) for pair in whole["model"]["merges"]]
    types = [2 if token == "<unk>" else 3 if token in ("<s>", "</s>") else 4 if token == "<think>" else 1 for token in tokens]
    found = {
        "model": kind,
        "tokens": tokens,
        "token_type": types,
        "bos_token_id": tokens.index("<s>"),
        "eos_token_id": tokens.index("</s>"),
    }
    if kind == "llama":
        found["token_type"] = [6 if token.startswith("<0x") else type_ for token, type_ in zip(tokens, types)]
        first = {pair.replace(" ", ""): float(-rank) for rank, pair in reversed(list(enumerate(merges)))}
        found["scores"] = [first.get(token, 0.0) for token in tokens]
        found["unknown_token_id"] = tokens.index("<unk>")
    else:
        found["merges"] = merges
    return {f"tokenizer.ggml.{key}": value for key, value in (found | more).items()}


def with_tokenizer(folder: Path, metadata: dict) -> Path:
    config = hf_config(vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    folder.mkdir(exist_ok=True)
    return write_gguf(folder / "model.gguf", config, random_tensors(config), metadata=metadata)


TOKENIZERS = {
    "llama 3": (made_tokenizers.byte_level(made_tokenizers.LLAMA3, bos=True), "gpt2", {"pre": "llama-bpe"}),
    "qwen 2": (made_tokenizers.byte_level(made_tokenizers.QWEN), "gpt2", {"pre": "qwen2", "add_bos_token": False}),
    "gpt 2": (made_tokenizers.byte_level(None), "gpt2", {"pre": "gpt-2"}),
    "llama 2": (made_tokenizers.sentencepiece_like("normalizer"), "llama", {"pre": "default"}),
    "without a blank": (made_tokenizers.sentencepiece_like(None, bos=False), "llama", {"add_space_prefix": False, "add_bos_token": False}),
}


@pytest.mark.parametrize("case", TOKENIZERS)
def test_a_tokenizer_gives_the_ids_of_the_one_it_was_made_from(case, tmp_path):
    tokenizer, kind, more = TOKENIZERS[case]
    metadata = tokenizer_metadata(tokenizer, kind, **more) | {"tokenizer.chat_template": "{{ messages[0].content }}!"}
    path = with_tokenizer(tmp_path, metadata)
    convert(path, tmp_path / "out")
    for where in (path, tmp_path / "out"):
        found = load_tokenizer(where)
        for text in TEXTS:
            if case == "qwen 2" and not text.isascii():
                continue  # the made tokenizer has no normalizer
            assert found(text).input_ids == tokenizer.encode(text).ids
            assert found.decode(found(text).input_ids) == tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)
        assert (found.bos_token, found.eos_token, found.all_special_tokens[:2]) == ("<s>", "</s>", ["<s>", "</s>"])
        assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    check_same_tokens(path, tmp_path / "out")
    other = dict(metadata)
    other["tokenizer.ggml.tokens"] = [{"!": '"', '"': "!"}.get(token, token) for token in metadata["tokenizer.ggml.tokens"]]
    with pytest.raises(InputError, match="a draft needs the target's vocabulary"):
        check_same_tokens(with_tokenizer(tmp_path / "other", other), path)


def test_a_digit_is_a_word(tmp_path):
    tokenizer = made_tokenizers.byte_level(None)
    path = with_tokenizer(tmp_path, tokenizer_metadata(tokenizer, "gpt2", pre="smollm"))
    found = load_tokenizer(path)
    assert found.convert_ids_to_tokens(found("12345 cats").input_ids) == [*"12345", "Ġcats"]


def test_padding_of_the_vocabulary_is_no_token(tmp_path):
    metadata = tokenizer_metadata(made_tokenizers.byte_level(None), "gpt2", pre="gpt-2")
    count = len(metadata["tokenizer.ggml.tokens"])
    metadata["tokenizer.ggml.tokens"] += [f"[PAD{count}]", f"[PAD{count + 1}]"]
    metadata["tokenizer.ggml.token_type"] += [5, 5]
    assert len(load_tokenizer(with_tokenizer(tmp_path, metadata))) == count


BROKEN_TOKENIZERS = {
    "no pre": ({"pre": None}, "tokenizer.ggml.pre, how texts are divided into words, is missing"),
    "unknown pre": ({"pre": "of-tomorrow"}, "of-tomorrow is not known; known are llama-bpe"),
    "kind": ({"model": "bert"}, "a tokenizer of kind bert"),
    "types": ({"token_type": [1, 1]}, "a number for each of them"),
    "BOS": ({"bos_token_id": 9999}, "bos_token_id is 9999"),
    "no tokens": ({"tokens": None}, "no tokenizer in it"),
}


@pytest.mark.parametrize("case", BROKEN_TOKENIZERS)
def test_a_tokenizer_that_is_not_known_is_refused_and_the_model_converted(case, tmp_path, caplog):
    change, named = BROKEN_TOKENIZERS[case]
    metadata = tokenizer_metadata(made_tokenizers.byte_level(None), "gpt2", pre="gpt-2")
    count = len(metadata["tokenizer.ggml.tokens"])
    config = hf_config(vocab_size=count)
    metadata |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    path = write_gguf(tmp_path / "model.gguf", config, random_tensors(config), metadata=metadata)
    refused(path, named, read=load_tokenizer)
    convert(path, tmp_path / "out")
    assert not verify(path, tmp_path / "out").wrong and not (tmp_path / "out" / "tokenizer.json").exists()
    assert (named in caplog.text) == (case != "no tokens")


def test_merges_that_make_no_token(tmp_path, caplog):
    metadata = tokenizer_metadata(made_tokenizers.byte_level(None), "gpt2", pre="gpt-2")
    metadata["tokenizer.ggml.merges"] += ["z z"]
    path = with_tokenizer(tmp_path, metadata)
    found = load_tokenizer(path)
    assert found.convert_ids_to_tokens(found("zz").input_ids) == ["z", "z"]
    assert f"{path}: the merge 'z z' is left out, whose parts or result are no tokens of its vocabulary" in caplog.text


# Commands ------------------------------------------------------------------------------------------------------------


@pytest.mark.system
def test_commands(tmp_path, run, caplog):
    """info, doctor, convert with a draft, verify, and generate, of the file, of its folder and of the conversion."""
    metadata = tokenizer_metadata(made_tokenizers.byte_level(None), "gpt2", pre="gpt-2", eos_token_id=0)
    sizes = dict(vocab_size=len(metadata["tokenizer.ggml.tokens"]), head_dim=64, max_position_embeddings=512)
    config = hf_config(num_hidden_layers=1, **sizes)
    (tmp_path / "gguf").mkdir()
    encode = lambda x: (gguf.quants.quantize(x, Kind.Q4_1), Kind.Q4_1)
    path = write_gguf(tmp_path / "gguf" / "model.gguf", config, random_tensors(config), metadata=metadata, encode=encode)
    code, out, _ = run("info", path, "--json")
    assert code == 0 and json.loads(out)["dtype"] == "bfloat16" and json.loads(out)["linear_layers"] == "Q4_1, dequantized to bfloat16"
    assert run("doctor", "--model", path, "--context", 64)[0] == 0
    assert run("convert", path.parent, tmp_path / "out", "--draft-bits", 4)[0] == 0
    assert run("verify", path, tmp_path / "out")[0] == 0
    settings = ("--prompt", "cats mew", "--max-new-tokens", 8, "--json")
    drafted = [(path, "none"), (path, "quantspec"), (path.parent, "quantspec"), (tmp_path / "out", "quantspec")]
    results = [run("generate", "--model", where, "--draft", draft, *settings) for where, draft in drafted]
    assert [code for code, *_ in results] == [0] * 4
    assert len({json.loads(out)["text"][0] for _, out, _ in results}) == 1
    path.write_bytes(path.read_bytes()[:-1])
    code, out, err = run("info", path)
    assert (code, out) == (2, "") and len(err.splitlines()) == 1 and "is not whole" in err


# Mistakes ------------------------------------------------------------------------------------------------------------


def header(keys: bytes = b"", tensors: bytes = b"", counts: tuple[int, int] = (0, 0), version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, *counts) + keys + tensors


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def test_a_file_cut_anywhere_is_truncated(tmp_path):
    path, _ = quantized(tmp_path)
    whole = path.read_bytes()
    start = min(tensor.start for tensor in read_gguf(path).tensors.values())
    lengths = [5, 12, 30, *np.linspace(40, start - 1, 12).astype(int), start, (start + len(whole)) // 2, len(whole) - 1]
    for length in lengths:
        path.write_bytes(whole[:length])
        refused(path, "is not whole", "fetch it again")


HUGE = 1 << 62
BROKEN_HEADERS = {
    "magic": (b"GGML" + bytes(100), "is not a GGUF file: it begins with b'GGML'"),
    "empty": (b"", "is not a GGUF file"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n", "is a git-lfs pointer"),
    "version": (header(version=1), "of version 1, which is not read"),
    "big-endian": (b"GGUF" + struct.pack(">I", 3) + bytes(64), "big-endian, which is not read"),
    "huge count of keys": (header(counts=(0, HUGE)), "is not whole"),
    "huge count of tensors": (header(counts=(HUGE, 0)), "is not whole"),
    "huge text": (header(struct.pack("<Q", HUGE), counts=(0, 1)), "is not whole"),
    "huge array": (header(text(b"a") + struct.pack("<IIQ", 9, 6, HUGE), counts=(0, 1)), "is not whole"),
    "huge array of texts": (header(text(b"a") + struct.pack("<IIQ", 9, 8, HUGE), counts=(0, 1)), "is not whole"),
    "array of arrays": (
        header(text(b"a") + struct.pack("<IIQ", 9, 9, 1) + bytes(64), counts=(0, 1)),
        "the array of a has elements of type 9",
    ),
    "type of a value": (header(text(b"a") + struct.pack("<I", 77), counts=(0, 1)), "the value of a has a type of number 77"),
    "no UTF-8": (header(text(b"\xff"), counts=(0, 1)), "is not UTF-8"),
    "key twice": (header(2 * (text(b"a") + struct.pack("<IB", 0, 1)), counts=(0, 2)), "has the key a twice"),
    "alignment": (header(text(b"general.alignment") + struct.pack("<II", 4, 24), counts=(0, 1)), "general.alignment is 24"),
    "dimensions": (header(tensors=text(b"t") + struct.pack("<I", 9) + bytes(99), counts=(1, 0)), "t has 9 dimensions"),
    "type of a tensor": (header(tensors=text(b"t") + struct.pack("<IQIQ", 1, 32, 777, 0), counts=(1, 0)), "t has a type of number 777"),
    "type not supported": (
        header(tensors=text(b"t") + struct.pack("<IQIQ", 1, 256, 16, 0), counts=(1, 0)),
        "t has the type IQ2_XXS, which",
    ),
    "integers": (
        header(tensors=text(b"t") + struct.pack("<IQIQ", 1, 4, 26, 0), counts=(1, 0)),
        "t has the type I32, which is not supported",
    ),
    "part of a block": (header(tensors=text(b"t") + struct.pack("<IQIQ", 1, 33, 2, 0), counts=(1, 0)), "rows of whole blocks of 32"),
    "no numbers": (header(tensors=text(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0), counts=(1, 0)), "t has the shape [0]"),
    "offset": (header(tensors=text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 7), counts=(1, 0)), "no multiple of the alignment 32"),
    "huge tensor": (header(tensors=text(b"t") + struct.pack("<IQIQ", 1, HUGE, 0, 0), counts=(1, 0)), "is not whole: t ends at byte"),
    "a name that is not printable": (
        header(tensors=text(b"\x1b[2J") + struct.pack("<IQIQ", 1, 4, 26, 0), counts=(1, 0)),
        r"\x1b[2J has the type",
    ),
}


@pytest.mark.parametrize("case", BROKEN_HEADERS)
def test_broken_headers(case, tmp_path):
    content, named = BROKEN_HEADERS[case]
    (tmp_path / "model.gguf").write_bytes(content)
    refused(tmp_path / "model.gguf", named)
    refused(tmp_path, named)


BROKEN_MODELS = {
    "architecture": ({"general.architecture": "mamba"}, {}, "architecture mamba is not supported in GGUF; supported are llama"),
    "experts": ({"llama.expert_count": 8}, {}, "llama.expert_count of its metadata is not supported"),
    "missing": ({"llama.block_count": None}, {}, "llama.block_count is missing"),
    "part of a head": ({"llama.rope.dimension_count": 32}, {}, "llama.rope.dimension_count is 32, and heads have 64"),
    "text for a number": ({"llama.block_count": "two"}, {}, "num_hidden_layers is 'two', not a whole number"),
    "rope scaling": ({"llama.rope.scaling.type": "longrope"}, {}, "rope scaling longrope is not supported in GGUF"),
    "differs by layer": ({"llama.attention.head_count_kv": [2, 4]}, {}, "llama.attention.head_count_kv differs between layers"),
    "not causal": ({"llama.attention.causal": False}, {}, "only causal attention"),
    "many layers": ({"llama.block_count": 900}, {}, "asks for 900 layers, and there are 21 tensors"),
    "missing layer": ({"llama.block_count": 3}, {}, "missing blk.2.attn_k.weight"),
    "width": ({"llama.feed_forward_length": 64}, {}, "blk.0.ffn_down.weight has shape [64, 96], the metadata asks for [64, 64]"),
    "unexpected": ({}, {"blk.0.attn_q.scale": np.ones(1)}, "unexpected blk.0.attn_q.scale"),
    "no embedding": ({}, {"model.embed_tokens.weight": None}, "missing token_embd.weight"),
    "missing tensor": ({}, {"model.layers.1.mlp.up_proj.weight": None}, "missing blk.1.ffn_up.weight"),
    "factors": ({}, {"rope_freqs.weight": np.zeros(32)}, "rope_freqs.weight should have finite numbers above 0"),
    "factors and scaling": (LINEAR, {"rope_freqs.weight": np.ones(32)}, "it has both rope_freqs.weight and rope scaling linear"),
    "too few factors": ({}, {"rope_freqs.weight": np.full(16, 3.0)}, "short_factor must be a list of 32 numbers"),
}


@pytest.mark.parametrize("case", BROKEN_MODELS)
def test_broken_models(case, tmp_path):
    metadata, changes, named = BROKEN_MODELS[case]
    config = hf_config(head_dim=64)
    tensors = {name: x for name, x in (random_tensors(config) | changes).items() if x is not None}
    path = write_gguf(tmp_path / "model.gguf", config, tensors, metadata=metadata)
    refused(path, named)


def test_a_file_that_shrinks_while_it_is_read(tmp_path):
    path, _ = quantized(tmp_path)
    tensor = read_gguf(path).tensors["token_embd.weight"]
    path.write_bytes(path.read_bytes()[: tensor.start + 5])
    with pytest.raises(InputError, match="shorter than when it was opened"):
        list(tensor.parts())


def test_without_the_package(tmp_path, monkeypatch):
    path, _ = quantized(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    refused(path, "takes the package gguf, which is not installed", "qspec-jax[gguf]")


def test_numbers_that_are_not_finite_are_named(tmp_path, caplog):
    config = hf_config()
    tensors = random_tensors(config, dtype="float16")
    tensors["model.layers.0.mlp.up_proj.weight"][0, 0] = np.inf
    load_model(write_gguf(tmp_path / "model.gguf", config, tensors), dtype="float32")
    assert "1 tensor holds numbers that are not finite: blk.0.ffn_up.weight" in caplog.text
