#!/usr/bin/env bash
# transformers 5.24.0: GenerationConfig() says nothing of top_k, and generate(do_sample=True) samples from 50 tokens all the same.
#
# Behaviour seen: a GenerationConfig made by hand, or read from a generation_config.json without top_k, has top_k None. `generate` fills what
# is None from defaults of its own before it samples: top_k 50, temperature 1.0, top_p 1.0. So a model served by another library that reads
# "not said" as "no filter" samples from other tokens than transformers does. The defaults are in a method, and in no attribute of the config.
#
# Output seen:
#   as made: top_k None, temperature None, top_p None
#   as generate fills it: top_k 50, temperature 1.0, top_p 1.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==5.24.0" 2> /dev/null
"$folder/venv/bin/python" - <<'PYTHON'
import json
import os
import sys
import tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
from transformers import GenerationConfig

with tempfile.TemporaryDirectory() as folder:
    with open(os.path.join(folder, "generation_config.json"), "w") as file:
        json.dump({"do_sample": True, "eos_token_id": 2}, file)
    config = GenerationConfig.from_pretrained(folder)
names = ("top_k", "temperature", "top_p")
made = {name: getattr(config, name) for name in names}
print("as made:", ", ".join(f"{name} {value}" for name, value in made.items()))
filled = {name: config._get_default_generation_params()[name] for name in names}
print("as generate fills it:", ", ".join(f"{name} {value}" for name, value in filled.items()))
sys.exit((made, filled) != (dict.fromkeys(names), {"top_k": 50, "temperature": 1.0, "top_p": 1.0}))
PYTHON
