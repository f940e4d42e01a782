"""The table of tensor names: where a Hugging Face checkpoint has each weight of the model."""

import dataclasses
import math
import re
from collections.abc import Container, Mapping

import jax
import jax.numpy as jnp

from qspec_jax.models.config import ARCHITECTURES, LlamaConfig
from qspec_jax.models.llama import Llama

BASE = "model."  # prefix of all names but the head's; a model that was saved without its head has no such prefix
Table = Mapping[str, tuple[str, ...]]
# An architecture's names of tensors -> paths in `Llama`; {i} is the layer. A tensor with several paths has their rows one after the other.
# If several tensors name a path, it is read from the last of them.
_LLAMA: Table = {
    "model.embed_tokens.weight": ("embedding",),
    "lm_head.weight": ("head",),
    "model.norm.weight": ("norm.weight",),
    "model.layers.{i}.input_layernorm.weight": ("layers.{i}.input_norm.weight",),
    "model.layers.{i}.post_attention_layernorm.weight": ("layers.{i}.post_attention_norm.weight",),
    **{f"model.layers.{{i}}.self_attn.{n}.weight": (f"layers.{{i}}.{n}.weight",) for n in ("q_norm", "k_norm")},
    **{
        f"model.layers.{{i}}.{part}.{n}_proj.{w}": (f"layers.{{i}}.{n}_proj.{w}",)
        for part, names in (("self_attn", "qkvo"), ("mlp", ("gate", "up", "down")))
        for n in names
        for w in ("weight", "bias")
    },
}
_PHI3: Table = _LLAMA | {
    "model.layers.{i}.self_attn.qkv_proj.weight": tuple(f"layers.{{i}}.{n}_proj.weight" for n in "qkv"),
    "model.layers.{i}.mlp.gate_up_proj.weight": ("layers.{i}.gate_proj.weight", "layers.{i}.up_proj.weight"),
}
TABLES: dict[str, Table] = dict.fromkeys(ARCHITECTURES, _LLAMA) | {"Phi3ForCausalLM": _PHI3}


@dataclasses.dataclass(frozen=True)
class Place:
    """A weight's place in a checkpoint: a whole tensor, or its rows from `first` on."""

    name: str
    shape: tuple[int, ...]
    first: int | None = None

    @property
    def size(self) -> int:
        """The number of the weight's elements."""
        return math.prod(self.shape)


def places(config: LlamaConfig) -> dict[str, Place]:
    """The place of each weight in a checkpoint, by the weight's path (see `Llama.weights`)."""
    of_path = {path: (name, paths) for name, paths in TABLES[config.architecture].items() for path in paths}
    shapes = weight_shapes(config)
    found = {}
    for path, shape in shapes.items():
        layer = re.match(r"layers\.(\d+)\.", path)
        number = layer[1] if layer else ""
        name, paths = of_path[path if layer is None else "layers.{i}." + path[layer.end() :]]
        before = [shapes[other.replace("{i}", number)][0] for other in paths]
        at = [other.replace("{i}", number) for other in paths].index(path)
        found[path] = Place(name.replace("{i}", number), shape, sum(before[:at]) if len(paths) > 1 else None)
    return found


def canonical(name: str, expected: Container[str]) -> str:
    """The name of a stored tensor in a whole model: with or without `BASE`, whichever `expected` has; else the name itself."""
    return next((known for known in (name, name.removeprefix(BASE), BASE + name) if known in expected), name)


def weight_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the model's weights, by their paths."""
    shapes = {}

    def make(path: str, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        shapes[path] = shape
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    Llama(config, make)
    return shapes


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shapes of the checkpoint's tensors, by their names."""
    shapes: dict[str, tuple[int, ...]] = {}
    for place in places(config).values():
        rows = shapes.get(place.name, (0,))[0] + place.shape[0]
        shapes[place.name] = (rows, *place.shape[1:])
    return shapes
