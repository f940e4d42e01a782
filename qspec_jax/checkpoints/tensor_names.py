"""The table of tensor names: where a Hugging Face checkpoint has each weight of the model."""

import dataclasses
import math
import re
from collections.abc import Container, Mapping

import jax
import jax.numpy as jnp

from qspec_jax.models.config import LlamaConfig
from qspec_jax.models.families import ARCHITECTURES
from qspec_jax.models.llama import Llama

BASE = "model."  # prefix of all names but the head's; a model that was saved without its head has no such prefix
Table = Mapping[str, tuple[str, ...]]
# An architecture's names of tensors -> paths in `Llama`; {i} is the layer. A tensor with several paths has their rows one after the other.
# If several tensors name a path, it is read from the last of them. {e} is the number of an expert: one weight is made of the tensors of all
# experts, each transposed.
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
_GATE_UP: Table = {"model.layers.{i}.mlp.gate_up_proj.weight": ("layers.{i}.gate_proj.weight", "layers.{i}.up_proj.weight")}
_PHI3: Table = _LLAMA | _GATE_UP | {"model.layers.{i}.self_attn.qkv_proj.weight": tuple(f"layers.{{i}}.{n}_proj.weight" for n in "qkv")}


def _in_layers(names: Mapping[str, str]) -> Table:
    """A table of tensors of a layer, without the part of their names and paths that all tensors of a layer have."""
    return {f"model.layers.{{i}}.{name}": (f"layers.{{i}}.{path}",) for name, path in names.items()}


_EXAONE4: Table = _LLAMA | _in_layers(
    {
        "post_attention_layernorm.weight": "attention_output_norm.weight",
        "post_feedforward_layernorm.weight": "mlp_output_norm.weight",
    }
)
_OLMO2: Table = _EXAONE4 | _in_layers({f"self_attn.{n}_norm.weight": f"{n}_width_norm.weight" for n in "qk"})
_GLM4: Table = (
    _LLAMA
    | _GATE_UP
    | _in_layers({"post_self_attn_layernorm.weight": "attention_output_norm.weight", "post_mlp_layernorm.weight": "mlp_output_norm.weight"})
)
_GEMMA3: Table = _LLAMA | _in_layers(
    {
        "post_attention_layernorm.weight": "attention_output_norm.weight",
        "pre_feedforward_layernorm.weight": "post_attention_norm.weight",
        "post_feedforward_layernorm.weight": "mlp_output_norm.weight",
    }
)
_QWEN3_MOE: Table = _LLAMA | _in_layers(
    {"mlp.gate.weight": "experts.router", **{f"mlp.experts.{{e}}.{n}_proj.weight": f"experts.{n}" for n in ("gate", "up", "down")}}
)
_HUNYUAN: Table = _LLAMA | _in_layers(
    {"self_attn.query_layernorm.weight": "q_norm.weight", "self_attn.key_layernorm.weight": "k_norm.weight"}
)
_APERTUS: Table = _LLAMA | _in_layers(
    {
        "attention_layernorm.weight": "input_norm.weight",
        "feedforward_layernorm.weight": "post_attention_norm.weight",
        **{f"mlp.act_fn.{name}": f"activation.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")},
    }
)
TABLES: dict[str, Table] = dict.fromkeys(ARCHITECTURES, _LLAMA) | {
    "Phi3ForCausalLM": _PHI3,
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "Olmo2ForCausalLM": _OLMO2,
    "Olmo3ForCausalLM": _OLMO2,
    "Gemma3ForCausalLM": _GEMMA3,
    "Exaone4ForCausalLM": _EXAONE4,
    "Glm4ForCausalLM": _GLM4,
    "HunYuanDenseV1ForCausalLM": _HUNYUAN,
    "ApertusForCausalLM": _APERTUS,
}
# The names' prefix where the model is a part of a multimodal one, as transformers writes them, and other spellings of their beginnings.
WRAPPED = "language_model."
_WRAPPED_SPELLINGS = {"model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head."}


def table(config: LlamaConfig) -> Table:
    """The table of a model's checkpoint."""
    prefix = "" if config.wrapper is None else WRAPPED
    return {prefix + name: paths for name, paths in TABLES[config.architecture].items()}


@dataclasses.dataclass(frozen=True)
class Place:
    """A weight's place in a checkpoint: a whole tensor, its rows from `first` on, or the tensors of all experts.

    Attributes:
        name: of the tensor, or of the experts' tensors with * for an expert's number.
        shape: of the weight.
        first: the first row in the tensor, if the tensor has other weights too.
        experts: the number of experts, whose tensors, transposed, are one weight [experts, in, out]; None for a weight in one tensor.
    """

    name: str
    shape: tuple[int, ...]
    first: int | None = None
    experts: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all tensors that the weight is in."""
        return (self.name,) if self.experts is None else tuple(self.name.replace("*", str(e)) for e in range(self.experts))

    @property
    def size(self) -> int:
        """The number of the weight's elements."""
        return math.prod(self.shape)


def places(config: LlamaConfig) -> dict[str, Place]:
    """The place of each weight in a checkpoint, by the weight's path (see `Llama.weights`)."""
    of_path = {path: (name, paths) for name, paths in table(config).items() for path in paths}
    shapes = weight_shapes(config)
    found = {}
    for path, shape in shapes.items():
        layer = re.match(r"layers\.(\d+)\.", path)
        number = layer[1] if layer else ""
        name, paths = of_path[path if layer is None else "layers.{i}." + path[layer.end() :]]
        parts = [other.replace("{i}", number) for other in paths]
        before = parts[: parts.index(path)]
        found[path] = Place(
            name.replace("{i}", number).replace("{e}", "*"),
            shape,
            sum(shapes[other][0] for other in before) if len(parts) > 1 else None,
            shape[0] if "{e}" in name else None,
        )
    return found


def canonical(name: str, expected: Container[str]) -> str:
    """The name of a stored tensor in a whole model: with or without `BASE`, or in the spelling of another version of transformers, of
    which `expected` has one; else the name itself."""
    spellings = [name, name.removeprefix(BASE), BASE + name]
    spellings += [here + name.removeprefix(other) for other, here in _WRAPPED_SPELLINGS.items() if name.startswith(other)]
    spellings.append(WRAPPED + BASE + name.removeprefix(WRAPPED))
    return next((known for known in spellings if known in expected), name)


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
        if place.experts is not None:
            shapes |= dict.fromkeys(place.names, place.shape[:0:-1])
            continue
        before = shapes.get(place.name)
        shapes[place.name] = place.shape if before is None else (before[0] + place.shape[0], *place.shape[1:])
    return shapes
