"""A model that skips the attention or the MLP of some layers: a cheaper model, with the same weights, that drafts for the whole one.

`SkippingModel` leaves its tokens' keys and values out of layers whose attention it skips (`MaskedSkippingModel` writes them), so another
model must roll these tokens back before it reads.

Source: SWIFT (arXiv 2410.06916), section 4: skipped attention and MLP sublayers of the target make a draft.
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, NoReturn, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from qspec_jax.errors import InputError
from qspec_jax.models.llama import AttendingCache
from qspec_jax.models.viewed import ViewedModel


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Sublayers that are skipped.

    Attributes:
        attention: the numbers, from 0, of the layers whose attention is skipped.
        mlp: the numbers of the layers whose MLP is skipped.
    """

    attention: frozenset[int] = frozenset()
    mlp: frozenset[int] = frozenset()

    @classmethod
    def parse(cls, text: str) -> "Self | Deferred":
        """Reads layers such as (3,5a,6m): all of layer 3, the attention of layer 5, the MLP of layer 6; or none, or auto.

        Raises InputError for any other text.
        """
        if text == "auto":
            return DEFERRED
        inside = text[1:-1] if text.startswith("(") and text.endswith(")") else text
        items = [] if text == "none" else inside.split(",")
        found = [re.fullmatch(r"([0-9]{1,9})([am]?)", item.strip()) for item in items]
        if None in found:
            raise InputError(
                f"draft skip {text!r} should be none, auto, or layers such as (3,5a,6m): all of 3, the attention of 5, the MLP of 6"
            )
        named = [(int(match[1]), part) for match in found for part in match[2] or "am"]
        if again := [number for i, (number, part) in enumerate(named) if (number, part) in named[:i]]:
            raise InputError(f"draft skip {text!r} names layer {again[0]} twice")
        return cls(*(frozenset(number for number, named_part in named if named_part == part) for part in "am"))

    def __str__(self) -> str:
        """The text that `parse` reads."""
        both = self.attention & self.mlp
        texts = [str(i) if i in both else f"{i}{'a' if i in self.attention else 'm'}" for i in sorted(self.attention | self.mlp)]
        return f"({','.join(texts)})" if texts else "none"

    def __bool__(self) -> bool:
        return bool(self.attention or self.mlp)

    def check(self, layers: int) -> None:
        """Raises InputError for a layer that a model with `layers` layers does not have, and if all are skipped."""
        if beyond := [number for number in sorted(self.attention | self.mlp) if number >= layers]:
            raise InputError(f"draft skip names layer {beyond[0]}; the model has the layers 0 to {layers - 1}")
        if len(self.attention & self.mlp) == layers:
            raise InputError(f"draft skip should leave something of the model's {layers} layers")

    def weights(self, paths: Sequence[str]) -> set[str]:
        """The weights of a model, by their paths (`Llama.weights`), that a pass does not read."""
        attention = (
            *("input_norm", "q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "q_width_norm", "k_width_norm"),
            *("o_proj", "attention_output_norm"),
        )

        def left_out(path: str) -> bool:
            parts = path.split(".")
            return parts[0] == "layers" and int(parts[1]) in (self.attention if parts[2] in attention else self.mlp)

        return set(filter(left_out, paths))


NO_LAYERS = Skipped()


class Deferred:
    """Layers that are still to be chosen for the prompts (`decoding.skip_search`). `check` passes; any other use raises InputError."""

    def check(self, layers: int) -> None:
        """Checks nothing: there are no layers yet to compare with the model's."""

    def _refuse(self, *_) -> NoReturn:
        raise InputError("draft skip=auto needs prompts to choose by; name the layers, or give skip=none")

    __bool__ = weights = _refuse
    attention = mlp = property(_refuse)


DEFERRED = Deferred()


class _Incomplete(ViewedModel):
    """A model that reads its cache through a view and skips layers, so that it cannot be a target."""

    def watched(self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AttendingCache, **asked: Any) -> NoReturn:
        raise ValueError("a layer-skipping model cannot be used as target")


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class SkippingModel(_Incomplete):
    """A model that reads its cache through a view, without the skipped sublayers."""

    skipped: Skipped

    def tree_flatten(self):
        children, tree = super().tree_flatten()
        return children, (tree, self.skipped)

    @classmethod
    def tree_unflatten(cls, aux, children):
        (tree, skipped), (leaves, view) = aux, children
        return cls(jax.tree.unflatten(tree, leaves), view, skipped)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AttendingCache
    ) -> tuple[Float[Array, "B T V"], AttendingCache]:
        model, skipped, layers = self.model, self.skipped, list(cache.layers)
        x, angles = model.embed(tokens), model.angles(positions, positions + 1)
        kept = [i for i in range(len(layers)) if i not in skipped.attention & skipped.mlp]
        # One kernel does everything between two attentions if nothing is skipped there. qkv: for the next layer, None if not computed yet;
        # added: the final layer's MLP output, not yet added to x; carry: the kernel's handoff, valid between consecutive calls alone.
        qkv = added = carry = None
        views = self.views
        reading = cache.for_pass(tuple(None if i in skipped.attention else view for i, view in enumerate(views)))
        for i, following in zip(kept, [*kept[1:], None]):
            block = model.layers[i]
            if i in skipped.attention:
                x += block.mlp(block.mlp_input(x))
                continue
            qkv = block.qkv(block.attention_input(x)) if qkv is None else qkv
            attended, layers[i], _ = reading.attend(i, *block.for_attention(qkv, *block.angles_of(angles)), view=views[i])
            qkv = None
            if i in skipped.mlp:
                x, carry = block.add_attention(x, attended)[0], None
            elif following is not None and following not in skipped.attention:
                x, qkv, carry = block.until(model.layers[following], x, attended, carry)
            else:
                (x, added, _), carry = block.until(None, x, attended, carry), None
                x, added = (x, added) if following is None else (x + added, None)
        return model.logits(x, added), cache.advance(tuple(layers), tokens.shape[1])


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class MaskedSkippingModel(_Incomplete):
    """A model with the logits of `SkippingModel` that computes skipped sublayers too, so that one program serves all choices.

    Attributes:
        keep: keep[layer, 0] is False for layers whose attention is skipped, keep[layer, 1] for those whose MLP is.
    """

    keep: Bool[Array, "L 2"]

    def tree_flatten(self):
        children, tree = super().tree_flatten()
        return (*children, self.keep), tree

    @classmethod
    def tree_unflatten(cls, tree, children):
        leaves, view, keep = children
        return cls(jax.tree.unflatten(tree, leaves), view, keep)

    def __call__(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], cache: AttendingCache
    ) -> tuple[Float[Array, "B T V"], AttendingCache]:
        model, layers = self.model, list(cache.layers)
        x, angles = model.embed(tokens), model.angles(positions, positions + 1)
        reading = cache.for_pass(self.views)
        for i, block in enumerate(model.layers):
            qkv = block.qkv(block.attention_input(x))
            attended, layers[i], _ = reading.attend(i, *block.for_attention(qkv, *block.angles_of(angles)), view=self.views[i])
            x = jnp.where(self.keep[i, 0], block.add_attention(x, attended)[0], x)
            x = jnp.where(self.keep[i, 1], x + block.mlp(block.mlp_input(x)), x)
        return model.logits(x), cache.advance(tuple(layers), tokens.shape[1])
