"""The EAGLE-3 draft head (arXiv 2503.01840): a layer or a few that predict tokens from a target's hidden states and the tokens after them.

    hidden = head.fused(features)
    logits, fed_back, cache = head(hidden, tokens, positions, cache, view=FULL_PRECISION)

At position p the head is given the target's features of the token there, and the token of position p + 1. It predicts the token of
position p + 2. For further drafts it is given what it fed back, since the target has not read the tokens there.
"""

import dataclasses
from collections.abc import Mapping
from typing import Self

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from pallas_kernels.formats.rounding import accumulation_dtype
from pallas_kernels.formats.views import View
from pallas_kernels.matmul import linear
from pallas_kernels.norm import add_rms_norm
from qspec_jax.models import rope
from qspec_jax.models.block import Angles, Block, Linear, MakeWeight, RMSNorm, Weight, rows_of
from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.llama import AttendingCache, weights_of


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """The configuration of a head for a target.

    Attributes:
        layers: of the head's own layers, with RoPE and sizes of their own; its vocabulary is the target's.
        taps: the residual streams of the target that the head reads, in order: i is the input of layer i, which is the output of layer
            i - 1, and 0 the embeddings.
        target_hidden_size: channels of each of these.
        draft_vocab_size: the number of tokens that the head predicts, the target's whole vocabulary or a part of it.
        norm_before_residual: whether the first layer adds to the norm of the hidden states, and not to the hidden states.
        norm_before_fc: whether all features together are normed before they are fused.
        fc_norm: whether each tap is normed by itself before they are fused.
        norm_output: whether the hidden states after the last norm are fed back, and not those before it.
    """

    layers: LlamaConfig
    taps: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def feature_size(self) -> int:
        """Channels of the features of a token."""
        return len(self.taps) * self.target_hidden_size

    @property
    def has_whole_vocabulary(self) -> bool:
        """Whether the head predicts every token of the target."""
        return self.draft_vocab_size == self.layers.vocab_size

    @property
    def may_share_embedding(self) -> bool:
        """Whether the target's embedding has the shape of the head's own."""
        return self.layers.hidden_size == self.target_hidden_size

    @property
    def may_share_head(self) -> bool:
        """Whether what makes the target's logits has the shape of the head's own."""
        return self.may_share_embedding and self.has_whole_vocabulary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PassConstants:
    """What all passes of a head need and is made of its weights once: in a pass it would take launches of its own.

    Attributes:
        numbers: the head's number of each of the target's tokens, `draft_vocab_size` for those that it does not have; None where it has the
            whole vocabulary.
        input_norms: the weights of the norms of the embedding and of the hidden states.
    """

    numbers: Int[Array, "V"] | None
    input_norms: Float[Array, "2 D"]


class Eagle3Head(nnx.Module):
    """The head's weights, and a functional forward pass.

    Args:
        settings: the configuration.
        make: supplies weights, see `Llama`, and under the path `target_ids` the target's id of each of the head's tokens, in int32.
        embedding: the target's embedding [V, D], for a head without its own, which `make` is not asked for then.
        head: the same for the target's head.
    """

    def __init__(self, settings: Eagle3Config, make: MakeWeight, *, embedding: Weight | None = None, head: Weight | None = None):
        c, D, eps = settings.layers, settings.layers.hidden_size, settings.layers.rms_norm_eps
        self.settings = settings
        self.input_norm = RMSNorm(make, "input_norm", settings.feature_size, eps) if settings.norm_before_fc else None
        normed = range(len(settings.taps) if settings.fc_norm else 0)
        self.fc_norms = nnx.List([RMSNorm(make, f"fc_norms.{i}", settings.target_hidden_size, eps) for i in normed])
        self.fc = Linear(make, "fc", (D, settings.feature_size))
        self.embedding = nnx.Param(make("embedding", (c.vocab_size, D)) if embedding is None else embedding)
        self.hidden_norm = RMSNorm(make, "hidden_norm", D, eps)
        self.layers = nnx.List([Block(c, make, i, input_size=None if i else 2 * D) for i in range(c.num_layers)])
        self.norm = RMSNorm(make, "norm", D, eps)
        self.head = nnx.Param(make("head", (settings.draft_vocab_size, D)) if head is None else head)
        whole = settings.has_whole_vocabulary
        self.target_ids = None if whole else nnx.Variable(make("target_ids", (settings.draft_vocab_size,)))

    def weights(self) -> dict[str, Weight]:
        """Every weight by its path, as `make` was given it."""
        return weights_of(self)

    def with_weights(self, weights: Mapping[str, Weight]) -> Self:
        """The head with other weights, by their paths, in any format that `linear` takes."""
        return Eagle3Head(self.settings, lambda path, shape: weights[path])

    def fusing_weights(self) -> dict[str, Weight]:
        """Those that fuse features."""
        return {path: weight for path, weight in self.weights().items() if path.partition(".")[0] in ("fc", "fc_norms", "input_norm")}

    def step_weights(self) -> dict[str, Weight]:
        """Those that a pass reads besides: not the embedding, of which it reads a row for each token."""
        left_out = {"embedding", *self.fusing_weights()}
        return {path: weight for path, weight in self.weights().items() if path not in left_out}

    @property
    def config(self) -> LlamaConfig:
        """The configuration of the head's own layers, for which its cache is made."""
        return self.settings.layers

    @property
    def taps(self) -> tuple[int, ...]:
        """The residual streams of the target that the head reads, see `Eagle3Config`."""
        return self.settings.taps

    @property
    def dtype(self) -> jnp.dtype:
        return self.norm.weight.get_value().dtype

    def fused(self, features: Float[Array, "B T channels"]) -> Float[Array, "B T D"]:
        """The hidden states that a pass is given for tokens that the target has read.

        features: the target's residual streams at `taps`, one after the other in the last axis.
        """
        x = features.astype(self.dtype)
        if self.input_norm is not None:
            x = self.input_norm(x)
        if self.fc_norms:
            weights = jnp.stack([norm.weight.get_value() for norm in self.fc_norms])
            x = normed_each(weights, x.reshape(*x.shape[:-1], len(self.fc_norms), -1), self.fc_norms[0].eps)
        return self.fc(x)

    def __call__(
        self,
        hidden: Float[Array, "B T D"],
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: AttendingCache,
        *,
        view: View | tuple[View, ...],
        only: Int[Array, "B"] | None = None,
        constants: PassConstants | None = None,
    ) -> tuple[Float[Array, "B N draft"], Float[Array, "B N D"], AttendingCache]:
        """One pass of the head over T tokens per row.

        Args:
            hidden: for each position `fused` features of the token there, or what an earlier pass fed back.
            tokens: for each position the token after it, by the target's id.
            positions: by which queries and keys are rotated.
            cache: of `config`; it holds the positions before.
            view: the part of the cache that is read, for all layers or for each.
            only: the column of each row whose logits and hidden state are returned, so that N is 1; None: those of all T.
            constants: `self.constants()`; None makes it.

        Returns:
            Logits (at least float32) of the head's own vocabulary, of the tokens that follow `tokens`; the hidden states to give the pass
            at the next position if the target has not read the token there; and the cache with these positions.
        """
        x, first = hidden.astype(self.dtype), self.layers[0]
        both = jnp.stack([rows_of(self.embedding.get_value(), tokens, self.dtype), x], -2)
        normed = normed_each((constants or self.constants()).input_norms, both, self.hidden_norm.eps)
        y = first.qkv(normed)
        x = normed[..., x.shape[-1] :] if self.settings.norm_before_residual else x
        views = view if isinstance(view, tuple) else (view,) * len(self.layers)
        angles, layers, carry, reading = self._angles(positions), [], None, cache.for_pass(views)
        for i, (block, following) in enumerate(zip(self.layers, [*self.layers[1:], None])):
            attended, layer, _ = reading.attend(i, *block.for_attention(y, *block.angles_of(angles)), view=views[i])
            x, y, carry = block.until(following, x, attended, carry)
            layers.append(layer)
        out, normed = self.norm.add(x, y)
        if only is not None:
            out, normed = (jnp.take_along_axis(each, only[:, None, None], 1) for each in (out, normed))
        logits = linear(normed, [self.head.get_value()], dtype=accumulation_dtype(normed.dtype))
        return logits, normed if self.settings.norm_output else out, cache.advance(tuple(layers), tokens.shape[1])

    def _angles(self, positions: Int[Array, "B T"]) -> Angles:
        c = self.config
        found = (rope.cos_sin(each, c.head_dim, c.max_position_embeddings, positions, positions + 1) for each in c.ropes)
        return Angles(tuple(found), None)

    def constants(self) -> PassConstants:
        """What `__call__` and `in_targets_vocabulary` take, for many passes."""
        numbers, tokens = None, self.settings.draft_vocab_size
        if self.target_ids is not None:
            none = jnp.full(self.config.vocab_size, tokens, jnp.int32)
            numbers = none.at[self.target_ids.get_value()].set(jnp.arange(tokens, dtype=jnp.int32), unique_indices=True)
        return PassConstants(numbers, jnp.stack([norm.weight.get_value() for norm in (self.layers[0].input_norm, self.hidden_norm)]))

    def in_targets_vocabulary(self, logits: Float[Array, "*rows draft"], constants: PassConstants | None = None) -> Float[Array, "*rows V"]:
        """Logits of the target's tokens: -inf for those that the head does not have. constants: `self.constants()`; None makes it."""
        numbers = (constants or self.constants()).numbers
        if numbers is None:
            return logits
        return jnp.where(numbers < logits.shape[-1], logits.at[..., numbers].get(mode="clip"), -jnp.inf)


def normed_each(weights: Float[Array, "n D"], x: Float[Array, "*rows n D"], eps: float) -> Float[Array, "*rows channels"]:
    """The n parts of each row, each after the RMSNorm with its own weight, one after the other."""
    return add_rms_norm(x, None, weights, eps=eps)[1].reshape(*x.shape[:-2], -1)
