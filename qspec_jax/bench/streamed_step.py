"""One step of decoding over a cache that host memory cannot hold: as many bytes are copied, from fewer layers' arrays again and again.

Its logits have no meaning. It copies and computes what it would with all of the cache there, but for writing the new tokens to host memory.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.formats.kv_cache import Lengths
from qspec_jax.bench.decode_rows import DecodeRow, StepTiming
from qspec_jax.bench.timing import Bandwidth, loop, loop_trips, time_loop
from qspec_jax.caches.offloaded import OffloadedFullCache
from qspec_jax.decoding.host_residence import Residence
from qspec_jax.models.llama import Llama

SHARE_OF_HOST = 0.5  # of the memory that is free, for the arrays


def measured(
    row: DecodeRow,
    model: Llama,
    found: Residence,
    *,
    capacity: int,
    host_bytes: int,
    read_bytes: int,
    bandwidth: Bandwidth,
    repeats: int,
) -> DecodeRow:
    """The row with the time of a step that decodes one token of each of its rows over a `full:host=all` cache.

    found: the cache, and how much of it is streamed. capacity: of its rows in tokens. host_bytes: free in host memory. read_bytes: what the
    step reads on the device.
    """
    streamed = found.cache.settings.streamed(model.config.num_layers)
    arrays = max(1, min(sum(streamed), int(SHARE_OF_HOST * host_bytes // found.layer_bytes)))
    one_layer = dataclasses.replace(model.config, num_layers=1)
    sizes = dict(batch=row.batch_size, capacity=capacity, num_speculative_tokens=0, dtype=model.dtype)

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
