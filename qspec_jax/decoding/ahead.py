"""Programs of a generation that are compiled while its weights are loaded."""

import logging
import threading
from collections.abc import Sequence
from typing import Any

from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.fixed_batch import Run
from qspec_jax.decoding.keys import key_of
from qspec_jax.decoding.prepare import prepare
from qspec_jax.drafts.draft import checkpoints_of
from qspec_jax.drafts.registry import AUTO
from qspec_jax.models.llama import Llama
from qspec_jax.models.skipping import NO_LAYERS

log = logging.getLogger(__name__)


def compile_ahead(outline: Llama, prompts: Sequence[Sequence[int]], config: GenerationConfig, tokenizer: Any) -> GenerationConfig:
    """Begins to compile what `generate` will run with these prompts, and returns. `generate` waits for what is not done by then.

    Nothing is compiled ahead for a draft that has weights of its own, or settings that depend on the weights (`skip=auto`), and for a cache
    with a part in host memory, whose size depends on the memory that the weights leave. An error is left for `generate` to raise.

    Args:
        outline: of the model, see `checkpoints.loading.outline_model`.
        prompts: token ids.
        config: the settings.
        tokenizer: the model's.

    Returns:
        The settings with draft "auto" resolved.

    Raises:
        InputError: as `prepare` does.
    """
    if (
        config.num_return_sequences > 1
        or config.cache_config.in_host_memory
        or (config.draft != AUTO and checkpoints_of(config.draft_settings))
    ):
        return config
    prepared, open_settings = prepare(outline, prompts, config=config, key=key_of(0), tokenizer=tokenizer), []
    if prepared.draft is not None:  # which is asked for its open settings by choosing them
        prepared.draft.with_choice(lambda draft: open_settings.append(draft) or NO_LAYERS)
    if open_settings:
        return prepared.config

    def compile_programs() -> None:
        try:
            Run(prepared, None, 1).compile()  # which traces them
        except Exception as error:
            log.info("the programs could not be compiled before the weights were loaded: %s", error)

    threading.Thread(target=compile_programs, name="compile ahead", daemon=True).start()
    return prepared.config
