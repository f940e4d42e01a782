"""What passes of an EAGLE-3 head read and take, and the memory that it holds, known from its shape alone.

No pass of a head has been timed by itself on a GPU. A layer of a head is counted as one of a target, with its own weights or with INT4
matmuls of a launch each; what makes its logits, and what fuses features, by their bytes and FLOPs.
"""

from collections import Counter

from pallas_kernels.formats.weights import Int4Weight, Int8Weight
from qspec_jax.caches.cache import Reads
from qspec_jax.drafts.eagle3 import Eagle3Draft
from qspec_jax.drafts.sink_window import tokens_of_sinks
from qspec_jax.drafts.step_bytes import ITEM_BYTES, bytes_of
from qspec_jax.models.eagle3 import Eagle3Head
from qspec_jax.planning.devices import Device
from qspec_jax.planning.operations import Work, linear_shapes
from qspec_jax.planning.timing import Cost, attention_cost, int4_matmul_cost, roofline


def head_cost(device: Device, draft: Eagle3Draft, *, context: int, batch: int, tokens: int) -> Cost:
    """A pass of the head over `tokens` pairs of each row, after a text of `context` tokens, without fusing features. It makes the logits of
    one pair of each row."""
    head, rows = draft.head, batch * tokens
    config, reads = head.config, Reads(0, 0, min(context, draft.sinks + draft.window) + tokens)
    weights = head.step_weights()
    in_int4 = {path for path, weight in weights.items() if isinstance(weight, Int4Weight)}
    own = Work(
        2.0 * (rows * _numbers(head) + batch * head.settings.draft_vocab_size * config.hidden_size),
        bytes_of({path: weight for path, weight in weights.items() if path not in in_int4}),
        ITEM_BYTES * (rows * config.hidden_size + batch * head.settings.draft_vocab_size),
    )
    layer = "layer_one_row" if rows == 1 else "layer_rows"
    # Two norms, RoPE, the gated activation.
    counts = Counter({"launch_small": 4 * config.num_layers} if in_int4 else {layer: config.num_layers})
    counts["layer_batch"] = (batch - 1) * config.num_layers
    cost = Cost(roofline(device, own) + batch * draft.window_bytes(reads) / device.read_bytes_per_s, counts)
    for out, inputs in (shape for i in range(config.num_layers if in_int4 else 0) for shape in _shapes(head, i)):
        cost += int4_matmul_cost(device, out, inputs, rows)
    return cost + config.num_layers * attention_cost(device, config, reads, 1, batch=batch, tokens=tokens)


def fusing_cost(device: Device, draft: Eagle3Draft, *, batch: int, tokens: int) -> Cost:
    """Fusing the target's features of `tokens` tokens of each row into what a pass of the head is given."""
    settings, rows = draft.head.settings, batch * tokens
    weights = draft.head.fusing_weights()
    numbers = settings.layers.hidden_size * settings.feature_size
    activations = rows * ITEM_BYTES * (settings.layers.hidden_size + settings.feature_size)
    return Cost(roofline(device, Work(2.0 * rows * numbers, bytes_of(weights), activations)))


def prefill_of_head(device: Device, draft: Eagle3Draft, *, batch: int, tokens: int) -> Cost:
    """Reading the pairs of prompts of `tokens` tokens that the head's window holds, besides the launches of the call."""
    read = min(tokens, draft.sinks + draft.window)
    fused = fusing_cost(device, draft, batch=batch, tokens=read)
    return Cost(fused.floor + head_cost(device, draft, context=0, batch=batch, tokens=read).floor)


def head_memory(draft: Eagle3Draft, *, batch: int, appended: int, int8_head: bool) -> int:
    """Bytes of the head's own weights, which are those that are not the target's, of its keys and values, and of the features that it
    keeps. appended: tokens that a round appends to the keys and values. int8_head: whether the target makes its logits in INT8."""
    head, settings = draft.head, draft.head.settings
    weights = dict(head.weights())
    # What may be the target's is taken to be, see `load_head`.
    if settings.may_share_embedding:
        weights.pop("embedding")
    if settings.may_share_head and (int8_head or not isinstance(weights["head"], Int8Weight)):
        weights.pop("head")
    held = Reads(0, 0, draft.sinks + draft.window + tokens_of_sinks(draft.sinks) + appended)
    features = ITEM_BYTES * (draft.taps.first + draft.taps.last) * head.config.hidden_size
    return bytes_of(weights) + batch * (draft.window_bytes(held) + features)


def _shapes(head: Eagle3Head, layer: int) -> list[tuple[int, int]]:
    """Outputs and inputs of the matmuls of a layer; the first layer reads the embedding of a token beside the hidden state."""
    (qkv, inputs), *others = linear_shapes(head.config, layer)
    return [(qkv, inputs if layer else 2 * inputs), *others]


def _numbers(head: Eagle3Head) -> int:
    """Numbers by which a pair is multiplied in the head's layers."""
    return sum(out * inputs for i in range(head.config.num_layers) for out, inputs in _shapes(head, i))
