"""Makes tests/goldens/harness.json: what `lm_eval --model hf` makes of the embedded model, in float32, on the tasks in tests/harness_tasks.

But for one thing: where the end of a context and a continuation merge into one token, `hf` leaves that token out, and scores what comes
after it as if it came after the context alone. Here it is part of the continuation. This is so for 12 of the 56 pairs.

Needs torch, which the project itself does not. In an environment of its own, from the project's root:

    python -m venv .venv-goldens && .venv-goldens/bin/pip install torch "lm_eval[hf]" -e .
    .venv-goldens/bin/python tests/make_harness_golden.py

The committed file was made with torch 2.13.0 (CPU), transformers 5.24.0 and lm_eval 0.4.13.
"""

import json
from pathlib import Path

from harness_samples import answers
from lm_eval.models.huggingface import HFLM

from qspec_jax import demo


class WholeTokens(HFLM):
    """`hf`, with continuations that begin where the tokens of the context alone end to be those of both texts."""

    merged = 0

    def _encode_pair(self, context, continuation):
        pair = super()._encode_pair(context, continuation)
        whole = self.tok_encode(context + continuation)
        if pair[0] + pair[1] == whole:
            return pair
        WholeTokens.merged += 1
        first = max(i for i in range(len(whole)) if pair[0][:i] == whole[:i])
        return whole[:first], whole[first:]


if __name__ == "__main__":
    found = answers(WholeTokens(pretrained=str(demo.MODEL), dtype="float32", device="cpu"), None, str(demo.MODEL))
    print(f"continuations that merge with their contexts: {WholeTokens.merged}")
    Path(__file__).with_name("goldens").joinpath("harness.json").write_text(json.dumps(found, indent=1) + "\n")
