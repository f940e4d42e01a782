#!/usr/bin/env bash
# transformers 5.24.0 with tokenizers 0.23.3: AutoTokenizer does not tokenize by a checkpoint's tokenizer.json where its class is
# GPT2Tokenizer or Qwen2Tokenizer, or where config.json's model_type is qwen2, whatever the class. It keeps vocabulary and merges of the file,
# and takes pre-tokenizer and normalizer of the class. So a checkpoint that splits numbers after three digits, as Llama 3's, gets other
# ids than it was trained with, and nothing says so. transformers 4.56.2 takes the file whole.
#
# Seen ("12345" with merges for "12", "123", "45" and "12345"; the file splits after three digits):
#   transformers 5.24.0: the file ['123', '45']
#     GPT2Tokenizer, model_type llama: ['12345']
#     Qwen2Tokenizer, model_type llama: ['1', '2', '3', '4', '5']
#     PreTrainedTokenizerFast, model_type qwen2: ['1', '2', '3', '4', '5']
#     PreTrainedTokenizerFast, model_type llama: ['123', '45']
#   transformers 4.56.2: the file ['123', '45'], and all four ['123', '45']
# Exit code 1: this has changed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

cat > "$folder/show.py" <<'PYTHON'
import json
import pathlib
import sys

import transformers
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

folder, expected = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2])
vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
merges = [("1", "2"), ("12", "3"), ("4", "5"), ("123", "45")]
for first, second in merges:
    vocabulary[first + second] = len(vocabulary)
tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
words = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\P{N}+"), "isolated")
tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
tokenizer.decoder = decoders.ByteLevel()
tokenizer.add_special_tokens(["<|endoftext|>"])
of_file = tokenizer.encode("12345").tokens
print(f"transformers {transformers.__version__}: the file {of_file}")
assert of_file == ["123", "45"]
cases = [("GPT2Tokenizer", "llama"), ("Qwen2Tokenizer", "llama"), ("PreTrainedTokenizerFast", "qwen2"), ("PreTrainedTokenizerFast", "llama")]
found = []
for number, (name, model_type) in enumerate(cases):
    checkpoint = folder / transformers.__version__ / str(number)
    checkpoint.mkdir(parents=True)
    tokenizer.save(str(checkpoint / "tokenizer.json"))
    (checkpoint / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name, "eos_token": "<|endoftext|>"}))
    (checkpoint / "config.json").write_text(json.dumps({"model_type": model_type}))
    found.append(transformers.AutoTokenizer.from_pretrained(str(checkpoint)).tokenize("12345"))
    print(f"  {name}, model_type {model_type}: {found[-1]}")
sys.exit(found != expected)
PYTHON

show() { # versions of transformers and tokenizers, and the tokens of the four cases
    python3 -m venv "$folder/env-$1"
    "$folder/env-$1/bin/pip" install --quiet --disable-pip-version-check "transformers==$1" "tokenizers==$2"
    TRANSFORMERS_VERBOSITY=error TRANSFORMERS_NO_ADVISORY_WARNINGS=1 "$folder/env-$1/bin/python" "$folder/show.py" "$folder" "$3"
}

of_file='["123", "45"]'
digits='["1", "2", "3", "4", "5"]'
show 5.24.0 0.23.3 "[[\"12345\"], $digits, $digits, $of_file]"
show 4.56.2 0.22.2 "[$of_file, $of_file, $of_file, $of_file]"
