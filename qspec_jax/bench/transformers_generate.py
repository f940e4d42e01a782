"""Autoregressive decoding on a CPU against transformers' `generate`: the same checkpoint, prompt, dtype and machine, batch 1, greedy.

    python -m qspec_jax.bench.transformers_generate [--model DIR] [--dtype float32] [--prompt-tokens 512] [--max-new-tokens 128]

Needs torch, which the project itself does not: pip install torch. Tokens per second leave prefill and compilation out on both sides.
"""

import argparse
import json
import statistics

import jax

from qspec_jax import demo
from qspec_jax.bench import transformers_decode
from qspec_jax.checkpoints import loading
from qspec_jax.checkpoints.tokenizers import load_tokenizer
from qspec_jax.decoding.config import GenerationConfig
from qspec_jax.decoding.generate import generate
from qspec_jax.training import corpus


def ours(directory: str, dtype: str, prompt: list[int], new_tokens: int, repeats: int) -> tuple[list[float], list[int]]:
    """Decodes with qspec-jax: tokens per second of each run, and the tokens."""
    model = loading.load_model(directory, dtype=dtype, progress=False)
    config = GenerationConfig(draft="none", max_new_tokens=new_tokens, ignore_eos=True)
    runs = [generate(model, [prompt], config=config) for _ in range(repeats + 1)][1:]
    return [run.stats.tokens_per_second for run in runs], runs[-1].token_ids[0]


def theirs(directory: str, dtype: str, prompt: list[int], new_tokens: int, repeats: int) -> tuple[list[float], list[int]]:
    """Decodes with transformers: tokens per second of each run, and the tokens."""
    model = transformers_decode.load(directory, dtype, "cpu")
    runs = [transformers_decode.decode_times(model, prompt, new_tokens) for _ in range(repeats + 1)][1:]
    return [len(times[1:]) / sum(times[1:]) for times, *_ in runs], runs[-1][2]


def main() -> None:
    """Runs both and prints their rates, and how many leading tokens are the same, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(demo.MODEL))
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    if args.max_new_tokens < 2:
        parser.error(f"--max-new-tokens {args.max_new_tokens} should be 2 or more")
    if jax.default_backend() != "cpu":
        parser.error("set JAX_PLATFORMS=cpu: this compares two CPU decoders; on a GPU there is `qspec bench decode --transformers`")
    text = corpus.held_out_files()[0].read_text(encoding="utf-8")
    prompt = load_tokenizer(args.model)(text)["input_ids"][: args.prompt_tokens]
    settings = (args.model, args.dtype, prompt, args.max_new_tokens, args.repeats)
    (our_rates, our_tokens), (their_rates, their_tokens) = ours(*settings), theirs(*settings)
    same = next((i for i, (a, b) in enumerate(zip(our_tokens, their_tokens)) if a != b), len(our_tokens))
    print(
        json.dumps(
            {
                "dtype": args.dtype,
                "prompt_tokens": len(prompt),
                "new_tokens": args.max_new_tokens,
                "qspec_tokens_per_second": round(statistics.median(our_rates), 1),
                "qspec_range": [round(min(our_rates), 1), round(max(our_rates), 1)],
                "transformers_tokens_per_second": round(statistics.median(their_rates), 1),
                "transformers_range": [round(min(their_rates), 1), round(max(their_rates), 1)],
                "ratio": round(statistics.median(our_rates) / statistics.median(their_rates), 2),
                "same_leading_tokens": same,
            }
        )
    )


if __name__ == "__main__":
    main()
