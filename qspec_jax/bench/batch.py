"""`qspec bench batch`: many prompts through a batch that is refilled, and through fixed batches, in one run."""

import dataclasses
import functools
import operator
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import RenderableType

from qspec_jax.bench.simulated import SimulatedGreedy
from qspec_jax.decoding.batch import run_batch
from qspec_jax.decoding.config import BITS, TOKENS, GenerationConfig
from qspec_jax.decoding.exact_bits import decodes_in_turn
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.limits import make_limits
from qspec_jax.decoding.prefill_groups import layers_at_once
from qspec_jax.decoding.prepare import Prepared, prepare
from qspec_jax.decoding.requests import Request
from qspec_jax.decoding.results import BatchStats
from qspec_jax.decoding.sampling import Sampler, make_sampler
from qspec_jax.drafts.registry import AUTO
from qspec_jax.drafts.step_bytes import bytes_in_loop, bytes_of
from qspec_jax.errors import InputError
from qspec_jax.kept_rows import NOT_KEPT, KeptRows
from qspec_jax.models.llama import Llama
from qspec_jax.models.prompts import bucket
from qspec_jax.progress import awaited, progress_bar, working
from qspec_jax.reports import Run, formatted, grid, page, this_run

SEVERAL = "several devices"
EXACT_TOKENS = "exact tokens"  # where the others have exact bits
WAYS = {
    "refilled": {"refill": True},
    EXACT_TOKENS: {"refill": True},
    "fixed": {"refill": False},
    "one by one": {"batch_size": 1},
    SEVERAL: {"refill": True},
}


@dataclasses.dataclass(frozen=True)
class BatchRow:
    """Figures of all prompts, decoded in one way; for the rates see `BatchStats.rates`.

    Attributes:
        way: a key of `WAYS`.
        stats: of the batch; of several decodes, that whose tokens/s are the median.
        same_tokens: share of the prompts whose tokens are those of the first way, in all decodes.
        all_tokens_per_second: of each decode, in their order.
    """

    way: str
    stats: BatchStats
    tokens_per_second: float
    busy_slots: float
    draft_acceptance_rate: float | None
    same_tokens: float
    all_tokens_per_second: list[float]


@dataclasses.dataclass(frozen=True)
class BatchReport(Run):
    """The same prompts in several ways.

    Attributes:
        model: its name.
        draft: as it was asked for.
        cache: the target's, by its name.
        prompts: their number.
        batch_size: rows decoded at a time on each device.
        gamma: the most drafts of a round; 0 without drafts.
        exact: "bits" or "tokens".
        prompt_tokens: in all prompts together.
        simulated_rate: the chance that a draft is accepted, given those before it; None: drafts were verified.
        repeats: decodes in each way, which take turns.
        rows: of each way.
        speedup: tokens/s of the refilled batch over those of fixed batches; None without fixed batches.
        decode_speedup: the ratio of their seconds of decoding alone.
        devices: that worked on the prompts.
        devices_speedup: of several devices, refilled, to one; None if one was asked for.
        bits_speedup: of the refilled batch, with exact bits, to the same with exact tokens; None without the latter.
        prefill_alone_s: to prefill all prompts one after the other, by the time of one prompt of each padded length.
        decode_alone_s: for the refilled batch's rounds as if every slot always had a prompt, at the pace of the rounds in which that was
            so; None if it never was.
        share_of_parts: prefill_alone_s and decode_alone_s over the seconds that the refilled batch took.
        held_bytes: weights, draft, and the most that the refilled batch's rows ever held.
        peak_bytes: the most that the device had in use up to the end of the refilled batch, which is the first; None where the device
            does not say.
    """

    model: str
    draft: str
    cache: str
    prompts: int
    batch_size: int
    gamma: int
    exact: str
    prompt_tokens: int
    simulated_rate: float | None
    repeats: int
    rows: list[BatchRow]
    speedup: float | None
    decode_speedup: float | None
    devices: int
    devices_speedup: float | None
    bits_speedup: float | None
    prefill_alone_s: float
    decode_alone_s: float | None
    share_of_parts: float | None
    held_bytes: int
    peak_bytes: int | None

    def table(self) -> RenderableType:
        """A line for every way, and the speed-ups."""
        labels = ("tokens/s", "slots busy", "rounds", "decode s", "prefill s", "compile s", "accepted", "same tokens")
        found = grid("", *labels, left=("",), wraps=("",))
        for row in self.rows:
            s = row.stats
            seconds = f"{s.decode_s:.1f}", f"{s.prefill_s:.1f}", f"{s.compile_s:.1f}"
            shares = formatted(row.draft_acceptance_rate, ".3f"), f"{row.same_tokens:.1%}"
            found.add_row(row.way, f"{row.tokens_per_second:,.1f}", f"{row.busy_slots:.1%}", f"{s.rounds:,}", *seconds, *shares)
        drafts = f"{self.draft}, {self.gamma} drafts a round, " if self.gamma else ""
        notes = f"Batch size {self.batch_size}, {drafts}cache {self.cache}, {self.prompt_tokens:,} tokens in the prompts."
        if self.repeats > 1:
            notes += f" Each way decoded {self.repeats} times, in turn; the decode with the median of tokens/s is given."
        if self.exact == BITS:
            notes += " With exact bits."
        if self.bits_speedup is not None:
            notes += f" With them refilled is {self.bits_speedup:.3f} times as fast as with {EXACT_TOKENS}."
        if self.simulated_rate is not None:
            notes += f" Acceptance is simulated, at a rate of {self.simulated_rate:.3f}."
        if self.speedup is not None:
            alone = f"{self.decode_speedup:.2f} times in decoding alone"
            notes += f" Refilled is {self.speedup:.2f} times as fast as fixed batches, {alone}."
        if self.devices_speedup is not None:
            notes += f" {self.devices} devices, each with up to as many rows, are {self.devices_speedup:.2f} times as fast as one."
        if self.share_of_parts is not None:
            seconds = f"{self.prefill_alone_s:.1f} s, and its rounds with all slots busy {self.decode_alone_s:.1f} s"
            notes += f" Prefill alone takes {seconds}: together {self.share_of_parts:.0%} of what refilled takes."
        if self.peak_bytes is not None:
            held = f"{self.held_bytes / 1e9:.2f} GB"
            notes += f" In use at most {self.peak_bytes / 1e9:.2f} GB, of which weights, draft and what refilled rows held {held}."
        return page(f"{self.prompts} prompts, {self.model} on {self.device}", f", {self.date}", found, notes=[notes])


def bounds(flag: str, text: str, lowest: int) -> tuple[int, int]:
    """Reads MIN-MAX. Raises InputError for any other text, and for a bound below `lowest`."""
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and lowest <= int(low) <= int(high)):
        raise InputError(f"{flag} {text} should be two numbers from {lowest} up with a hyphen between them, as 64-2048")
    return int(low), int(high)


def make_requests(
    sources: Sequence[Sequence[int]], prompts: int, lengths: tuple[int, int], new: tuple[int, int], config: GenerationConfig, *, seed: int
) -> list[Request]:
    """Cuts prompts from token streams and draws how many tokens to add to each; both lengths are log-uniform in their bounds.

    Raises InputError where no stream is as long as the longest prompt.
    """
    sources = [source for source in sources if len(source) >= lengths[1]]
    if not sources:
        raise InputError(f"no text has {lengths[1]} tokens; ask for shorter prompts")
    random = np.random.default_rng(seed)

    def draw(low, high):
        return int(np.exp(random.uniform(np.log(low), np.log(high + 1))))

    requests = []
    for i in range(prompts):
        source, n = sources[random.integers(len(sources))], draw(*lengths)
        at = int(random.integers(len(source) - n + 1))
        settings = dataclasses.replace(config, max_new_tokens=draw(*new))
        requests.append(Request(list(source[at : at + n]), settings, jax.random.fold_in(key_of(seed), i)))
    return requests


def run(
    name: str,
    model: Llama,
    requests: Sequence[Request],
    *,
    draft: str,
    batch_size: int,
    ways: Sequence[str],
    rate: float | None,
    repeats: int = 1,
    devices: Sequence[jax.Device] = (),
    kept: KeptRows = NOT_KEPT,
    progress: bool | None,
) -> BatchReport:
    """Decodes all requests `repeats` times in each way, after they have been decoded so once to warm up. The ways take turns.

    Args:
        name: the model's, for the report.
        model: the target.
        requests: all of them.
        draft: theirs, for the report.
        batch_size: rows at a time.
        ways: of `WAYS`, "refilled" first.
        rate: the simulated chance that a draft is accepted, given those before it; None verifies for real.
        repeats: decodes in each way.
        devices: those of the way `SEVERAL`, each of which decodes `batch_size` rows.
        kept: the decodes of an earlier run.
        progress: see `progress_bar`.
    """

    strategy = make_sampler if rate is None else lambda *configs: SimulatedGreedy(jnp.full(len(configs), rate))
    asked, prepared = min(batch_size, len(requests)), prepare(model, requests, batch_size=batch_size)
    batch_size, with_tokens = asked, prepared
    if EXACT_TOKENS in ways:
        with_tokens = prepare(model, [_with_exact_tokens(request) for request in requests], batch_size=batch_size)
    if decodes_in_turn(prepared.configs):  # in whatever way
        batch_size, ways = 1, [way for way in ways if way != "fixed"]
    settings = dict(batch_size=batch_size, strategy=strategy)

    rows_of_each = min(batch_size, -(-len(requests) // max(1, len(devices))))  # as several devices have
    labels = {way: [way] if repeats == 1 else [f"{way}, {i + 1} of {repeats}" for i in range(repeats)] for way in ways}
    missing = [way for way in ways if not all(label in kept for label in labels[way])]
    apart = devices if SEVERAL in missing else ()  # each has programs of its own
    alone = "refilled" in missing and (not apart or rows_of_each < batch_size)
    with progress_bar(progress=progress, total=(alone + len(apart)) * len(requests), unit="prompt") as bar, working("warm-up"):

        def warm_up(own: list[jax.Device] | None, rows: int) -> None:
            # All of them, in their order: a pool of pages is as large as that asks for, and programs depend on it.
            for _ in run_batch(model, prepared, **settings | {"batch_size": rows}, devices=own):
                bar.update()

        if alone:
            warm_up(None, batch_size)
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda device: warm_up([device], rows_of_each), apart))
    warm = {"refilled", SEVERAL}

    def measured(way: str) -> _Decoded:
        own, size = prepared, {}
        if way == EXACT_TOKENS:
            own, size = with_tokens, {"batch_size": asked}
        if way not in warm:  # after the first refilled decode, whose peak of memory it is no part of
            warm.add(way)
            with working("warm-up"):
                for _ in run_batch(model, own, **settings | size | WAYS[way]):
                    pass
        batch = run_batch(model, own, **settings | size | WAYS[way], devices=devices if way == SEVERAL else None)
        with progress_bar(progress=progress, total=len(requests), unit="prompt") as bar:
            found = {}
            for result in awaited(batch, "prompt", len(requests)):
                found[result.index] = result.token_ids
                bar.update()
        peak_bytes = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        return _Decoded(batch.stats, [found[i] for i in sorted(found)], peak_bytes)

    decoded = defaultdict(list)
    for turn in range(repeats):
        for way in ways:
            decoded[way].append(kept.measured(labels[way][turn], _Decoded, functools.partial(measured, way), _described))
    tokens, rows = decoded[ways[0]][0].tokens, []
    for way, decodes in decoded.items():
        same = sum(sum(map(operator.eq, each.tokens, tokens)) for each in decodes) / (len(tokens) * repeats)
        speeds = [each.stats.rates["tokens_per_second"] for each in decodes]
        stats = decodes[speeds.index(statistics.median_low(speeds))].stats
        rows.append(BatchRow(way, stats, **stats.rates, same_tokens=same, all_tokens_per_second=speeds))
    peak_bytes = decoded["refilled"][0].peak_bytes
    found = {row.way: row for row in rows}
    refilled, fixed, several, usual = (found.get(way) for way in ("refilled", "fixed", SEVERAL, EXACT_TOKENS))
    prefill_s = kept.measured("prefill alone", float, lambda: _prefill_seconds(prepared, strategy), lambda seconds: f"{seconds:.1f} s")
    decode_s = _decode_seconds(refilled.stats, batch_size)
    return BatchReport(
        **this_run(),
        model=name,
        draft=draft,
        cache=prepared.configs[0].cache_config.name,
        prompts=len(requests),
        batch_size=batch_size,
        gamma=max(request.config.num_speculative_tokens if request.config.speculative else 0 for request in requests),
        exact=TOKENS if prepared.exact == AUTO else prepared.exact,  # batches run auto as tokens
        prompt_tokens=sum(len(request.tokens) for request in requests),
        simulated_rate=rate,
        repeats=repeats,
        rows=rows,
        speedup=fixed and refilled.tokens_per_second / fixed.tokens_per_second,
        decode_speedup=fixed and fixed.stats.decode_s / refilled.stats.decode_s,
        devices=len(devices) if several else 1,
        devices_speedup=several and several.tokens_per_second / refilled.tokens_per_second,
        bits_speedup=usual and refilled.tokens_per_second / usual.tokens_per_second,
        prefill_alone_s=prefill_s,
        decode_alone_s=decode_s,
        share_of_parts=decode_s and (prefill_s + decode_s) / (refilled.stats.prefill_s + refilled.stats.decode_s),
        held_bytes=bytes_of((model, prepared.draft)) + bytes_in_loop(prepared.draft) + refilled.stats.held_bytes,
        peak_bytes=peak_bytes,
    )


def _with_exact_tokens(request: Request) -> Request:
    return dataclasses.replace(request, config=dataclasses.replace(request.config, exact=TOKENS))


@dataclasses.dataclass(frozen=True)
class _Decoded:
    """All prompts, decoded in one way: the statistics, the tokens of each prompt, and the most that the device had in use by then."""

    stats: BatchStats
    tokens: list[list[int]]
    peak_bytes: int | None


def _described(found: _Decoded) -> str:
    stats = found.stats
    return f"{stats.rates['tokens_per_second']:,.1f} tokens/s, decoding {stats.decode_s:.1f} s, prefill {stats.prefill_s:.1f} s"


def _decode_seconds(stats: BatchStats, slots: int) -> float | None:
    """What decoding would take if every slot always had a prompt."""
    return stats.busy_rounds / slots * stats.full_decode_s / stats.full_rounds if stats.full_rounds else None


def _prefill_seconds(prepared: Prepared, strategy: Callable[..., Sampler]) -> float:
    """What prefilling all prompts takes, each by itself and one after the other, long ones in parts."""
    model, engine, by_length = prepared.model, prepared.engine(), defaultdict(list)
    for request in prepared.requests:
        by_length[bucket(len(request.tokens))].append(request)
    prefills = {}
    for n, (first, *_) in by_length.items():
        settings = strategy(first.config), first.key[None], make_limits(model, first.config)
        prefills[n] = engine.prefill_of([first.tokens], *settings, layers=layers_at_once(model.config.num_layers, n))
    engine.compile_prefills(prefills.values())

    def prefill(n):
        return jax.block_until_ready(engine.prepare_prefill(prefills[n])())

    total = 0.0
    for n, alike in by_length.items():
        prefill(n)  # to warm up
        began = time.perf_counter()
        prefill(n)
        total += len(alike) * (time.perf_counter() - began)
    return total
