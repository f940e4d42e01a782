"""How the prompts of a batch are prefilled: short ones together, long ones some layers at a time."""

import contextlib
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from qspec_jax.decoding import capacity
from qspec_jax.decoding.config import BITS
from qspec_jax.decoding.engine import Engine
from qspec_jax.decoding.limits import Limits, make_limits
from qspec_jax.decoding.prefill import Prefill
from qspec_jax.decoding.prepare import Prepared
from qspec_jax.decoding.sampling import Sampler
from qspec_jax.drafts.step_bytes import bytes_of
from qspec_jax.errors import InputError
from qspec_jax.models.prompts import bucket

PART = 1 << 16  # tokens times layers; prompts that need more are prefilled in parts
# By backend, the number of prompts of up to SHORT_PROMPT tokens that are prefilled together if they follow one another: the weights are
# then read once for all. One by one if that number of rows, each with room for the longest request, has room for more than MAX_ROOM tokens.
ROWS_PER_PREFILL, SHORT_PROMPT, MAX_ROOM = {"gpu": 4}, 256, 1 << 14


def layers_at_once(layers: int, tokens: int) -> int:
    """The number of layers that prompts go through before other rows have rounds; the same whether there are others or not.

    The parts are as equal as possible, so that one or two sizes need a program.

    Args:
        layers: of the model.
        tokens: of all prompts together, with padding.
    """
    most = max(1, PART // tokens)
    return math.ceil(layers / math.ceil(layers / most))


class PrefillGroups:
    """How the requests of a batch are prefilled: which of them together, how many layers at a time, and with which settings.

    Attributes:
        rows_at_once: the number of short prompts that are prefilled at once.
    """

    def __init__(self, engine: Engine, prepared: Prepared, strategy: Callable[..., Sampler]):
        self.engine, self.requests = engine, prepared.requests
        configs = prepared.configs
        # On the host, where rows are taken out of them.
        limits = make_limits(prepared.model, *configs, tokenizer=prepared.tokenizer)
        self.sampler, self.limits = jax.device_get((strategy(*configs), limits))
        rows = ROWS_PER_PREFILL.get(jax.default_backend(), 1)
        fits = rows * engine.sizes.capacity <= MAX_ROOM and not configs[0].cache_config.in_host_memory and configs[0].exact != BITS
        self.rows_at_once = rows if fits else 1

    def is_short(self, index: int) -> bool:
        """Whether the prompt of a request may be prefilled together with others."""
        return len(self.requests[index].tokens) <= SHORT_PROMPT

    def layers(self, indices: Sequence[int]) -> int:
        """The number of layers at a time in which the prompts of requests are prefilled together."""
        return layers_at_once(self.engine.target.model.config.num_layers, self.padded(indices))

    def padded(self, indices: Sequence[int]) -> int:
        """The tokens of requests that are prefilled together, padding among them."""
        return len(indices) * bucket(max(len(self.requests[index].tokens) for index in indices))

    def prefill(self, indices: Sequence[int]) -> Prefill:
        """The prefill of these requests together."""
        sampler, limits = self.settings(indices)
        requests = [self.requests[index] for index in indices]
        prompts, keys = [request.tokens for request in requests], jnp.stack([request.key for request in requests])
        return self.engine.prefill_of(prompts, sampler, keys, limits, layers=self.layers(indices))

    def compile_ahead(self, slots: int) -> None:
        """Compiles the programs for prompts of all lengths side by side, in a fraction of the time. slots: rows of the batch."""

        def of_length(indices: Iterable[int]) -> Iterable[int]:
            """One request of each length of compiled prompts."""
            return {bucket(len(self.requests[index].tokens)): index for index in indices}.values()

        short = list(filter(self.is_short, range(len(self.requests))))
        prefills = [[index] for index in of_length(range(len(self.requests)))]
        if 1 < self.rows_at_once <= min(slots, len(short)):
            prefills += [[index] * self.rows_at_once for index in of_length(short)]
        self.engine.compile_prefills(map(self.prefill, prefills))

    def settings(self, indices: Sequence[int]) -> tuple[Sampler, Limits]:
        """The sampler and the limits of rows that work for these requests, on the device."""
        rows = np.array(indices)
        # All in one call: one by one they take milliseconds on a GPU.
        return jax.device_put((jax.tree.map(lambda x: x[rows], self.sampler), self.limits.of_rows(rows)))

    def room(self, groups: Sequence[int] | None, max_rows: int) -> capacity.Capacity:
        """As many rows as fit the device's memory, at most `max_rows`. groups: see `capacity.enough_for`."""
        if self.rows_at_once > 1:
            with contextlib.suppress(InputError):
                if (room := self._room_besides_prefills(groups, max_rows)).rows >= self.rows_at_once:
                    return room
            self.rows_at_once = 1  # which takes less memory
        return self._room_besides_prefills(groups, max_rows)

    def _room_besides_prefills(self, groups: Sequence[int] | None, max_rows: int) -> capacity.Capacity:
        by_length = sorted(range(len(self.requests)), key=lambda index: len(self.requests[index].tokens))
        largest = [by_length[-1:]]  # the prompts of those prefills that take most memory
        if len(short := [index for index in by_length if self.is_short(index)]) >= self.rows_at_once:
            largest.append(short[-self.rows_at_once :])
        row = self.prefill(by_length[-1:]).shapes()

        def bytes_of_prefill() -> int:
            temporaries = (self.engine.prefill_temporaries(self.prefill(each)) for each in largest)
            # While some are put into the batch, the next are prefilled.
            return max(temporaries) + 2 * max(map(len, largest)) * bytes_of(row, on_device=True)

        return capacity.that_fits(self.engine, row, bytes_of_prefill, groups, max_rows)
