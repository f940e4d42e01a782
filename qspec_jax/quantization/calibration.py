"""Calibrated INT4 and nested weights: each linear layer is rounded for the inputs that it meets on some text (GPTQ, arXiv 2210.17323).

The model is walked layer by layer, so that one layer's second moments are alive at a time. The inputs are the target's own.
"""

import itertools
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.formats.weights import Int4Weight, NestedWeight
from qspec_jax.errors import InputError
from qspec_jax.models.block import Angles, Block
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import attend_prompt, padded
from qspec_jax.progress import progress_bar, working
from qspec_jax.quantization.weights import quantize_weight

# The linear layers that read each of a block's hidden states, in models that have them.
READERS = {
    "attention": ("q_proj", "k_proj", "v_proj"),
    "attended": ("o_proj",),
    "mlp": ("gate_proj", "up_proj"),
    "mlp_hidden": ("down_proj",),
}
MAX_TEXTS, MAX_TOKENS, MAX_TEXT_TOKENS = 512, 32768, 4096


def quantize_linears_for(
    model: Llama, texts: Sequence[Sequence[int]], *, quantize: Callable = quantize_weight, progress: bool | None = None
) -> Llama:
    """The model with INT4 linear layers that err least on these texts, lists of token ids; with `quantize_nested` for `quantize`, with
    nested ones.

    A few thousand tokens of what the model will read are enough: the prompt itself will do. Only the last MAX_TEXT_TOKENS of each text
    are used, fewer where there are many texts. progress: a bar on standard error; None shows it on a terminal. Raises InputError for no
    texts, an empty one, and activations that are not finite.
    """
    texts = texts[:MAX_TEXTS]
    most = min(MAX_TEXT_TOKENS, MAX_TOKENS // max(1, len(texts)))
    if model.axis is not None:
        raise InputError("calibration is for a model on one device, and this one is divided over several; draft without it")
    rows = [list(text)[-most:] for text in texts]
    if not rows or not all(rows):
        raise InputError("calibration needs texts with at least one token each")
    tokens, n = padded(rows)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    angles = model.angles(positions, jnp.broadcast_to(n[:, None], tokens.shape))
    valid = positions < n[:, None]
    x = model.embed(tokens)
    weights = model.weights()
    with progress_bar(progress=progress, total=len(model.layers), desc="calibrate", unit="layer") as bar:
        for i, block in enumerate(model.layers):
            with working(f"calibrating layer {i + 1} of {len(model.layers)}"):
                x, moments = _block(block, x, angles, valid)
                if not all(bool(jnp.isfinite(m).all()) for m in moments.values()):
                    raise InputError(f"calibration: layer {i} has activations that are not finite; use a wider dtype or do not calibrate")
                for source, second in moments.items():
                    paths = [path for name in READERS[source] if (path := f"layers.{i}.{name}.weight") in weights]
                    weights |= zip(paths, _quantized(quantize, [weights[path] for path in paths], second))
            bar.update()
    return model.with_weights(weights)


@jax.jit
def _block(
    block: Block, x: Float[Array, "B S D"], angles: Angles, valid: Bool[Array, "B S"]
) -> tuple[Float[Array, "B S D"], dict[str, Array]]:
    """A block's output, and for each hidden state h that its linear layers read, the second moments: h h^T summed over valid tokens.

    Experts are left out, as drafts read the target's own.
    """

    def moments(h: Float[Array, "B S in"]) -> Float[Array, "in in"]:
        h = jnp.where(valid[..., None], h, 0).astype(accumulation_dtype(h.dtype))
        return jnp.einsum("bsi,bsj->ij", h, h, precision=lax.Precision.HIGHEST)

    q, k, v = block.before_attention(x, *block.angles_of(angles))
    attended = attend_prompt(q, k, v, window=block.window)
    found = {"attention": moments(block.attention_input(x)), "attended": moments(attended.reshape(*attended.shape[:2], -1))}
    x, h = block.add_attention(x, attended)
    if block.experts is None:
        found |= {"mlp": moments(h), "mlp_hidden": moments(block.mlp_hidden(h))}
    return x + block.mlp(h), found


def _quantized(quantize: Callable, weights: Sequence[Array], moments: Float[Array, "in in"]) -> list[Int4Weight | NestedWeight]:
    """The quantized weights of linear layers with the same input. Inputs are rounded one by one, which takes long: all outputs together."""
    whole = quantize(jnp.concatenate(weights), moments)
    ends = list(itertools.accumulate(len(weight) for weight in weights))
    rows = [slice(begin, end) for begin, end in zip([0, *ends], ends)]
    return [jax.tree.map(operator.itemgetter(part), whole) for part in rows]
