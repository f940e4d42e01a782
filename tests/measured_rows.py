"""Measured rows of docs/, copied with the place that they come from, and which of them the planner's coefficients were fitted on.

`used` marks the rows that `qspec_jax.planning.timing.FITTED` was fitted on; all others are held to what the planner predicts.
"""

from typing import NamedTuple

LLAMA_419M = {  # docs/measurements/2026-11.md, "Whole decodes, a trained model"; its shape is qspec_jax.training.benchmark_model.RECIPE's
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 4096,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "max_position_embeddings": 66560,
    "tie_word_embeddings": True,
}


class Decode(NamedTuple):
    """A whole decode at batch 1. ratio: accepted of drafted, as it came out. baseline_ms, ms: a token, autoregressive and with the draft.
    step_ms, verify_ms: a draft step and a verification, where docs have them."""

    place: str
    arch: str
    device: str
    context: int
    gamma: int
    ratio: float
    baseline_ms: float
    ms: float
    speedup: float
    step_ms: float | None = None
    verify_ms: float | None = None
    draft: str = "quantspec"
    cache: str = "int8"
    used: bool = False


_WHOLE = "2026-11.md, Whole decodes, simulated acceptance"
_TRAINED = "2026-11.md, Whole decodes, a trained model"
_HALVES = f"{_WHOLE}, the two halves alone"
_CHANCE = f"{_WHOLE}, at a chance of 0.92"
_SPARSE = "2026-11.md, Sparse drafts on an H200"

DECODES = [
    Decode(_WHOLE, "llama-2-7b", "h100", 4096, 6, 0.917, 5.65, 2.79, 2.03, 1.90, 6.11),
    Decode(_WHOLE, "llama-2-7b", "h100", 16384, 6, 0.947, 7.74, 3.42, 2.26, 2.55, 7.28),
    Decode(_WHOLE, "llama-2-7b", "h100", 32768, 6, 0.890, 10.51, 4.54, 2.31, 3.37, 8.70),
    Decode(_WHOLE, "llama-2-7b", "h100", 65536, 6, 0.867, 16.09, 6.60, 2.44, 4.81, 11.65),
    Decode(_WHOLE, "llama-2-7b", "h200", 131072, 6, 0.937, 18.67, 7.44, 2.51, 6.04, 12.85, used=True),
    Decode(_WHOLE, "llama-3.1-8b", "h100", 4096, 6, 0.906, 5.68, 2.91, 1.96, 1.98, 6.23, used=True),
    Decode(_WHOLE, "llama-3.1-8b", "h100", 32768, 6, 0.898, 6.93, 3.38, 2.05, 2.36, 6.97),
    Decode(_WHOLE, "llama-3.1-8b", "h100", 65536, 6, 0.855, 8.32, 4.04, 2.06, 2.80, 7.85),
    Decode(_WHOLE, "llama-3.1-8b", "h100", 131072, 6, 0.915, 11.08, 4.77, 2.32, 3.59, 9.27, used=True),
    Decode(_SPARSE, "llama-2-7b", "h200", 32768, 7, 0.691, 7.49, 2.82, 2.65, 1.42, 6.20, draft="sparse:budget=0.03"),
    Decode(_SPARSE, "llama-2-7b", "h200", 65536, 7, 0.700, 11.19, 3.20, 3.50, 1.46, 8.34, draft="sparse:budget=0.03"),
    Decode(_SPARSE, "llama-2-7b", "h200", 65536, 9, 0.669, 11.19, 3.17, 3.52, 1.46, 9.26, draft="sparse:budget=0.03"),
    Decode(_SPARSE, "llama-2-7b", "h200", 131072, 7, 0.717, 18.63, 4.07, 4.58, 1.62, 12.77, draft="sparse:budget=0.03"),
    Decode(_SPARSE, "llama-2-7b", "h200", 131072, 10, 0.651, 18.63, 4.04, 4.61, 1.60, 14.62, draft="sparse:budget=0.03"),
    Decode(_SPARSE, "llama-3.1-8b", "h200", 32768, 7, 0.691, 5.01, 2.73, 1.84, 1.47, 5.35, draft="sparse:budget=0.03"),
    Decode(_SPARSE, "llama-3.1-8b", "h200", 32768, 7, 0.719, 5.02, 2.66, 1.89, 1.48, 5.32, draft="sparse:budget=0.06"),
    Decode(_SPARSE, "llama-3.1-8b", "h200", 65536, 7, 0.700, 5.97, 2.83, 2.11, 1.49, 6.06, draft="sparse:budget=0.03"),
    Decode(_SPARSE, "llama-3.1-8b", "h200", 65536, 7, 0.730, 5.97, 2.79, 2.14, 1.55, 6.05, draft="sparse:budget=0.06"),
    Decode(_SPARSE, "llama-3.1-8b", "h200", 131072, 7, 0.717, 7.82, 3.13, 2.50, 1.53, 7.61, draft="sparse:budget=0.03"),
    # Speed-ups; their baselines are those of the table above, which the times were derived with.
    Decode(_CHANCE, "llama-2-7b", "h100", 32768, 5, 0.73, 10.51, 10.51 / 1.93, 1.93),
    Decode(_CHANCE, "llama-2-7b", "h100", 65536, 4, 0.78, 16.09, 16.09 / 2.12, 2.12),
    Decode(_CHANCE, "llama-2-7b", "h200", 131072, 4, 0.81, 18.67, 8.84, 2.11),
    # The two halves of the draft, whose acceptance is not given: that of the table above is taken.
    Decode(_HALVES, "llama-2-7b", "h100", 4096, 6, 0.917, 5.65, 5.65 / 1.74, 1.74, cache="full"),
    Decode(_HALVES, "llama-2-7b", "h100", 65536, 6, 0.867, 16.09, 16.09 / 1.06, 1.06, cache="full"),
    Decode(_HALVES, "llama-2-7b", "h100", 4096, 6, 0.917, 5.65, 5.65 / 0.98, 0.98, draft="quantspec:weight_bits=16"),
    Decode(_HALVES, "llama-2-7b", "h100", 65536, 6, 0.867, 16.09, 16.09 / 1.66, 1.66, draft="quantspec:weight_bits=16"),
    # Free-running acceptance; at temperature 0 and 1.
    Decode(_TRAINED, "419m", "h200", 8192, 6, 0.993, 0.511, 0.336, 1.52),
    Decode(_TRAINED, "419m", "h200", 8192, 6, 0.902, 0.517, 0.371, 1.39),
    Decode(_TRAINED, "419m", "h200", 16384, 6, 0.995, 0.638, 0.395, 1.62),
    Decode(_TRAINED, "419m", "h200", 16384, 6, 0.895, 0.641, 0.437, 1.47),
    Decode(_TRAINED, "419m", "h200", 32768, 6, 0.987, 0.878, 0.508, 1.73),
    Decode(_TRAINED, "419m", "h200", 32768, 6, 0.905, 0.886, 0.560, 1.58),
    Decode(_TRAINED, "419m", "h200", 65536, 6, 0.996, 1.362, 0.729, 1.87),
    Decode(_TRAINED, "419m", "h200", 65536, 6, 0.857, 1.352, 0.832, 1.63),
    Decode(_TRAINED, "419m", "h100", 65536, 4, 0.975, 1.876, 0.813, 2.31),
    Decode(_TRAINED, "419m", "h100", 65536, 6, 0.963, 1.876, 0.781, 2.40),
    Decode(_TRAINED, "419m", "h100", 65536, 4, 0.914, 1.871, 0.864, 2.17),
    Decode(_TRAINED, "419m", "h100", 65536, 6, 0.898, 1.871, 0.839, 2.23),
]


class Cascade(NamedTuple):
    """A whole decode at batch 1 on an H200. ratio: accepted of drafted, as it came out. inner: the chance that the middle accepts a token
    of the first draft. ms: a token."""

    place: str
    arch: str
    context: int
    gamma: int
    ratio: float
    inner: float
    ms: float
    draft: str


_HEAD = "cascade:first=(eagle3:model=random,window=1020,weight_bits=4,head_bits=8),middle=(sparse:budget=0.06)"
CASCADES = [
    Cascade("drafts.md, cascade", "llama-3.1-8b", 32768, 7, 0.662, 0.55, 2.477, f"{_HEAD},first_gamma=2"),
    # At temperature 1. Its inner acceptance is that along held-out texts; at temperature 0 the decode repeated itself.
    Cascade("drafts.md, eagle3", "419m", 64000, 7, 0.68, 0.79, 1e3 / 2001.3, f"{_HEAD},first_gamma=3"),
    Cascade(
        "drafts.md, cascade",
        "llama-3.1-8b",
        32768,
        7,
        0.662,
        0.55,
        2.529,
        "cascade:first=prompt-lookup,middle=(sparse:budget=0.06),first_gamma=2",
    ),
]


class Attention(NamedTuple):
    """Attention of one layer, 32 query heads of 128. planes: None for bfloat16. context: of each row. listed: how many groups are read, by
    lists; None: all. observed: finding what each group was attended to as well."""

    device: str
    kernels: str
    planes: int | None
    tokens: int
    kv_heads: int
    context: tuple[int, ...]
    us: float
    used: bool = False
    listed: int | None = None
    observed: bool = False


def _k(*thousands: int) -> tuple[int, ...]:
    return tuple(1024 * n + 64 for n in thousands)


_RAGGED = (4160, 5915, 7671, 9426, 11182, 12937, 14693, 16448)
# measurements/2026-11.md, "Attention kernels". The times of `triton` are the fastest peer's over its ratio.
ATTENTION = [
    Attention("h100", "mosaic_gpu", 1, 1, 32, _k(64), 105),
    Attention("h100", "mosaic_gpu", 1, 1, 32, _k(128), 201),
    Attention("h100", "mosaic_gpu", 1, 1, 32, _k(256), 395),
    Attention("h100", "mosaic_gpu", 2, 7, 32, _k(128), 379),
    Attention("h100", "mosaic_gpu", 1, 1, 8, _k(128), 59, used=True),
    Attention("h100", "mosaic_gpu", 2, 7, 8, _k(128), 111),
    Attention("h100", "mosaic_gpu", 1, 1, 8, _RAGGED, 47),
    Attention("h100", "mosaic_gpu", None, 1, 8, _k(128), 183.9),
    Attention("h100", "mosaic_gpu", None, 7, 8, _k(128), 187),
    Attention("h200", "mosaic_gpu", 1, 1, 32, _k(128), 151),
    Attention("h200", "mosaic_gpu", 2, 7, 32, _k(128), 284),
    Attention("h200", "default", 1, 1, 32, _k(128), 200, used=True),
    Attention("h200", "default", 2, 7, 32, _k(128), 391, used=True),
    Attention("h100", "triton", 1, 1, 32, _k(64), 356 / 2.28),
    Attention("h100", "triton", 1, 1, 32, _k(128), 701 / 2.39, used=True),
    Attention("h100", "triton", 1, 1, 32, _k(256), 1401 / 2.45),
    Attention("h100", "triton", 2, 7, 32, _k(128), 714 / 0.83, used=True),
    Attention("h100", "triton", 1, 1, 8, _k(128), 183 / 2.01, used=True),
    Attention("h100", "triton", 2, 7, 8, _k(128), 456 / 1.62, used=True),
    Attention("h100", "triton", 1, 1, 8, _RAGGED, 125 / 1.52),
    Attention("h100", "triton", None, 1, 8, _k(128), 183.2 / 0.98),
    Attention("h100", "triton", None, 7, 8, _k(128), 456 / 2.40),
    # H200, 2026-11-23, jax 0.11.2: alone, and within rounds of whole decodes with 8 drafts, of both launches of each attention.
    Attention("h200", "mosaic_gpu", 1, 1, 32, _k(128), 154.9),
    Attention("h200", "mosaic_gpu", 1, 1, 8, _k(128), 46.6),
    Attention("h200", "mosaic_gpu", 2, 7, 32, _k(128), 288.9),
    Attention("h200", "mosaic_gpu", 2, 7, 32, _k(128), 292.3, observed=True),
    Attention("h200", "mosaic_gpu", 2, 7, 8, _k(128), 102.0, used=True),
    Attention("h200", "mosaic_gpu", 2, 7, 8, _k(128), 111.3, used=True, observed=True),
    Attention("h200", "mosaic_gpu", 2, 9, 8, _k(128), 128),
    Attention("h200", "mosaic_gpu", 2, 9, 8, _k(128), 141, observed=True),
    Attention("h200", "mosaic_gpu", 2, 8, 32, _k(128), 287.0, observed=True),
    Attention("h200", "mosaic_gpu", 2, 13, 32, _k(128), 332.5, observed=True),
    Attention("h200", "mosaic_gpu", 2, 8, 8, _k(128), 111.1, observed=True),
    Attention("h200", "mosaic_gpu", 2, 8, 32, _k(32), 83.5, observed=True),
    Attention("h200", "mosaic_gpu", 2, 8, 8, _k(32), 39.9, observed=True),
    Attention("h200", "mosaic_gpu", 1, 1, 8, _k(128), 6.6 + 2.2, used=True, listed=31),
    Attention("h200", "mosaic_gpu", 1, 1, 32, _k(32), 7.0 + 1.45, listed=8),
]


class Matmul(NamedTuple):
    """An INT4 matmul alone."""

    out: int
    inputs: int
    rows: int
    us: float
    used: bool = False
    device: str = "h100"


# measurements/2026-11.md, "INT4 matmul kernels".
MATMULS = [
    Matmul(28672, 4096, 1, 24.9, used=True),
    Matmul(28672, 4096, 4, 25.3),
    Matmul(28672, 4096, 7, 26.1),
    Matmul(4096, 14336, 1, 13.8),
    Matmul(4096, 14336, 4, 13.9),
    Matmul(4096, 14336, 7, 17.2, used=True),
    Matmul(6144, 4096, 1, 7.2),
    Matmul(6144, 4096, 7, 7.7, used=True),
    Matmul(4096, 4096, 1, 5.6, used=True),
    Matmul(4096, 4096, 4, 5.7),
    Matmul(4096, 4096, 7, 6.2),
    # docs/measurements/kernels.md, "INT4 matmul of many rows".
    Matmul(28672, 4096, 16, 24.4, used=True, device="h200"),
    Matmul(28672, 4096, 32, 29.8, device="h200"),
    Matmul(28672, 4096, 64, 45.7, used=True, device="h200"),
    Matmul(4096, 14336, 16, 19.1, used=True, device="h200"),
    Matmul(4096, 14336, 32, 21.8, device="h200"),
    Matmul(4096, 14336, 64, 30.3, used=True, device="h200"),
    Matmul(6144, 4096, 16, 10.1, device="h200"),
    Matmul(6144, 4096, 32, 11.2, device="h200"),
    Matmul(6144, 4096, 64, 14.7, used=True, device="h200"),
    Matmul(4096, 4096, 64, 13.4, device="h200"),
    Matmul(22016, 4096, 16, 21.6, device="h200"),
    Matmul(22016, 4096, 64, 37.7, device="h200"),
    Matmul(12288, 4096, 16, 13.7, device="h200"),
    Matmul(12288, 4096, 64, 20.6, device="h200"),
]


class Prefill(NamedTuple):
    """Prefill of one prompt of Llama-3.1-8B on an H100."""

    place: str
    context: int
    seconds: float
    used: bool = False


_PREFILL = "2026-11.md, Prefill, transformers, compiling"
PREFILLS = [
    Prefill(f"{_PREFILL}, chunks of 512", 4096, 0.122),
    Prefill(f"{_PREFILL}, chunks of 512", 32768, 1.398),
    Prefill(f"{_PREFILL}, chunks of 512, another H100", 32768, 1.425),
    Prefill(f"{_PREFILL}, chunks of 512", 131072, 11.6),
    Prefill(f"{_PREFILL}, chunks of 2,048", 32768, 1.304, used=True),
    # Prompts of 128 to 1,024 tokens, log-uniform, padded to 492 in the mean.
    Prefill("batches.md, What refilling gives", 492, 0.022, used=True),
]


class Memory(NamedTuple):
    """Gigabytes with quantspec and of the baseline, with 640 new tokens (1,280 at 128k of Llama-2-7B)."""

    arch: str
    context: int
    new_tokens: int
    cache_gb: float
    share_of_full: float
    peak_gb: float
    baseline_gb: float
    used: bool = False


# measurements/2026-11.md, "Memory"
MEMORY = [
    Memory("llama-2-7b", 4096, 640, 1.38, 0.56, 18.6, 16.2),
    Memory("llama-2-7b", 16384, 640, 4.71, 0.53, 22.4, 23.0),
    Memory("llama-2-7b", 32768, 640, 9.13, 0.52, 27.5, 32.0),
    Memory("llama-2-7b", 65536, 640, 17.99, 0.52, 37.9, 50.0, used=True),
    Memory("llama-2-7b", 131072, 1280, 35.9, 0.52, 58.8, 86.3),
    Memory("llama-3.1-8b", 4096, 640, 0.35, 0.56, 20.6, 16.8),
    Memory("llama-3.1-8b", 32768, 640, 2.28, 0.52, 22.9, 21.1),
    Memory("llama-3.1-8b", 65536, 640, 4.50, 0.52, 25.7, 26.0),
    Memory("llama-3.1-8b", 131072, 640, 8.93, 0.52, 31.6, 35.9, used=True),
]


class Batch(NamedTuple):
    """200 prompts of Llama-3.1-8B on an H100, 8 at a time, 4 drafts a round, simulated acceptance of 0.92: tokens/s of prefill and decoding
    together. busy: share of the slots' rounds that worked for a prompt."""

    way: str
    tokens_per_second: float
    busy: float
    used: bool = False


# measurements/batches.md, "What refilling gives"; the command's prompts with its default seed ask for 34,127 new tokens and have 447 tokens
# on average.
BATCHES = [Batch("fixed", 736, 0.423, used=True), Batch("refilled", 1339, 0.925)]
BATCH_TOKENS, BATCH_PROMPTS, BATCH_CONTEXT = 34127, 200, 447

# measurements/2026-11.md, "Flushes": a flush of 32 layers in the runs of `bench decode`; `bench flush` had 0.8.
FLUSH_MS = 0.7
