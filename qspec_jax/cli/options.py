"""What the commands share: options, and how a checkpoint is read."""

import contextlib
import dataclasses
import enum
import functools
import inspect
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import typer
from jax.sharding import Mesh

from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.checkpoints import hub, loading
from qspec_jax.checkpoints.generation_defaults import SAMPLING, stored_defaults
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.cli import process
from qspec_jax.decoding import diagnosis, processes
from qspec_jax.decoding.config import EXACT, GAMMA, GenerationConfig
from qspec_jax.decoding.data_parallel import Place
from qspec_jax.drafts.registry import AUTO, DRAFTS, NONE, DraftSettings
from qspec_jax.errors import InputError, writing
from qspec_jax.files import check_writable, is_replaced, is_same_file, name_of
from qspec_jax.models.llama import Llama
from qspec_jax.models.sharding import model_mesh

log = logging.getLogger(__name__)

ALL = "all"


CacheOption = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="NAME[:SETTING=VALUE,...]",
        help=f"The target's cache: {', '.join(CACHES)}; int8 with a draft, full without, if not given. kivi, specache, streaming-llm "
        "and h2o are lossy.",
    ),
]


class Defaults(enum.StrEnum):
    qspec = "qspec"
    model = "model"


GenerationDefaults = Annotated[
    Defaults,
    typer.Option(
        "--generation-config",
        help="Where temperature, top-k, top-p, min-p and the repetition penalty come from if not given: qspec, which is greedy; "
        "or model, the checkpoint's generation_config.json, as transformers reads it: top-k is 50 where that samples and names none.",
    ),
]


class Dtype(enum.StrEnum):
    bfloat16 = "bfloat16"
    float32 = "float32"
    float64 = "float64"


def devices_of(text: str) -> list[jax.Device]:
    """What --devices names, of all processes' devices with --distributed. Raises InputError for any text but a number of devices that are
    there, or all."""
    diagnosis.check_backend()
    there = jax.local_devices() if jax.process_count() == 1 else jax.devices()
    found = [device for device in there if device.device_kind == there[0].device_kind]
    if left_out := len(there) - len(found):
        log.warning("left out, as of another kind than the first (%s): %d of the devices", found[0].device_kind, left_out)
    if text == ALL:
        return found
    if not (text.isdecimal() and text.isascii() and 1 <= int(text) <= len(found)):
        known = f"the devices that JAX has here ({found[0].device_kind})"
        raise InputError(f"--devices {text} should be {ALL}, or a number from 1 to {len(found)}, {known}")
    if jax.process_count() > 1 and int(text) < len(found):
        raise InputError(f"--devices {text}: with --distributed all {len(found)} devices of all processes work together; leave it out")
    return found[: int(text)]


def join_others(*options: object) -> None:
    """Begins `--distributed`. options: those that each process goes by itself. Raises InputError where others have been given others."""
    processes.join()
    process.keep_output_clean()
    processes.check_alike(repr(options))


def written_by_first(output: Path | None) -> Path | None:
    """Where this process writes what is meant for `output`: of several, the first there, and the others nowhere."""
    return output if processes.is_first() else Path(os.devnull)


def place_of(devices: str | None, *, distributed: bool) -> Place | None:
    """What --devices names for one model: a mesh to divide it over, or None for one device. Raises InputError as `devices_of`."""
    if devices is None and not distributed:
        return None
    found = devices_of(devices or ALL)
    return model_mesh(found) if len(found) > 1 else None


def places_of(devices: list[jax.Device], tensor_parallel: int) -> list[Place]:
    """Where copies of a model go, each divided over `tensor_parallel` devices: meshes, or devices for 1. Raises InputError if there are
    too few devices, or some would be left over."""
    if tensor_parallel == 1:
        return devices
    if len(devices) % tensor_parallel:
        raise InputError(f"--tensor-parallel {tensor_parallel} should divide the number of devices, {len(devices)}")
    return [model_mesh(devices[first : first + tensor_parallel]) for first in range(0, len(devices), tensor_parallel)]


def _bias(text: str) -> tuple[int, float]:
    token, _, bias = text.partition("=")
    try:
        return int(token), float(bias)
    except ValueError:
        raise InputError(f"--logit-bias {text!r} should be a token id, =, and a number") from None


Gamma = Annotated[int, typer.Option("--gamma", "--num-speculative-tokens", help="Maximum draft tokens per round.")]
GammaList = Annotated[
    str,
    typer.Option("--gamma", "--num-speculative-tokens", help="Maximum draft tokens per round; several with commas between them: 1,2,4,6."),
]
DraftOption = Annotated[
    str | None,
    typer.Option(
        "--draft",
        metavar="NAME[:SETTING=VALUE,...]",
        help=f"What proposes tokens for the target to verify: {', '.join(DRAFTS)}, or {NONE} for one token at a time; for example "
        f"sparse:budget=0.03, which reads 3 % of the cache (a budget of 3 is 3 tokens). {AUTO}, for what pays by stored costs, if not "
        "given.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, max=2**32 - 1, help="The seed of the random draws.")]
SeedOfSampling = Annotated[
    int | None, typer.Option("--seed", min=0, max=2**32 - 1, help="The seed of the random draws. Default: 0, and a message says so.")
]
# Checkpoints are texts, so that messages show them as they are given: a Path of ./x shows x.
ModelDirectory = Annotated[
    str,
    typer.Option("--model", metavar="DIR", help="Checkpoint directory (Hugging Face's or converted), GGUF file, or ORG/NAME on the Hub."),
]


WeightsOption = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="packed|dequantized|nested[:SETTING=VALUE,...]",
        help="Of a quantized checkpoint: packed keeps linear layers of 4 bits in INT4. If not given, they stay so where kernels read them. "
        "Of any checkpoint nested puts linear layers into 8 bits, whose upper 4 are the draft's weights, rounded for a text with "
        "calibration=FILE, and head_bits=8 the head, embedding_bits=8 the embedding into INT8.",
    ),
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype",
        help="As stored, if not given, but the embedded model, where none is named, in float32 on a CPU. float64 is for exactness checks.",
    ),
]
Devices = Annotated[
    str, typer.Option("--devices", metavar="N", help="How many devices of this machine to work on, a copy of the weights on each; or all.")
]
DevicesOfModel = Annotated[
    str | None, typer.Option("--devices", metavar="N", help="How many devices to divide the model over, or all; 1, if not given.")
]
Distributed = Annotated[
    bool,
    typer.Option(
        "--distributed",
        help="Divide the model over the devices of all processes that were started so, on one machine or many; the first one writes.",
    ),
]
TensorParallel = Annotated[
    int, typer.Option("--tensor-parallel", min=1, metavar="N", help="The number of devices that each copy of the model is divided over.")
]
GroupSize = Annotated[
    int | None,
    typer.Option(
        "--group-size",
        help="Tokens of a key group: 128 (32 for kivi and specache), or head_dim when smaller, if not given. full, streaming-llm and h2o "
        "have no groups.",
    ),
]
Calibrate = Annotated[
    bool,
    typer.Option(help="Round the draft's INT4 weights for the prompts' activations (GPTQ): a higher acceptance for some seconds more."),
]
SensitiveLayers = Annotated[
    int, typer.Option(min=0, help="The number of first and of last layers that draft with the target's weights and all of its cache.")
]
EvaluatedModel = Annotated[
    str | None, typer.Option("--model", metavar="DIR", help="Checkpoint directory: the embedded model, if not given.")
]
Samples = Annotated[int, typer.Option("--samples", min=1, metavar="N", help="Samples of each prompt, which is read once.")]
StateFile = Annotated[Path | None, typer.Option("--state", metavar="FILE", help="A saved state to go on from (`qspec prefill`).")]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE.html", help="Write a page that shows each round: drafts, probabilities, verdicts.")
]
Output = Annotated[Path | None, typer.Option(help="Write the result to this file instead.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Plot = Annotated[Path | None, typer.Option(help="Draw the results to this file (.png, .pdf or .svg).")]


@dataclasses.dataclass(kw_only=True)
class _Settings:
    """The options of a `GenerationConfig`, by the names of its fields; None is its default."""

    max_new_tokens: Annotated[int, typer.Option(help="Maximum number of new tokens of each prompt.")] = GenerationConfig.max_new_tokens
    draft: DraftOption = None
    num_speculative_tokens: Annotated[
        int | None,
        typer.Option(
            "--gamma",
            "--num-speculative-tokens",
            help=f"Maximum draft tokens per round. Default: {GAMMA}; chosen automatically with --draft {AUTO}.",
        ),
    ] = None
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Adapt the number of draft tokens per row to its past acceptance.")] = False
    draft_cost: Annotated[
        float | None,
        typer.Option(help="For --adaptive, the time of a draft step divided by that of a verification. Default: by stored costs."),
    ] = None
    min_draft_confidence: Annotated[float, typer.Option(help="Stop drafting when the draft's top-token probability is below this.")] = 0.0
    temperature: Annotated[float | None, typer.Option(help="Temperature of sampling. Default: 0, which is greedy.")] = None
    top_k: Annotated[int | None, typer.Option(help="Sample from this number of most likely tokens. Default: 0 (off).")] = None
    top_p: Annotated[
        float | None, typer.Option(help="Sample from the most likely tokens with this total probability. Default: 1 (off).")
    ] = None
    min_p: Annotated[
        float | None,
        typer.Option(help="Sample from tokens with at least this share of the top token's probability. Default: 0 (off)."),
    ] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Divides or multiplies the logits of tokens seen before. Default: 1 (off).")
    ] = None
    min_new_tokens: Annotated[int, typer.Option(help="Minimum number of new tokens before an end-of-sequence token.")] = 0
    logit_bias: Annotated[list[str] | None, typer.Option(metavar="ID=BIAS", help="Added to a token's logit (repeatable).")] = None
    banned_token_ids: Annotated[list[str] | None, typer.Option("--ban", metavar="ID,...", help="Token ids never to generate.")] = None
    stop: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="A text that ends a row, and is cut off (repeatable).")] = None
    stop_token_ids: Annotated[
        list[str] | None, typer.Option(metavar="ID,...", help="A sequence of new tokens that ends a row (repeatable).")
    ] = None
    output_logprobs: Annotated[bool, typer.Option("--logprobs", help="The target's log-probabilities of the new tokens, in JSON.")] = False
    top_logprobs: Annotated[int, typer.Option(help="Also return the log-probabilities of the N most likely tokens per position.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end-of-sequence token.")] = False
    cache: CacheOption = None
    group_size: GroupSize = None
    exact: Annotated[
        str,
        typer.Option(
            metavar="|".join(EXACT),
            help="bits: greedy tokens are those of one-by-one decoding to the last one, near ties included; auto: bits for a single greedy "
            "prompt of generate on Hopper GPUs, where they cost hardly anything, else tokens.",
        ),
    ] = AUTO

    def config(self) -> GenerationConfig:
        """The config of these options. Raises InputError for options that do not fit each other."""
        if self.draft == NONE and (self.adaptive or self.min_draft_confidence):
            option = "--adaptive" if self.adaptive else "--min-draft-confidence"
            raise InputError(f"{option} is for decoding with a draft; --draft none has none")
        if self.draft_cost is not None and not self.adaptive:
            raise InputError("--draft-cost is for --adaptive")
        biases = dict(map(_bias, self.logit_bias or []))
        if len(biases) < len(self.logit_bias or []):
            raise InputError("--logit-bias is given twice for one token")
        banned = [token for text in self.banned_token_ids or [] for token in number_list("--ban", text, int, repeated=True)]
        ends = [number_list("--stop-token-ids", text, int, repeated=True) for text in self.stop_token_ids or []]
        config = GenerationConfig(**vars(self) | dict(logit_bias=biases, banned_token_ids=banned, stop_token_ids=ends))
        if self.cache is not None:
            check_group_size(self.group_size, [config.cache_config])
        return config


def check_group_size(group_size: int | None, caches: Sequence[CacheConfig]) -> None:
    """Logs a warning where --group-size is given and none of the caches goes by it: they have no groups, or a group size of their own."""
    goes_by_it = lambda cache: cache.takes_group_size and cache.group_size in (None, group_size)
    if group_size is not None and not any(map(goes_by_it, caches)):
        named = lambda cache: f"{cache.kind} with its own group={cache.group_size}" if cache.takes_group_size else cache.kind
        names = ", ".join(dict.fromkeys(map(named, caches)))
        log.warning("--group-size %d makes no difference to cache %s", group_size, names)


def check_proposes(text: str, settings: DraftSettings | None) -> None:
    """Raises InputError for a draft that proposes nothing for the target to accept, where it is acceptance that is measured."""
    if settings is None:
        raise InputError(f"--draft {text}: there is nothing to accept without a draft")


def with_sensitive_layers(settings: DraftSettings | None, sensitive_layers: int) -> DraftSettings | None:
    """The settings of a draft with those of --sensitive-layers. Raises InputError for a draft that has no such setting."""
    if not sensitive_layers:
        return settings
    if not hasattr(settings, "sensitive_layers"):
        raise InputError("--sensitive-layers is for --draft quantspec")
    return dataclasses.replace(settings, sensitive_layers=sensitive_layers)


def with_settings(command: Callable, **defaults: object) -> Callable:
    """The command, which has a parameter `model`, with the options of `_Settings` instead of its parameter `config`. Its parameter
    `silent_on_sampling` turns off the line on a checkpoint that would sample: its settings are used, or a temperature is given. defaults:
    of options that have another default here."""
    own, shared = (list(inspect.signature(function).parameters.values()) for function in (command, _Settings))
    source = inspect.Parameter("generation_config", inspect.Parameter.KEYWORD_ONLY, default=Defaults.qspec, annotation=GenerationDefaults)

    @functools.wraps(command)
    def with_options(**given):
        said = {name: given[name] for name in SAMPLING if given[name] is not None}
        defaults = given.pop(source.name)
        config = _Settings(**{parameter.name: given.pop(parameter.name) for parameter in shared}).config()
        if defaults is Defaults.model:
            config = dataclasses.replace(config, **_of_checkpoint(given["model"], said))
        return command(config=config, silent_on_sampling=defaults is Defaults.model or "temperature" in said, **given)

    shared = [p.replace(default=defaults.get(p.name, p.default)) for p in shared]
    parameters = [p.replace(kind=p.KEYWORD_ONLY) for p in (*own, *shared, source) if p.name not in ("config", "silent_on_sampling")]
    with_options.__signature__ = inspect.Signature(parameters)
    with_options.__annotations__ = {p.name: p.annotation for p in parameters}
    return with_options


def _of_checkpoint(model: str, said: dict[str, float]) -> dict[str, float]:
    """The sampling settings of a checkpoint, of which some are given as options. One line says what is taken from where."""
    stored = stored_defaults(model)
    sampled = {"do_sample": said["temperature"] > 0} if "temperature" in said else {}
    taken = stored.with_said(said | sampled)
    log.warning("%s", stored.described(said, taken, "the command"))
    return taken


def _hint_at_sampling(directory: Path) -> None:
    """Says that a checkpoint would have tokens sampled, where it would."""
    stored = stored_defaults(directory)
    if not stored.values.get("do_sample"):
        return
    described = ""
    with contextlib.suppress(InputError):  # of values that are not taken, and so may be wrong
        described = f" ({stored.described({}, stored.with_said({}), '')})"
    log.warning("decoding is greedy, and %s is not taken%s; --generation-config model takes it", stored.path, described)


def load(
    directory: str | Path,
    dtype: str | None,
    *,
    quiet: bool,
    weights: str | None = None,
    place: Place | None = None,
    caches: Sequence[CacheConfig] = (),
    silent_on_sampling: bool = True,
    before_weights: Callable[[Llama, Any], None] | None = None,
):
    """The model of a checkpoint directory, and its tokenizer.

    Args:
        directory: or a name on the Hub.
        dtype: what to load it as; None: as stored.
        quiet: whether to show no progress bar.
        weights: how linear layers of a quantized checkpoint are loaded, see `load_model`.
        place: the mesh to divide it over.
        caches: what it will have; one that no model of its shape can have is refused before weights are read.
        silent_on_sampling: False if a line is to say so where the checkpoint would sample, and decoding is greedy.
        before_weights: called with the model's outline and the tokenizer before weights are read.
    """
    if dtype == "float64":
        jax.config.update("jax_enable_x64", True)
    diagnosis.check_backend()
    for problem in diagnosis.problems():
        log.warning("%s", problem)
    mesh, progress = place if isinstance(place, Mesh) else None, False if quiet else None
    directory = hub.local(directory, progress=progress)
    if not silent_on_sampling:
        _hint_at_sampling(directory)
    for cache in caches:
        cache.check(loading.config_and_dtype(directory)[0])
    tokenizer, how = load_tokenizer(directory), dict(dtype=dtype and str(dtype), weights=weights)
    if before_weights is not None:
        before_weights(loading.outline_model(directory, **how), tokenizer)
    return loading.load_model(directory, **how, mesh=mesh, progress=progress), tokenizer


def check_saves(option: str, path: Path, sources: Sequence[Path]) -> None:
    """Raises InputError where a state cannot be saved to the path of an option, before any work. sources: files that are read."""
    if not is_replaced(path):
        raise InputError(f"{option} {path}: should be a file, which is replaced if it exists")
    if same := next((source for source in sources if is_same_file(source, path)), None):
        raise InputError(f"{option} {path}: would replace {name_of(same)}, which is read")
    with writing(path):
        check_writable(path)


def used_seed(seed: int | None, configs: Sequence[GenerationConfig]) -> int:
    """The seed that is given, or 0, which one line says where rows with these settings sample tokens."""
    if seed is None and any(config.temperature for config in configs):
        log.warning("tokens are sampled with --seed 0; another seed gives another text")
    return seed or 0


def warn_of_equal_samples(configs: Sequence[GenerationConfig]) -> None:
    """Says in one line that several samples of a prompt are the same where decoding is greedy."""
    if any(config.num_return_sequences > 1 and not config.temperature for config in configs):
        log.warning("several samples of a prompt are the same text, because decoding is greedy; give a temperature")


def number_list(option: str, text: str, kind: type[int] | type[float], *, repeated: bool = False) -> list:
    """The numbers of an option, between commas. Raises InputError for what is no number of that kind.

    repeated: whether a number may be given twice.
    """
    try:
        numbers = [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise InputError(f"{option} {text!r} should be {what} with commas between them") from None
    if not repeated and (again := [number for i, number in enumerate(numbers) if number in numbers[:i]]):
        raise InputError(f"{option} {text}: {again[0]:g} is given twice")
    return numbers


def megabytes(count: float) -> str:
    """A number of bytes as people read it: megabytes, or gigabytes from one on."""
    return f"{count / 1e9:.2f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
