"""One step of decoding over a cache that host memory cannot hold: its bytes are copied from fewer layers' arrays, again and again.

Its logits have no meaning. It copies and computes what a step over the whole cache does, but writes no new tokens to host memory.
"""

import dataclasses
import itertools
from typing import Self

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.kv_cache import Lengths
from qspec_jax import host
from qspec_jax.bench.decode_rows import Case, DecodeRow, StepTiming
from qspec_jax.bench.decode_steps import target_bytes
from qspec_jax.bench.timing import Bandwidth, loop, loop_trips, time_loop
from qspec_jax.caches.offloaded import OffloadedFullCache
from qspec_jax.caches.registry import CacheConfig
from qspec_jax.decoding.config import AUTOREGRESSIVE
from qspec_jax.decoding.host_residence import Residence, refused, residence
from qspec_jax.drafts.step_bytes import devices_of
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket

SHARE_OF_HOST = 0.5  # of the memory that is free, for the arrays


@dataclasses.dataclass(frozen=True)
class StreamedStep:
    """A step of the baseline over a `full:host=all` cache that host memory cannot hold; it decodes one token of each row.

    Attributes:
        model: the target.
        unmeasured: the row without figures.
        found: the cache, and how much of it is streamed.
        capacity: of a row of the cache, in tokens.
        host_bytes: free in host memory.
    """

    model: Llama
    unmeasured: DecodeRow
    found: Residence
    capacity: int
    host_bytes: int

    @classmethod
    def needed(cls, model: Llama, case: Case, context: int, max_new_tokens: int, batch_size: int) -> Self | None:
        """None for another method or a model with sliding windows, and if host memory can hold the cache."""
        cache = CacheConfig.parse(case.method.cache)
        if case.method.name != AUTOREGRESSIVE or cache.name != "full:host=all" or devices_of(model) > 1 or model.config.windowed_layers:
            return None
        capacity = bucket(context) + bucket(max_new_tokens)
        found = residence(cache, model, batch=batch_size, capacity=capacity, num_speculative_tokens=0)
        if not refused(cache.name, found.host_bytes):
            return None
        row = DecodeRow(case.method.name, context, 0, "failed", temperature=case.temperature, batch_size=batch_size)
        return cls(model, row, found, capacity, host.room_bytes(pooled=jax.default_backend() == "gpu"))

    def row(self, bandwidth: Bandwidth, repeats: int) -> DecodeRow:
        """The row with the time of the step."""
        row, found, model = self.unmeasured, self.found, self.model
        streamed = found.cache.settings.streamed(model.config.num_layers)
        arrays = max(1, min(sum(streamed), int(SHARE_OF_HOST * self.host_bytes // found.layer_bytes)))
        one_layer = dataclasses.replace(model.config, num_layers=1)
        sizes = dict(batch=row.batch_size, capacity=self.capacity, num_speculative_tokens=0, dtype=model.dtype)

        def layer(share: float):
            (made,) = found.cache.with_resident(share).empty(one_layer, **sizes).layers
            return jax.block_until_ready(made)

        in_turn = itertools.cycle([layer(0.0) for _ in range(arrays)])
        in_host = tuple(next(in_turn) for each in streamed if each)
        resident = tuple(layer(1.0) for each in streamed if not each)
        lengths = Lengths(jnp.zeros(row.batch_size, jnp.int32), jnp.full(row.batch_size, row.context, jnp.int32))

        def step(tokens, resident, in_host, lengths, model):
            # Or what is copied first, which nothing else changes, might be copied once for all steps.
            tokens, in_host = lax.optimization_barrier((tokens, in_host))
            of_device, of_host = iter(resident), iter(in_host)
            layers = tuple(next(of_host if each else of_device) for each in streamed)
            logits, after = model(tokens, lengths.total[:, None], OffloadedFullCache(layers, lengths))
            kept = tuple(layer for layer, each in zip(after.layers, streamed) if not each)
            return jnp.argmax(logits, -1).astype(jnp.int32), kept

        shapes = jax.eval_shape(lambda: CacheConfig("full").empty(model.config, **sizes))
        read_bytes, _ = target_bytes(model, shapes, row.context + 1, row.batch_size)
        copied = sum(streamed) * found.layer_bytes
        carry, inputs = (jnp.zeros((row.batch_size, 1), jnp.int32), resident), (in_host, lengths, model)
        trips = loop_trips(bandwidth.seconds(read_bytes, copied))
        program, compile_s = loop(step, trips).compile(carry, inputs)
        timing, _ = time_loop(program, trips, carry, inputs, repeats=repeats)
        share = bandwidth.seconds(read_bytes, copied) * 1e6 / timing.median_us
        of_copies = f"{copied / 1e9:.1f} GB are copied for it, of {sum(streamed)} layers, from the arrays of {arrays}, again and again"
        return dataclasses.replace(
            row,
            status="measured",
            note=f"a step alone, for host memory cannot hold its cache: {of_copies}",
            compile_s=compile_s,
            new_tokens=row.batch_size,
            rounds=1,
            tokens_per_second=row.batch_size * 1e6 / timing.median_us,
            ms_per_token=timing.median_us / 1e3,
            steps={"target": StepTiming(timing, read_bytes, share, copied)},
            cache=f"{found.cache.name},resident={found.cache.settings.resident:.3g}",
            cache_bytes=copied + sum(leaf.nbytes for leaf in jax.tree.leaves(resident)),
            large_operations=None,
        )
