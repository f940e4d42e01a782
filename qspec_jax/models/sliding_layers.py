"""Which layers of a model have a sliding window, read from a config.json and checked."""

from collections.abc import Sequence

from qspec_jax.models import families
from qspec_jax.models.config_values import Values
from qspec_jax.models.families import Architecture

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
    if types is not None and architecture.window_rule not in (families.ALL, families.ALL_IF_USED):
        found = tuple(i for i, each in enumerate(types) if each == _SLIDING)
        if found and architecture.window_rule is None:
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
    match architecture.window_rule:
        case None:
            return ()
        case families.ALL:
            return tuple(range(layers))
        case families.ALL_IF_USED:
            return tuple(range(layers)) if values.flag("use_sliding_window") else ()
        case families.FROM:
            first = values.number("max_window_layers", above=-1) if values.flag("use_sliding_window") else layers
            return tuple(range(first, layers))
        case families.WITHOUT_ROPE:
            return tuple(nope_layers) if values.flag("use_sliding_window") else ()
    period = _period(values, architecture)
    whole = 0 if architecture.window_rule == families.BUT_FIRST else period - 1  # of each period the layer without a window
    return tuple(i for i in range(layers) if i % period != whole)


def _period(values: Values, architecture: Architecture) -> int:
    """The number of layers of which one attends to everything."""
    given = values.raw.get("sliding_window_pattern")
    if isinstance(given, str):  # such as LLLG, a letter for each of them
        if not given:
            raise values.error("sliding_window_pattern is empty, should be a whole number or letters such as LLLG")
        return len(given)
    return values.number("sliding_window_pattern", architecture.period)
