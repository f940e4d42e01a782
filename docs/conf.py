"""Sphinx: the pages of this folder, the notebooks as they were last run, and the API from the docstrings. `make docs` builds it."""

import json
import shutil
from pathlib import Path

from qspec_jax import demo
from qspec_jax.cli.process import version_of

HERE = Path(__file__).parent

project = "qspec-jax"
copyright = "the authors of qspec-jax"
version = release = version_of("qspec-jax")
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"qspec-jax {version}"
myst_heading_anchors = 4
nb_execution_mode = "off"  # tests run them
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
# What a docstring writes as a page would, such as *args or [B, T], is no markup there.
suppress_warnings = ["docutils"]

# Sphinx reads nothing beside its folder. As they are; links to pages lose the way through docs/.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
(HERE / "notebooks").mkdir()
for notebook in sorted((HERE.parent / "notebooks").glob("*.ipynb")):
    text = notebook.read_text(encoding="utf-8").replace("](../docs/", "](../")
    (HERE / "notebooks" / notebook.name).write_text(text, encoding="utf-8")

# The page of what GPUs gave, from the JSON that `qspec demo` shows too.
measured = json.loads((demo.MODEL.parent / "measured.json").read_text(encoding="utf-8"))
page = [
    "# Measured on a GPU",
    f"{measured['date']}, jax {measured['jax']}, batch 1: `{measured['command']}`. [Results](../results.md) has more, and how to read it.",
    "| model | context | GPU | draft | drafts a round | accepted, given those before | ms a token | without | transformers | speed-up |\n"
    + "|---|---|---|---|---|---|---|---|---|---|\n"
    + "\n".join(
        f"| {row['model']} | {row['context']:,} | {row['device']} | `{row['draft']}` | {row['gamma']} "
        f"| {row['conditional_rate']:.2f}, {'**simulated**' if row['simulated'] else 'real'} | {row['ms']:.2f} | {row['baseline_ms']:.2f} "
        f"| {row['transformers_ms'] or ''} | {row['speedup']:.2f} |"
        for row in measured["rows"]
    ),
]
(HERE / "notebooks" / "measured.md").write_text("\n\n".join(page) + "\n", encoding="utf-8")
