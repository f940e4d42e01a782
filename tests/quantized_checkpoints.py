"""Small quantized checkpoints, packed by the definitions of their formats with numpy alone, and the weights that they mean.

Codes, scales and zero points are random: what matters is which weight they mean. Imports nothing of qspec_jax.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from checkpoints import hf_config, random_tensors

GROUP = 32
BLOCK = (80, 40)  # of FP8; the last blocks are partial
NF4 = (-1.0, -0.6962, -0.5251, -0.3949, -0.2844, -0.1848, -0.0911, 0.0, 0.0796, 0.1609, 0.2461, 0.3379, 0.4407, 0.5626, 0.723, 1.0)
KINDS = {np.dtype(kind): name for kind, name in ((np.float16, "F16"), (np.float32, "F32"), (ml_dtypes.bfloat16, "BF16"))}
KINDS |= {np.dtype(kind): name for kind, name in ((np.uint8, "U8"), (np.int8, "I8"), (np.int32, "I32"), (np.int64, "I64"))}
KINDS |= {np.dtype(kind): name for kind, name in ((ml_dtypes.float8_e4m3fn, "F8_E4M3"), (ml_dtypes.float8_e8m0fnu, "F8_E8M0"))}

Quantized = tuple[dict[str, np.ndarray], np.ndarray]  # a weight's tensors by their suffixes, and the weight in float32
Make = Callable[[np.random.Generator, int, int], Quantized]


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    header, end = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": KINDS[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [end, end + tensor.nbytes]}
        end += tensor.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(np.ascontiguousarray(x).tobytes() for x in tensors.values()))


def words(codes: np.ndarray, bits: int, axis: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Words of 32 bits along an axis: field i of a word holds code i of it, or code order[i]."""
    fields = 32 // bits
    codes = np.moveaxis(codes.astype(np.uint64), axis, -1)
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[-1] % fields))).reshape(len(codes), -1, fields)
    found = sum(codes[..., code] << np.uint64(bits * field) for field, code in enumerate(order or range(fields)))
    return np.moveaxis(found.astype(np.uint32).view(np.int32), -1, axis)


def scales_of(random: np.random.Generator, shape: tuple[int, ...], inputs: int, dtype: Any) -> np.ndarray:
    return ((0.5 + random.random(shape)) * inputs**-0.5 / 5).astype(dtype)


def fp8_codes(random: np.random.Generator, outputs: int, inputs: int) -> np.ndarray:
    return (20 * random.standard_normal((outputs, inputs))).astype(ml_dtypes.float8_e4m3fn)


def fp8(scale: str, block: tuple[int, int], dtype: Any, grid: Callable[[int, int], tuple[int, ...]] | None = None) -> Make:
    def make(random: np.random.Generator, outputs: int, inputs: int) -> Quantized:
        rows, columns = (whole if size == -1 else size for size, whole in zip(block, (outputs, inputs)))
        codes = fp8_codes(random, outputs, inputs)
        scales = scales_of(random, (-(-outputs // rows), -(-inputs // columns)), inputs * 16, dtype)
        full = np.repeat(np.repeat(scales.astype(np.float32), rows, 0)[:outputs], columns, 1)[:, :inputs]
        stored = scales if grid is None else scales.reshape(grid(outputs, inputs))
        return {"weight": codes, scale: stored}, codes.astype(np.float32) * full

    return make


def compressed(bits: int, group_size: int | None, symmetric: bool, ordered: bool = False) -> Make:
    def make(random: np.random.Generator, outputs: int, inputs: int) -> Quantized:
        size = group_size or inputs
        groups, half = -(-inputs // size), 1 << (bits - 1)
        codes = random.integers(-half, half, (outputs, inputs))
        zeros = random.integers(-half, half, (outputs, groups)) * (not symmetric)
        scales = scales_of(random, (outputs, groups), inputs, ml_dtypes.bfloat16)
        group = np.arange(inputs) // size
        group = random.permutation(group) if ordered else group
        tensors = {"weight_packed": words(codes + half, bits, 1), "weight_scale": scales, "weight_shape": np.array([outputs, inputs])}
        tensors |= {} if symmetric else {"weight_zero_point": words(zeros + half, bits, 0)}
        tensors |= {"weight_g_idx": group.astype(np.int32)} if ordered else {}
        return tensors, (codes - zeros[:, group]).astype(np.float32) * scales.astype(np.float32)[:, group]

    return make


def awq(random: np.random.Generator, outputs: int, inputs: int, group_size: int = GROUP) -> Quantized:
    codes, zeros = random.integers(0, 16, (inputs, outputs)), random.integers(0, 16, (inputs // group_size, outputs))
    scales, group = scales_of(random, zeros.shape, inputs, np.float16), np.arange(inputs) // group_size
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {"qweight": words(codes, 4, 1, order), "qzeros": words(zeros, 4, 1, order), "scales": scales}
    return tensors, ((codes - zeros[group]).astype(np.float32) * scales.astype(np.float32)[group]).T


def gptq(bits: int = 4, group_size: int | None = GROUP, *, first: bool = True, ordered: bool = False) -> Make:
    def make(random: np.random.Generator, outputs: int, inputs: int) -> Quantized:
        size = group_size or inputs
        codes, zeros = random.integers(0, 1 << bits, (inputs, outputs)), random.integers(0, 1 << bits, (inputs // size, outputs))
        scales, group = scales_of(random, zeros.shape, inputs, np.float16), np.arange(inputs) // size
        group = random.permutation(group) if ordered else group
        packed = words(zeros, bits, 1).view(np.uint32)
        # Version 1: one less in each field, subtracted from whole words.
        packed = packed - np.uint32(sum(1 << (bits * field) for field in range(32 // bits))) if first else packed
        tensors = {"qweight": words(codes, bits, 0), "qzeros": packed.view(np.int32), "scales": scales, "g_idx": group.astype(np.int32)}
        return tensors, ((codes - zeros[group]).astype(np.float32) * scales.astype(np.float32)[group]).T

    return make


def nf4(double: bool) -> Make:
    def make(random: np.random.Generator, outputs: int, inputs: int) -> Quantized:
        table, codes = np.array(NF4, np.float32), random.integers(0, 16, outputs * inputs).astype(np.uint8)
        blocks, state = -(-outputs * inputs // 64), {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
        tensors = {"weight": (codes[::2] << 4 | codes[1::2])[:, None], "weight.quant_map": table}
        if double:
            nested, own = random.integers(0, 256, blocks).astype(np.uint8), np.linspace(-1, 1, 256, dtype=np.float32)
            maxima = scales_of(random, (-(-blocks // 256),), inputs, np.float32)
            tensors |= {"weight.absmax": nested, "weight.nested_quant_map": own, "weight.nested_absmax": maxima}
            state |= {"nested_blocksize": 256, "nested_offset": 0.25}
            absmax = own[nested] * np.repeat(maxima, 256)[:blocks] + np.float32(0.25)
        else:
            absmax = tensors["weight.absmax"] = 5 * scales_of(random, (blocks,), inputs, np.float32)
        tensors["weight.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(state).encode(), np.uint8)
        return tensors, (table[codes] * np.repeat(absmax, 64)[: len(codes)]).reshape(outputs, inputs)

    return make


def _ct(form: str, activations: bool = False, **weights: Any) -> dict[str, Any]:
    weights = {"type": "float" if form.startswith("float") else "int", "symmetric": True, "group_size": None, "dynamic": False} | weights
    inputs = {"num_bits": 8, "type": "float", "dynamic": True} if activations else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    ct = {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], "config_groups": {"group_0": group}}
    return ct | {"sparsity_config": {}, "transform_config": {}, "kv_cache_scheme": None}


FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": None}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True, "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": False, "checkpoint_format": "gptq"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
PACK, FLOAT, BF16, F32 = "pack-quantized", "float-quantized", ml_dtypes.bfloat16, np.float32
# What config.json says of the quantization, and how a weight is made.
FORMATS: dict[str, tuple[dict[str, Any], Make]] = {
    "fp8-block": (FP8 | {"weight_block_size": list(BLOCK)}, fp8("weight_scale_inv", BLOCK, F32)),
    "fp8-ue8m0": (FP8 | {"weight_block_size": list(BLOCK), "scale_fmt": "ue8m0"}, fp8("weight_scale_inv", BLOCK, ml_dtypes.float8_e8m0fnu)),
    "fp8-tensor": (FP8 | {"activation_scheme": "static"}, fp8("weight_scale_inv", (-1, -1), BF16, lambda *_: ())),
    "fp8-output": (FP8, fp8("weight_scale", (1, -1), F32)),
    "ct-fp8-channel": (_ct(FLOAT, True, num_bits=8, strategy="channel"), fp8("weight_scale", (1, -1), BF16)),
    "ct-fp8-tensor": (_ct(FLOAT, True, num_bits=8, strategy="tensor"), fp8("weight_scale", (-1, -1), BF16, lambda *_: (1,))),
    "ct-fp8-block": (_ct(FLOAT, num_bits=8, strategy="block", block_structure=list(BLOCK)), fp8("weight_scale", BLOCK, BF16)),
    "ct-w4-group": (_ct(PACK, num_bits=4, strategy="group", group_size=GROUP), compressed(4, GROUP, True)),
    "ct-w4-asym": (_ct(PACK, num_bits=4, strategy="group", group_size=GROUP, symmetric=False), compressed(4, GROUP, False)),
    "ct-w4-channel": (_ct(PACK, num_bits=4, strategy="channel"), compressed(4, None, True)),
    "ct-w4-order": (_ct(PACK, num_bits=4, strategy="group", group_size=GROUP, actorder="group"), compressed(4, GROUP, True, True)),
    "ct-w8-channel": (_ct(PACK, num_bits=8, strategy="channel"), compressed(8, None, True)),
    "ct-w8-asym": (_ct(PACK, num_bits=8, strategy="group", group_size=GROUP, symmetric=False), compressed(8, GROUP, False)),
    "awq": (AWQ, awq),
    "gptq-v1": (GPTQ, gptq()),
    "gptq-v1-order": (GPTQ | {"desc_act": True}, gptq(ordered=True)),
    "gptq-v1-8": (GPTQ | {"bits": 8}, gptq(8)),
    "gptq-v2": (GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(first=False)),
    "gptq-channel": (GPTQ | {"group_size": -1}, gptq(4, None)),
    "nf4": (BNB, nf4(False)),
    "nf4-double": (BNB | {"bnb_4bit_use_double_quant": True}, nf4(True)),
}


def write_model(directory: Path, config: dict, tensors: dict[str, np.ndarray]) -> None:
    """Writes a checkpoint directory of a config and tensors of any dtype."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", tensors)


def make_quantized(
    name: str, architecture: str = "LlamaForCausalLM", seed: int = 0, make: Make | None = None, **changes: Any
) -> tuple[dict[str, Any], dict[str, np.ndarray], dict[str, np.ndarray]]:
    """A config.json, the tensors of a quantized checkpoint, and those of the checkpoint without quantization that it means. make: of
    weights, instead of the format's own."""
    quantization, make = FORMATS[name][0], make or FORMATS[name][1]
    config = hf_config(architecture, **({"hidden_size": 64, "head_dim": 16, "dtype": "bfloat16"} | changes))
    plain = random_tensors(config, seed=seed, dtype="bfloat16")
    quantized, random = {}, np.random.default_rng(seed)
    for path, tensor in list(plain.items()):
        if not path.endswith("_proj.weight"):
            quantized[path] = tensor
            continue
        parts, plain[path] = make(random, *tensor.shape)
        quantized |= {f"{path.removesuffix('weight')}{suffix}": part for suffix, part in parts.items()}
        assert plain[path].shape == tensor.shape and plain[path].dtype == np.float32 and math.isfinite(plain[path].std())
    return config | {"quantization_config": quantization}, quantized, plain


def write_quantized(directory: Path, name: str, **changes: Any) -> dict[str, np.ndarray]:
    """Writes a quantized checkpoint; returns the tensors of the checkpoint without quantization that it means."""
    config, tensors, plain = make_quantized(name, **changes)
    write_model(directory, config, tensors)
    return plain
