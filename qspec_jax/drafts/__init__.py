"""Drafts: what proposes the tokens that the target verifies. `draft.py` is the protocol, `registry.py` has them by name."""

from qspec_jax.drafts.draft import Draft
from qspec_jax.drafts.quantspec import quantspec
from qspec_jax.drafts.registry import DRAFTS, make_draft

__all__ = ["DRAFTS", "Draft", "make_draft", "quantspec"]
