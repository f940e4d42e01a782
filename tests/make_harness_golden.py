"""Makes tests/goldens/harness.json: what `lm_eval --model hf` makes of the embedded model, in float32, on the tasks in tests/harness_tasks.

Needs torch, which the project itself does not. In an environment of its own, from the project's root:

    python -m venv .venv-goldens && .venv-goldens/bin/pip install torch "lm_eval[hf]" -e .
    .venv-goldens/bin/python tests/make_harness_golden.py

The committed file was made with torch 2.13.0 (CPU), transformers 5.23.0 and lm_eval 0.4.13.
"""

import json
from pathlib import Path

from harness_samples import answers

from qspec_jax import demo

if __name__ == "__main__":
    found = answers("hf", {"pretrained": str(demo.MODEL), "dtype": "float32", "device": "cpu"}, str(demo.MODEL))
    Path(__file__).with_name("goldens").joinpath("harness.json").write_text(json.dumps(found, indent=1) + "\n")
