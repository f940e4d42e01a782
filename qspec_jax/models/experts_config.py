"""The experts of a model's layers, read from a config.json and checked."""

import dataclasses

from qspec_jax.models.config_values import Values

_COUNT = ("num_experts", "num_local_experts")  # transformers 5 writes the second for the first
_DEFAULT_COUNT = 128
_MAX_COUNT = 4096


@dataclasses.dataclass(frozen=True)
class ExpertsConfig:
    """The experts of layers: MLPs, of which each token goes through a few.

    Attributes:
        layers: the numbers of the layers that have experts; the others have one MLP.
        count: the experts of a layer.
        chosen: the experts that each token goes through.
        intermediate_size: of the MLP of one expert.
        normalized: whether the shares of a token's experts, by which their outputs are multiplied, are divided by their sum.
    """

    layers: tuple[int, ...]
    count: int
    chosen: int
    intermediate_size: int
    normalized: bool

    def read(self, size: int, rows: int | None) -> int:
        """The bytes that a pass reads of experts whose weights, all together, have `size` bytes.

        rows: tokens of the pass. One token reads those that it chooses. Several are taken to choose independently of each other, each
        expert as often as any other: expected are count * (1 - (1 - chosen / count) ** rows) different ones. None: all.
        """
        return size if rows is None else round(size * (1 - (1 - self.chosen / self.count) ** rows))


def read_experts(values: Values, layers: int) -> ExpertsConfig | None:
    """The experts of a model; None if no layer has any.

    Args:
        values: of the config.json.
        layers: the number of the model's layers.

    Raises:
        InputError: for a setting that is impossible.
    """
    given = [key for key in _COUNT if key in values.raw]
    counts = [values.number(key, above=-1, maximum=_MAX_COUNT) for key in given] or [_DEFAULT_COUNT]
    if len(set(counts)) > 1:
        raise values.error(f"{given[0]} is {counts[0]} and {given[1]} is {counts[1]}; both should be the number of experts of a layer")
    without = values.raw["mlp_only_layers"]
    if not isinstance(without, list) or not all(type(each) is int and 0 <= each < layers for each in without):
        raise values.error(f"mlp_only_layers is {without!r}, should be a list of layers, from 0 to {layers - 1}")
    step = values.number("decoder_sparse_step")
    found = ExpertsConfig(
        layers=tuple(i for i in range(layers) if counts[0] and i not in without and (i + 1) % step == 0),
        count=counts[0],
        chosen=values.number("num_experts_per_tok"),
        intermediate_size=values.number("moe_intermediate_size"),
        normalized=values.flag("norm_topk_prob"),
    )
    if found.layers and found.chosen > found.count:
        raise values.error(f"num_experts_per_tok is {found.chosen}, should be at most num_experts, which is {found.count}")
    return found if found.layers else None
