"""QuantSpec in JAX: self-speculative decoding over one hierarchical quantized KV cache.

Public names and submodules are imported when they are first used: importing the package alone is quick, which the command line needs.
"""

TYPE_CHECKING = False  # type checkers know this name; the one of `typing` takes time to import
if TYPE_CHECKING:  # the same as `_MODULES`, for type checkers
    from qspec_jax.caches.registry import CacheConfig
    from qspec_jax.checkpoints.loading import load
    from qspec_jax.compile_cache import keep_compiled
    from qspec_jax.decoding.batch import run_batch
    from qspec_jax.decoding.config import GenerationConfig
    from qspec_jax.decoding.conversation import Conversation
    from qspec_jax.decoding.generate import Piece, Stream, generate, stream
    from qspec_jax.decoding.prepare import Prepared, prepare
    from qspec_jax.decoding.reading import extend, prefill
    from qspec_jax.decoding.requests import Request
    from qspec_jax.decoding.results import Generation, Stats
    from qspec_jax.decoding.saving import load_state, save_state
    from qspec_jax.decoding.scoring import Score, score
    from qspec_jax.drafts.registry import make_draft
    from qspec_jax.errors import InputError
    from qspec_jax.models.config import LlamaConfig
    from qspec_jax.states.state import State

_MODULES = {
    "qspec_jax.caches.registry": ("CacheConfig",),
    "qspec_jax.checkpoints.loading": ("load",),
    "qspec_jax.compile_cache": ("keep_compiled",),
    "qspec_jax.decoding.config": ("GenerationConfig",),
    "qspec_jax.decoding.batch": ("run_batch",),
    "qspec_jax.decoding.prepare": ("Prepared", "prepare"),
    "qspec_jax.decoding.conversation": ("Conversation",),
    "qspec_jax.decoding.reading": ("extend", "prefill"),
    "qspec_jax.decoding.requests": ("Request",),
    "qspec_jax.decoding.results": ("Generation", "Stats"),
    "qspec_jax.decoding.saving": ("load_state", "save_state"),
    "qspec_jax.decoding.scoring": ("Score", "score"),
    "qspec_jax.drafts.registry": ("make_draft",),
    "qspec_jax.decoding.generate": ("Piece", "Stream", "generate", "stream"),
    "qspec_jax.errors": ("InputError",),
    "qspec_jax.models.config": ("LlamaConfig",),
    "qspec_jax.states.state": ("State",),
}
__all__ = [
    "CacheConfig",
    "Conversation",
    "Generation",
    "GenerationConfig",
    "InputError",
    "LlamaConfig",
    "Piece",
    "Prepared",
    "Request",
    "Score",
    "State",
    "Stats",
    "Stream",
    "extend",
    "generate",
    "keep_compiled",
    "load",
    "load_state",
    "make_draft",
    "prefill",
    "prepare",
    "run_batch",
    "save_state",
    "score",
    "stream",
]


def __getattr__(name: str):
    import importlib

    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":  # it is there, and something that it imports is not
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted({*globals(), *__all__})
