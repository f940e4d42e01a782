"""QuantSpec in JAX: self-speculative decoding over one hierarchical quantized KV cache.

What is public is imported when it is first asked for: importing the package alone is quick, which the command line needs.
"""

import importlib
import sys
import types

_MODULES = {
    "qspec_jax.caches.registry": ("CacheConfig",),
    "qspec_jax.checkpoints.loading": ("load",),
    "qspec_jax.decoding.config": ("GenerationConfig",),
    "qspec_jax.decoding.generate": ("Generation", "Piece", "Stats", "Stream", "generate", "stream"),
    "qspec_jax.errors": ("InputError",),
    "qspec_jax.models.config": ("LlamaConfig",),
}
__all__ = sorted(name for names in _MODULES.values() for name in names)


class _Package(types.ModuleType):
    def __getattr__(self, name: str):
        for module, names in _MODULES.items():
            if name in names:
                return getattr(importlib.import_module(module), name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")

    def __dir__(self):
        return sorted({*super().__dir__(), *__all__})


sys.modules[__name__].__class__ = _Package
