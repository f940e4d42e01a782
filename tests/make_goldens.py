"""Makes tests/goldens/logits.npz: transformers' float32 logits of every case of tests/checkpoints.py, and a few
continuations.

Needs torch and transformers, which the project itself does not. In an environment of its own:

    python -m venv .venv-goldens && .venv-goldens/bin/pip install torch transformers ml_dtypes
    .venv-goldens/bin/python tests/make_goldens.py

The committed file was made with torch 2.13.0 (CPU) and transformers 5.24.0. Run it again when cases change.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers
from checkpoints import CASES, CONTINUED, GOLDENS, case_lengths, case_tokens, known_to_transformers, old_spelling, write_checkpoint
from transformers import AutoModelForCausalLM


def load(directory: Path) -> transformers.PreTrainedModel:
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    for problem in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if info[problem]:
            sys.exit(f"{directory.name}: {problem} {info[problem]}")
    return model.eval()


@torch.no_grad()
def logits(model: transformers.PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    return model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits.numpy()


@torch.no_grad()
def continuation(model: transformers.PreTrainedModel, tokens: np.ndarray, new: int) -> np.ndarray:
    prompts = torch.from_numpy(tokens.astype(np.int64))
    settings = dict(max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None)
    return model.generate(prompts, attention_mask=torch.ones_like(prompts), **settings)[:, tokens.shape[1] :].numpy().astype(np.int32)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    goldens = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, config in ((name, known_to_transformers(config)) for name, config in CASES.items()):
            new = load(write_checkpoint(Path(scratch, "new", name), config))
            old = load(write_checkpoint(Path(scratch, "old", name), old_spelling(config), shards=3))
            for length, count in CONTINUED if name == "phi3-longrope" else ():
                goldens[f"{name}-{length}+{count}"] = continuation(new, case_tokens(name)[:, :length], count)
            for length in case_lengths(name):
                tokens = case_tokens(name)[:, :length]
                golden = goldens[f"{name}-{length}"] = logits(new, tokens)
                if not np.array_equal(golden, logits(old, tokens)):
                    sys.exit(f"{name}: transformers reads the two spellings differently")
                print(f"{name:28} {length:3} tokens: spread {golden.std():6.3f}, largest {abs(golden).max():6.2f}")
    GOLDENS.parent.mkdir(exist_ok=True)
    np.savez_compressed(GOLDENS, **goldens)
    print(f"{GOLDENS}: {len(goldens)} arrays, {GOLDENS.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
