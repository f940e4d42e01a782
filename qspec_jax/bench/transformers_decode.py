"""transformers' `generate` beside our decoding: the same shape or checkpoint, batch 1, greedy, timed token by token.

It runs in a process of its own, for two frameworks that each keep the memory of a GPU do not share one. That process is this module's
`main`: a request on standard input, a list of results on standard output, both JSON. Needs torch, which the project itself does not.
"""

import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from qspec_jax.bench.architectures import ARCHITECTURES
from qspec_jax.bench.decode import Row
from qspec_jax.errors import InputError

NAME = "transformers"


def check() -> None:
    """Raises InputError where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("--transformers needs torch: pip install torch")


def measure(source: str, contexts: Sequence[int], *, new_tokens: int, repeats: int, seed: int = 0) -> list[Row]:
    """A row for each context, with a static cache and, on a GPU, compiled; where it fails, rows that say so.

    source: a name of ARCHITECTURES, for random weights, or a checkpoint directory. new_tokens: of each of `repeats` runs.
    """
    request = {"source": source, "contexts": list(contexts), "new_tokens": new_tokens, "repeats": repeats, "seed": seed}
    # jax, which comes along with the imports, is to leave the GPU alone.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", __name__], input=json.dumps(request), capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [Row(NAME, context, 0, "failed", reason) for context in contexts]
    return [Row(NAME, gamma=0, **found) for found in json.loads(done.stdout)]


def main() -> None:
    request = json.load(sys.stdin)
    model = load(request["source"])
    found = [_row(model, context, request) for context in request["contexts"]]
    json.dump(found, sys.stdout)


def load(source: str, dtype: str = "bfloat16"):
    """A model in torch, on the GPU if there is one: with random weights, or of a checkpoint directory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, dtype)
    if source not in ARCHITECTURES:
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype).to(device).eval()
    settings = dict(ARCHITECTURES[source])
    config = AutoConfig.for_model("llama", **settings)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _row(model, context: int, request: dict) -> dict:
    import torch

    torch.manual_seed(request["seed"])
    prompt = torch.randint(model.config.vocab_size, (context,)).tolist()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    try:
        decode_times(model, prompt, request["new_tokens"], static=True)  # to warm up, and to compile
        warm_s = time.perf_counter() - began
        runs = [decode_times(model, prompt, request["new_tokens"], static=True)[:2] for _ in range(request["repeats"])]
    except Exception as error:  # one context of several
        return {"context": context, "status": "failed", "note": f"{type(error).__name__}: {error}".splitlines()[0]}
    prefill_s, decode_s = (statistics.median(times) for times in zip(*runs))
    new = request["new_tokens"] - 1
    return {
        "context": context,
        "status": "measured",
        "note": "static cache" + (", compiled" if model.device.type == "cuda" else ""),
        "prefill_s": prefill_s,
        "compile_s": warm_s - prefill_s - decode_s,
        "decode_s": decode_s,
        "new_tokens": new,
        "rounds": new,
        "tokens_per_second": new / decode_s,
        "ms_per_token": 1e3 * decode_s / new,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


def decode_times(model, prompt: Sequence[int], new_tokens: int, *, static: bool) -> tuple[float, float, list[int]]:
    """Seconds until the first new token and from there to the last, and the tokens."""
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """Called with the prompt, and with each token once it is on the host."""

        def __init__(self):
            self.times = []

        def put(self, value):
            self.times.append(time.perf_counter())

        def end(self):
            pass

    clock, ids = Clock(), torch.tensor([prompt], device=model.device)
    settings = dict(do_sample=False, eos_token_id=None, min_new_tokens=new_tokens, max_new_tokens=new_tokens, streamer=clock)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **({"cache_implementation": "static"} if static else {}))
    began, first, *_, last = clock.times
    return first - began, last - first, out[0, len(prompt) :].tolist()


if __name__ == "__main__":
    main()
