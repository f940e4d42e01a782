"""`qspec eval exactness`."""

from pathlib import Path
from typing import Annotated

import typer

from qspec_jax.caches.registry import CACHES, CacheConfig
from qspec_jax.cli.eval_options import SETTINGS, Scheme, contents_of, loaded, name_of_model, walks_along
from qspec_jax.cli.measuring import measure_and_show
from qspec_jax.cli.options import (
    DtypeOption,
    EvaluatedModel,
    GammaList,
    GroupSize,
    Json,
    Output,
    WeightsOption,
    check_group_size,
    number_list,
)
from qspec_jax.decoding.config import BITS, GAMMA, TOKENS
from qspec_jax.drafts.registry import AUTO, DRAFTS, NONE, USUAL, parse_draft
from qspec_jax.errors import InputError
from qspec_jax.evaluate import exactness_report
from qspec_jax.kept_rows import KeptRows

exactness_commands = typer.Typer()


@exactness_commands.command("exactness")
def exactness_command(
    command: typer.Context,
    model: EvaluatedModel = None,
    file: Annotated[list[Path] | None, typer.Option(help="A text (repeatable): the demo's held-out files, if not given.")] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            metavar=SETTINGS, help=f"{', '.join(DRAFTS)} (repeatable): quantspec, if not given. {NONE} is always compared with itself, too."
        ),
    ] = None,
    num_speculative_tokens: GammaList = str(GAMMA),
    batch: Annotated[
        str, typer.Option(help="Rows that are decoded together; several with commas between them: 1,3. The last batch may have fewer.")
    ] = "1",
    cache: Annotated[str, typer.Option(metavar=SETTINGS, help=f"The target's cache, of all decodes: {', '.join(CACHES)}.")] = "int8",
    context: Annotated[
        list[int] | None, typer.Option("--context", "--prompt-tokens", help="Tokens of each prompt (repeatable): 4096, if not given.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="New tokens of each prompt.")] = 384,
    texts: Annotated[int | None, typer.Option(min=1, help="Maximum number of texts: all, if not given.")] = None,
    joined: Annotated[
        bool, typer.Option("--joined", help="Join the files, and cut --texts texts (4, if not given) from them, spread evenly.")
    ] = False,
    adaptive: Annotated[bool, typer.Option("--adaptive", help="Adapt the number of draft tokens per row to its past acceptance.")] = False,
    exact: Annotated[str, typer.Option(metavar=f"{TOKENS}|{BITS}", help="bits: all decodes with exact bits.")] = TOKENS,
    scheme: Scheme = CacheConfig.scheme,
    group_size: GroupSize = None,
    dtype: DtypeOption = None,
    weights: WeightsOption = None,
    output: Output = None,
    as_json: Json = False,
):
    """How many greedy tokens agree with one-by-one decoding. Of the first ones that differ it shows how close the logits were."""
    gammas, batches, contexts = number_list("--gamma", num_speculative_tokens, int), number_list("--batch", batch, int), context or [4096]
    drafts = draft or [USUAL]
    for text in drafts:
        if text == AUTO:
            raise InputError(f"--draft {AUTO} chooses a draft for generate and batch; name the drafts that should be compared")
        parse_draft(text)
    if exact not in (TOKENS, BITS):
        raise InputError(f"--exact {exact} should be {TOKENS} or {BITS}")
    if min(gammas) < 1:
        raise InputError(f"--gamma {min(gammas)} should be at least 1; decoding without drafts is compared anyway")
    if min(batches) < 1:
        raise InputError(f"--batch {min(batches)} should be at least 1")
    settings = dict(scheme=scheme, group_size=group_size, adaptive=adaptive, exact=exact)
    given = {name: value for name, value in settings.items() if value not in (None, False, CacheConfig.scheme, TOKENS)}
    asked = exactness_report.Comparison(drafts, gammas, batches, cache, max_new_tokens, given)
    configs = [asked.config(draft, gamma) for draft, gamma, _ in asked.cases()]  # which refuses drafts that the cache does not take
    check_group_size(group_size, [configs[0].cache_config])

    def measure(kept: KeptRows) -> exactness_report.ExactnessReport:
        contents = contents_of(file)
        network, tokenizer = loaded(model, dtype, weights, quiet=as_json, caches=[configs[0].cache_config])
        walks = walks_along(tokenizer, contents, contexts, max_new_tokens, texts, joined=joined)
        prompts = [(walk.context, walk.prompts) for walk in walks]
        places = dict(skipped=walks[0].skipped, kept=kept, progress=False if as_json else None)
        return exactness_report.run(name_of_model(model), network, tokenizer, prompts, asked, **places)

    measure_and_show(command, measure, output, as_json=as_json)
