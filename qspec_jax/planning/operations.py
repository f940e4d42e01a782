"""FLOPs and bytes of a model's passes: of its linear layers and of its attention, for one step, a verification or a prefill.

What is counted is what has to be done: every weight and every cached key and value is read once, of experts those that are chosen
(`ExpertsConfig.read`), activations are written and read once, and attention scores never leave the chip, as in flash attention (QuantSpec,
arXiv 2502.10424, section 3.1 and table 1). A multiplication and an addition are two FLOPs. Models and full caches are in bfloat16.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from qspec_jax.drafts.step_bytes import ITEM_BYTES, bytes_of
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.experts import is_expert_matrix
from qspec_jax.planning.steps import StepReads
from qspec_jax.quantization.outline import int4_outline, outline
from qspec_jax.quantization.weights import is_linear, quantize_rows


@dataclasses.dataclass(frozen=True)
class Work:
    """FLOPs, and bytes that must move: stored ones (weights or cache), and activations."""

    flops: float = 0.0
    stored_bytes: float = 0.0
    activation_bytes: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.stored_bytes + other.stored_bytes, self.activation_bytes + other.activation_bytes)

    def __rmul__(self, count: float) -> "Work":
        return Work(count * self.flops, count * self.stored_bytes, count * self.activation_bytes)

    @property
    def bytes(self) -> float:
        return self.stored_bytes + self.activation_bytes

    @property
    def intensity(self) -> float:
        """FLOPs per byte; 0 where nothing moves."""
        return self.flops / self.bytes if self.bytes else 0.0


@dataclasses.dataclass(frozen=True)
class PassWork:
    """The work of one pass: of the linear layers, the head among them, and of attention."""

    linear: Work
    attention: Work

    @property
    def total(self) -> Work:
        return self.linear + self.attention


def layer_kinds(config: LlamaConfig, layers: Sequence[int] | None = None) -> Counter[int]:
    """The number of layers with the same shapes, by the first such layer of the model. layers: those that count; None: all."""
    first = {i in config.expert_layers: i for i in reversed(range(config.num_layers))}
    return Counter(first[i in config.expert_layers] for i in (range(config.num_layers) if layers is None else layers))


def linear_shapes(config: LlamaConfig, layer: int = 0) -> list[tuple[int, int]]:
    """Outputs and inputs of the matmuls of a layer, without those of experts, as they are launched: q, k and v; o; gate, if there is one,
    and up; down."""
    c = config
    attended = c.num_heads * c.head_dim
    qkv = attended + 2 * c.num_kv_heads * c.head_dim
    shapes = [(qkv, c.hidden_size), (c.hidden_size, attended)]
    if layer in c.expert_layers:
        return shapes
    return [*shapes, ((1 + c.gated_mlp) * c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size)]


def linear_parameters(config: LlamaConfig, layer: int = 0) -> int:
    """Numbers in the matrices of one layer, without those of experts."""
    return sum(out * inputs for out, inputs in linear_shapes(config, layer))


def _expert_shapes(config: LlamaConfig, layer: int) -> list[tuple[int, int]]:
    """Outputs and inputs of the matmuls of a layer's router and of the experts that a token goes through."""
    if layer not in config.expert_layers:
        return []
    experts, hidden = config.experts, config.hidden_size
    return [(experts.count, hidden)] + experts.chosen * [(2 * experts.intermediate_size, hidden), (hidden, experts.intermediate_size)]


def matrix_parameters(config: LlamaConfig) -> int:
    """Numbers by which a token is multiplied in all layers."""
    return sum(count * sum(out * inputs for out, inputs in _all_shapes(config, layer)) for layer, count in layer_kinds(config).items())


def _all_shapes(config: LlamaConfig, layer: int) -> list[tuple[int, int]]:
    return linear_shapes(config, layer) + _expert_shapes(config, layer)


def _activations(config: LlamaConfig) -> int:
    """Numbers that a token reads and writes in the matmuls of all layers."""
    return sum(count * sum(out + inputs for out, inputs in _all_shapes(config, layer)) for layer, count in layer_kinds(config).items())


@functools.cache
def _weights(config: LlamaConfig, bits: int) -> dict[str, int]:
    """Bytes of each weight of a model by its path. bits: of its linear layers, 4, or others for what the config says."""
    return {path: bytes_of(weight) for path, weight in outline(config, int4=bits == 4).weights().items()}


def int4_bytes(config: LlamaConfig, layer: int = 0) -> int:
    """Bytes of the matrices of one layer in INT4, without those of experts."""
    return sum(size for path, size in _weights(config, 4).items() if _in_layer(path, layer) and is_linear(path))


def int4_matrix_bytes(out: int, inputs: int, group_size: int | None = None) -> int:
    """Bytes of a matrix in INT4: codes, and a scale and a zero for each group of inputs. group_size: see `LlamaConfig.int4_group_size`."""
    return bytes_of(int4_outline((out, inputs), group_size=group_size))


def layer_weight_bytes(config: LlamaConfig, bits: int, layer: int = 0, *, rows: int | None = None) -> int:
    """Bytes of one layer's weights that a pass reads.

    Args:
        config: of the model.
        bits: of linear layers, 4, or others for what the config says.
        layer: its number.
        rows: tokens of the pass, which read the experts that they choose (`ExpertsConfig.read`); None: all experts.
    """
    of_layer = {path: size for path, size in _weights(config, bits).items() if _in_layer(path, layer)}
    experts = sum(size for path, size in of_layer.items() if is_expert_matrix(path))
    return sum(of_layer.values()) - experts + (config.experts.read(experts, rows) if experts else 0)


def _in_layer(path: str, layer: int) -> bool:
    return path.startswith(f"layers.{layer}.")


def head_bytes(config: LlamaConfig, bits: int) -> int:
    """Bytes of the head. bits: 8 for INT8, 16 for bfloat16."""
    head = jax.ShapeDtypeStruct((config.vocab_size, config.hidden_size), jnp.bfloat16)
    return bytes_of(jax.eval_shape(quantize_rows, head) if bits == 8 else head)


def step_weight_bytes(reads: StepReads, rows: int = 1) -> int:
    """Bytes of the weights that a step reads, in bfloat16 where they are not quantized; `drafts.step_bytes.weight_bytes` counts the same of
    a model that is there. rows: tokens of the step."""
    layers = 0
    for bits in {layer.weight_bits for layer in reads.layers}:
        kinds = layer_kinds(reads.config, [i for i, layer in enumerate(reads.layers) if layer.weight_bits == bits])
        layers += sum(count * layer_weight_bytes(reads.config, bits, layer, rows=rows) for layer, count in kinds.items())
    return layers + _weights(reads.config, 16)["norm.weight"] + head_bytes(reads.config, reads.head_bits)


def model_bytes(config: LlamaConfig) -> int:
    """Bytes of all weights of a model, in bfloat16."""
    return sum(_weights(config, 16).values())


def pass_work(reads: StepReads, *, batch: int, tokens: int) -> PassWork:
    """The work of feeding `tokens` new tokens to each of `batch` rows, which are among those that `reads` counts."""
    c, rows = reads.config, batch * tokens
    activations = _activations(c) + c.hidden_size + c.vocab_size
    matrices = matrix_parameters(c) + c.vocab_size * c.hidden_size
    linear = Work(2.0 * rows * matrices, step_weight_bytes(reads, rows), rows * activations * ITEM_BYTES)
    # New token t sees all but the tokens after it.
    seen = sum(tokens * (layer.quantized + layer.full) - tokens * (tokens - 1) / 2 for layer in reads.layers)
    queries = 2 * len(reads.layers) * rows * c.num_heads * c.head_dim * ITEM_BYTES  # and what they read
    return PassWork(linear, Work(4.0 * batch * c.num_heads * c.head_dim * seen, batch * reads.cache_bytes, queries))


def prefill_work(config: LlamaConfig, *, batch: int, tokens: int) -> PassWork:
    """The work of prefill: causal attention within each prompt, and logits after its last token alone."""
    c, rows = config, batch * tokens
    activations = _activations(c)
    head = c.vocab_size * c.hidden_size
    linear = Work(
        2.0 * rows * matrix_parameters(c) + 2.0 * batch * head,
        sum(count * layer_weight_bytes(c, 16, i, rows=rows) for i, count in layer_kinds(c).items()) + (c.hidden_size + head) * ITEM_BYTES,
        (rows * activations + batch * c.vocab_size) * ITEM_BYTES,
    )
    # A token and those before it; where a layer has a window, no more than that of them.
    before_window = tokens if c.sliding_window is None else min(tokens, c.sliding_window)
    in_window = before_window * (before_window + 1) / 2 + (tokens - before_window) * before_window
    pairs = len(c.full_layers) * tokens * (tokens + 1) / 2 + len(c.windowed_layers) * in_window
    kept = 2 * c.num_kv_heads * c.head_dim
    attention = Work(
        4.0 * batch * c.num_heads * c.head_dim * pairs,
        rows * c.num_layers * kept * ITEM_BYTES,
        rows * c.num_layers * 2 * c.num_heads * c.head_dim * ITEM_BYTES,
    )
    return PassWork(linear, attention)
