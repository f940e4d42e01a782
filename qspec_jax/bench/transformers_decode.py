"""transformers' `generate` beside our decoding: the same shape or checkpoint, batch 1, greedy, timed token by token.

It runs in several ways: one by one with a static cache, which on a GPU it compiles; with drafts from the prompt (prompt lookup) or from a
second checkpoint (assisted generation), which its static cache does not take; and one by one with its quantized cache.

Each run is a process of its own: two frameworks that each keep the memory of a GPU do not share one, and transformers keeps the size of the
largest static cache that it has made. That process is this module's `main`: a request on standard input, the figures on standard output,
both JSON. Needs torch, which the project itself does not.
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
ONE_BY_ONE, PROMPT_LOOKUP, QUANTIZED = "one by one", "prompt-lookup", "quantized cache"
LOOKUP_TOKENS = 10  # drafts a round of prompt lookup, as transformers' documentation has it


def check() -> None:
    """Raises InputError where torch is not installed."""
    if importlib.util.find_spec("torch") is None:
        raise InputError("--transformers needs torch: pip install torch")


def ways(drafts: Sequence[str], *, quantized_cache: bool) -> list[str]:
    """The ways in which generate is measured: one by one, with each of the drafts, and with its quantized cache.

    Args:
        drafts: "prompt-lookup", or checkpoint directories.
        quantized_cache: whether its quantized cache is measured.

    Raises:
        InputError: for any other draft.
    """
    for draft in drafts:
        if draft != PROMPT_LOOKUP and not Path(draft).is_dir():
            raise InputError(f"--transformers-draft {draft}: should be {PROMPT_LOOKUP}, or the directory of a checkpoint, which assists")
    return [ONE_BY_ONE, *drafts, *([QUANTIZED] if quantized_cache else [])]


def measure(source: dict[str, Any] | Path, context: int, *, dtype: str, way: str = ONE_BY_ONE, seed: int = 0) -> DecodeRow:
    """Measures generate at one context; where it fails, the row says so.

    Args:
        source: the settings of a config.json, for random weights, or a checkpoint directory.
        context: tokens of the prompt.
        dtype: of the weights.
        way: see `ways`.
        seed: of prompt and weights.

    Returns:
        Medians over REPEATS runs of NEW_TOKENS tokens each: of prefill, and of the time between two tokens.
    """
    name = NAME + {ONE_BY_ONE: "", PROMPT_LOOKUP: "+lookup", QUANTIZED: "+quantized"}.get(way, "+assistant")
    shape = {"config": source} if isinstance(source, dict) else {"directory": str(source.resolve())}
    request = json.dumps(shape | {"context": context, "dtype": dtype, "way": way, "seed": seed})
    # jax, which comes along with the imports, is to leave the GPU alone.
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-m", __name__], input=request, capture_output=True, text=True, env=environment, check=False)
    if done.returncode < 0:
        return DecodeRow(name, context, 0, "failed", f"killed by signal {-done.returncode}")
    if done.returncode:
        return DecodeRow(name, context, 0, "failed", (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])
    return DecodeRow(name, context, 0, **json.loads(done.stdout))


def main() -> None:
    """Answers the request on standard input: the figures, or why there are none, on standard output."""
    # What libraries print goes to standard error.
    output, sys.stdout = sys.stdout, sys.stderr
    request = json.load(sys.stdin)
    try:
        model = load(request.get("config") or request["directory"], request["dtype"])
        found = _figures(model, request["way"], request["context"], request["seed"])
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


def _figures(model, way: str, context: int, seed: int) -> dict:
    import torch

    torch.manual_seed(seed)
    prompt, (options, how) = torch.randint(model.config.vocab_size, (context,)).tolist(), _options(model, way)
    began = time.perf_counter()
    decode_times(model, prompt, NEW_TOKENS, **options)  # to warm up, and to compile
    warm_s = time.perf_counter() - began
    runs = [decode_times(model, prompt, NEW_TOKENS, **options) for _ in range(REPEATS)]
    prefill_s = statistics.median(times[0] for times, *_ in runs)
    rounds = statistics.median(len(times) - 1 for times, *_ in runs)
    if way in (ONE_BY_ONE, QUANTIZED):
        # Not the sum: a run may begin with recording graphs again.
        token_s = statistics.median(interval for times, *_ in runs for interval in times[1:])
    else:  # some rounds give several tokens
        token_s = statistics.median(sum(times[1:]) / sum(counts[1:]) for times, counts, _ in runs)
    return {
        "status": "measured",
        "note": f"{how}, {NEW_TOKENS} tokens, medians of {REPEATS} runs",
        "prefill_s": prefill_s,
        "compile_s": warm_s - prefill_s - token_s * (NEW_TOKENS - 1),
        "decode_s": token_s * (NEW_TOKENS - 1),
        "new_tokens": NEW_TOKENS - 1,
        "rounds": int(rounds),
        "tokens_per_second": 1 / token_s,
        "ms_per_token": 1e3 * token_s,
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if model.device.type == "cuda" else None,
    }


def _options(model, way: str) -> tuple[dict[str, Any], str]:
    """The options of generate for a way, and a note on what it then does."""
    if way == ONE_BY_ONE:
        return {"cache_implementation": "static"}, f"static cache{', compiled' if model.device.type == 'cuda' else ''}"
    if way == QUANTIZED:
        return {"cache_implementation": "quantized"}, "4-bit cache"
    if way == PROMPT_LOOKUP:
        return {"prompt_lookup_num_tokens": LOOKUP_TOKENS}, f"up to {LOOKUP_TOKENS} drafts a round, dynamic cache"
    return {"assistant_model": load(way, str(model.dtype).removeprefix("torch."))}, f"assisted by {Path(way).name}, dynamic cache"


def decode_times(model, prompt: Sequence[int], new_tokens: int, **options: Any) -> tuple[list[float], list[int], list[int]]:
    """Generates, and times it. options: others of `generate`.

    Returns:
        For the first new tokens and each time that further ones come the seconds since the time before, and how many come; and the tokens.
    """
    import torch
    from transformers.generation.streamers import BaseStreamer

    class Clock(BaseStreamer):
        """Called with the prompt, and with tokens once they are on the host."""

        def __init__(self):
            self.times, self.counts = [], []

        def put(self, value):
            self.times.append(time.perf_counter())
            self.counts.append(value.numel())

        def end(self):
            pass

    clock, ids = Clock(), torch.tensor([prompt], device=model.device)
    settings = dict(do_sample=False, eos_token_id=None, max_new_tokens=new_tokens, streamer=clock)
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **options)
    return [after - before for before, after in itertools.pairwise(clock.times)], clock.counts[1:], out[0, len(prompt) :].tolist()


if __name__ == "__main__":
    main()
