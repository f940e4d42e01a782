"""transformers' `generate` beside our decoding: the same shape or checkpoint, batch 1, greedy, timed token by token.

Each context runs in a process of its own: two frameworks that each keep the memory of a GPU do not share one, and transformers keeps the
size of the largest static cache that it has made. That process is this module's `main`: a request on standard input, the figures on
standard output, both JSON. Needs torch, which the project itself does not.
"""

import importlib.util
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qspec_jax.bench.decode_rows import DecodeRow
from qspec_jax.errors import InputError, named

NAME = "transformers"
NEW_TOKENS, REPEATS = 128, 3


def check() -> None:
    """Raises InputError where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("--transformers needs torch: pip install torch")


def measure(source: dict[str, Any] | Path, context: int, *, dtype: str, seed: int = 0) -> DecodeRow:
    """Measures generate at one context, with a static cache and, on a GPU, compiled; where it fails, the row says so.

    source: the settings of a config.json, for random weights, or a checkpoint directory. The figures are medians over REPEATS runs of
    NEW_TOKENS tokens each: of prefill, and of the time between two tokens.
    """
    shape = {"config": source} if isinstance(source, dict) else {"directory": str(source.resolve())}
    request = json.dumps(shape | {"context": context, "dtype": dtype, "seed": seed})
    # jax, which comes along with the imports, is to leave the GPU alone.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-m", __name__], input=request, capture_output=True, text=True, env=environment, check=False)
    if done.returncode < 0:
        return DecodeRow(NAME, context, 0, "failed", f"killed by signal {-done.returncode}")
    if done.returncode:
        return DecodeRow(NAME, context, 0, "failed", (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return DecodeRow(NAME, context, 0, **json.loads(done.stdout))


def main() -> None:
    """Answers the request on standard input: the figures, or why there are none, on standard output."""
    # What libraries print goes to standard error.
    output, sys.stdout = sys.stdout, sys.stderr
    request = json.load(sys.stdin)
    try:
        found = _figures(load(request.get("config") or request["directory"], request["dtype"]), request["context"], request["seed"])
    except Exception as error:
        found = {"status": "failed", "note": named(error)}
    json.dump(found, output)


def load(source: dict[str, Any] | str, dtype: str, device: str | None = None):
    """Makes a model with random weights, or loads one from a checkpoint directory, in torch; by default on the GPU if there is one."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, dtype)
    if not isinstance(source, dict):
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype, local_files_only=True).to(device).eval()
    with torch.device(device):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **source), dtype=dtype).eval()


def _figures(model, context: int, seed: int) -> dict:
    import torch

    torch.manual_seed(seed)
    prompt = torch.randint(model.config.vocab_size, (context,)).tolist()
    began = time.perf_counter()
    decode_times(model, prompt, NEW_TOKENS, static=True)  # to warm up, and to compile
    warm_s = time.perf_counter() - began
    runs = [decode_times(model, prompt, NEW_TOKENS, static=True) for _ in range(REPEATS)]
    prefill_s = statistics.median(prefill_s for prefill_s, *_ in runs)
    # Not the sum: a run may begin with recording graphs again.
    token_s = statistics.median(interval for _, intervals, _ in runs for interval in intervals)
    cuda = model.device.type == "cuda"
    return {
        "status": "measured",
        "note": f"static cache{', compiled' if cuda else ''}, {NEW_TOKENS} tokens, medians of {REPEATS} runs",
        "prefill_s": prefill_s,
        "compile_s": warm_s - prefill_s - token_s * (NEW_TOKENS - 1),
        "decode_s": token_s * (NEW_TOKENS - 1),
        "new_tokens": NEW_TOKENS - 1,
        "rounds": NEW_TOKENS - 1,
        "tokens_per_second": 1 / token_s,
        "ms_per_token": 1e3 * token_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if cuda else None,
    }


def decode_times(model, prompt: Sequence[int], new_tokens: int, *, static: bool) -> tuple[float, list[float], list[int]]:
    """Seconds until the first new token, seconds from each token to the next, and the tokens."""
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
    settings = dict(do_sample=False, eos_token_id=None, max_new_tokens=new_tokens, streamer=clock)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **({"cache_implementation": "static"} if static else {}))
    prefill_s, *intervals = (after - before for before, after in itertools.pairwise(clock.times))
    return prefill_s, intervals, out[0, len(prompt) :].tolist()


if __name__ == "__main__":
    main()
