"""What a draft is: each module makes a `qspec_jax.decode.Step` from the target model."""

from qspec_jax.drafts.quantspec import quantspec, stored

__all__ = ["quantspec", "stored"]
