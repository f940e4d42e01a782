"""Sphinx: the pages of this folder, and the API reference from the docstrings. `make docs` builds it."""

from qspec_jax.cli.process import version_of

project = "qspec-jax"
copyright = "the authors of qspec-jax"
version = release = version_of("qspec-jax")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"qspec-jax {version}"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
nitpicky = False
# What a docstring writes as a page would, such as *args or [B, T], is no markup there.
suppress_warnings = ["docutils"]
