#!/usr/bin/env bash
# transformers 5.24.0, Olmo3Config: a rope_theta that is given flat, beside rope_scaling as transformers 4 writes it, becomes that of the
# layers with full attention alone. The key is taken out of the arguments for them, so the layers with a sliding window get the class's
# default of 500000, whatever the file says. The OLMo 3 checkpoints of its authors have 500000 for both, so none of them shows it.
#
# Output seen:
#   flat rope_theta 10000: full_attention 10000.0, sliding_attention 500000.0
#   by kind of layer:      full_attention 10000.0, sliding_attention 10000.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check "transformers==5.24.0" 2> /dev/null
"$folder/venv/bin/python" - <<'PYTHON'
from transformers import Olmo3Config

kinds = "full_attention", "sliding_attention"


def bases(**given):
    ropes = Olmo3Config(num_hidden_layers=4, **given).rope_parameters
    return [float(ropes[kind]["rope_theta"]) for kind in kinds]


yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256}
flat = bases(rope_theta=10000.0, rope_scaling=yarn)
by_kind = bases(rope_parameters={kinds[0]: yarn | {"rope_theta": 10000.0}, kinds[1]: {"rope_type": "default", "rope_theta": 10000.0}})
for name, found in (("flat rope_theta 10000:", flat), ("by kind of layer:     ", by_kind)):
    print(name, ", ".join(f"{kind} {base}" for kind, base in zip(kinds, found)))
assert flat == [10000.0, 500000.0] and by_kind == [10000.0, 10000.0]
PYTHON
