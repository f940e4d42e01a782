"""The command `qspec plan`."""

from typing import Annotated

import typer

from pallas_kernels.attention.support import MAX_ROUND_TOKENS
from qspec_jax import reports
from qspec_jax.bench.architectures import ARCHITECTURES, architecture, with_weights
from qspec_jax.caches.registry import CACHES
from qspec_jax.checkpoints import loading
from qspec_jax.checkpoints.weights_text import PACKED, WeightsChoice
from qspec_jax.cli.options import Json, Output, Plot, WeightsOption
from qspec_jax.drafts.registry import DRAFTS
from qspec_jax.errors import InputError
from qspec_jax.planning import plan as planning
from qspec_jax.planning.acceptance import first_level, inner_level
from qspec_jax.planning.chances import parse_chances
from qspec_jax.planning.devices import DEVICES, find_device

CONTEXTS = (4096, 32768, 131072)
NEW_TOKENS = 640


def plan(
    arch: Annotated[str | None, typer.Option(help=f"A known shape, with 2^20 positions: {', '.join(ARCHITECTURES)}.")] = None,
    model: Annotated[
        str | None, typer.Option(metavar="DIR", help="A checkpoint directory, instead of --arch; its config.json alone is read.")
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME|FILE", help=f"One of {', '.join(DEVICES)}, or a JSON file that describes one.")
    ] = "h100",
    context: Annotated[
        list[int] | None,
        typer.Option(
            help="Tokens of the prompts; may be given several times: 4096, 32768 and 131072, if not given, each cut to what the model's "
            "positions have room for."
        ),
    ] = None,
    batch: Annotated[list[int] | None, typer.Option(help="Rows decoded at a time; may be given several times: 1, if not given.")] = None,
    cache: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:SETTING=VALUE,...]",
            help=f"A cache to decode over, with each draft and without, one of {', '.join(CACHES)}; may be given several times: drafts "
            "are over int8, if none is given. Decoding without a draft over full and over int8 is always planned.",
        ),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            "--draft",
            metavar="NAME[:SETTING=VALUE,...]",
            help="A draft; may be given several times: all whose cost and acceptance are known, if none is given, "
            "and a line on each other.",
        ),
    ] = None,
    acceptance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]R",
            help="The chance that a draft is accepted, given those before it: of all drafts, or of one by its name; may be given several "
            "times.",
        ),
    ] = None,
    inner_acceptance: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]R",
            help="The chance that the middle of a cascade, such as triforce, accepts a draft of its first one, given those before it: of "
            "all, or of one by the first draft's name; may be given several times.",
        ),
    ] = None,
    proposing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[NAME=]R",
            help="The share of rounds in which a draft that may have nothing to propose, as prompt-lookup, has something; may be "
            "given several times.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        list[int] | None,
        typer.Option("--gamma", "--num-speculative-tokens", help="Most drafts of a round; may be given several times, to find the best."),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(help="New tokens of each row, which caches have room for: 640, or half the model's positions if they are fewer."),
    ] = None,
    weights: WeightsOption = None,
    output: Output = None,
    plot: Plot = None,
    as_json: Json = False,
):
    """What pays on which GPU, by arithmetic. Intensity, memory, the time of each step and the speed-up of each draft."""
    if (arch is None) == (model is None):
        raise InputError("give one of --arch and --model")
    gammas = list(dict.fromkeys(num_speculative_tokens or planning.GAMMAS))
    batches = list(dict.fromkeys(batch or [1]))
    for option, numbers, most in ("--batch", batches, 1 << 16), ("--gamma", gammas, MAX_ROUND_TOKENS - 1):
        if wrong := [number for number in numbers if not 1 <= number <= most]:
            raise InputError(f"{option} {wrong[0]} should be from 1 to {most:,}")
    if max_new_tokens is not None and not 1 <= max_new_tokens <= 1 << 24:
        raise InputError(f"--max-new-tokens {max_new_tokens} should be from 1 to {1 << 24:,}")
    acceptances = parse_chances("--acceptance", acceptance or [], draft or list(DRAFTS))
    inner = parse_chances("--inner-acceptance", inner_acceptance or [], draft or list(DRAFTS), inner_level)
    shares = parse_chances("--proposing", proposing or [], draft or list(DRAFTS), first_level)
    found = find_device(device)
    choice = WeightsChoice.parse(weights)
    shape = None if arch is None else with_weights(architecture(arch), choice)
    config = loading.planned_config(model, choice) if shape is None else loading.with_tables(shape, choice, arch)
    max_new_tokens = min(NEW_TOKENS, config.max_length // 2) if max_new_tokens is None else max_new_tokens
    longest = config.max_length - max_new_tokens
    if longest < 1:
        raise InputError(f"--max-new-tokens {max_new_tokens:,} should be less than the model's {config.max_length:,} positions")
    if wrong := [tokens for tokens in context or [] if not 1 <= tokens <= longest]:
        room = f"the model's {config.max_length:,} positions less --max-new-tokens {max_new_tokens:,}"
        raise InputError(f"--context {wrong[0]:,} should be from 1 to {longest:,}, {room}")
    contexts = list(dict.fromkeys(context or [min(n, longest) for n in CONTEXTS]))

    def measure() -> reports.Report:
        return planning.plan(
            f"{arch or model}{choice.described(in_int4=config.int4_weights and choice.linears == PACKED)}",
            config,
            found,
            contexts,
            batches,
            caches=cache or (),
            drafts=draft or (),
            acceptances=acceptances,
            inner_acceptances=inner,
            proposing=shares,
            gammas=gammas,
            max_new_tokens=max_new_tokens,
        )

    reports.show(measure, output, as_json=as_json, plot=plot)
