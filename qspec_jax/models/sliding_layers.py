"""Which layers of a model have a sliding window, read from a config.json and checked."""

from collections.abc import Sequence

from qspec_jax.models.config_values import Values
from qspec_jax.models.families import ALL, ALL_IF_USED, BUT_FIRST, BUT_LAST, FROM, WITHOUT_ROPE, Architecture

_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_window(values: Values, architecture: Architecture, layers: int, nope_layers: Sequence[int]) -> tuple[tuple[int, ...], int | None]:
    """The layers with a sliding window, and the number of tokens that a token attends to there, itself included; None without such layers.

    Args:
        values: of the config.json.
        architecture: how it differs from Llama.
        layers: their number.
        nope_layers: those without RoPE.

    Raises:
        InputError: for a setting that is missing or impossible.
    """
    types = values.raw.get("layer_types")
    if types is not None and not (isinstance(types, list) and all(each in (_FULL, _SLIDING) for each in types)):
        raise values.error(f"layer_types {types!r} should be a list of {_FULL} and {_SLIDING}")
    if types is not None and len(types) != layers:
        raise values.error(f"layer_types should have an entry for each of {layers} layers, and has {len(types)}")
    if types is not None and architecture.windowed not in (ALL, ALL_IF_USED):
        found = tuple(i for i, each in enumerate(types) if each == _SLIDING)
        if found and architecture.windowed is None:
            raise values.error(f"layer_types has {_SLIDING}, which is not supported for this architecture; only full attention is")
    else:
        found = _by_rule(values, architecture, layers, nope_layers)
    if not found:
        return (), None
    if "sliding_window" not in values.raw:
        if types is not None and _SLIDING in types:
            raise values.error(f"sliding_window is missing, and layer_types has {_SLIDING}")
        return (), None
    return found, values.number("sliding_window")


def _by_rule(values: Values, architecture: Architecture, layers: int, nope_layers: Sequence[int]) -> tuple[int, ...]:
    """The layers that have the window if there is one."""
    period = values.raw.get("sliding_window_pattern", architecture.period)
    if isinstance(period, str):  # such as LLLG, of which the last letter is of the layer that attends to everything
        period = len(period)
    elif architecture.windowed in (BUT_LAST, BUT_FIRST):
        period = values.number("sliding_window_pattern", architecture.period)
    match architecture.windowed:
        case None:
            return ()
        case rule if rule == ALL:
            return tuple(range(layers))
        case rule if rule == ALL_IF_USED:
            return tuple(range(layers)) if values.flag("use_sliding_window") else ()
        case rule if rule == FROM:
            first = values.number("max_window_layers", above=-1) if values.flag("use_sliding_window") else layers
            return tuple(range(first, layers))
        case rule if rule == WITHOUT_ROPE:
            return tuple(nope_layers) if values.flag("use_sliding_window") else ()
        case rule if rule == BUT_FIRST:
            return tuple(i for i in range(layers) if i % period)
    return tuple(i for i in range(layers) if (i + 1) % period)
