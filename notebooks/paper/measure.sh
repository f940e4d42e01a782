#!/usr/bin/env bash
# Measures what notebooks/paper.ipynb draws from, on one GPU of 80 GB or more: bash notebooks/paper/measure.sh TABLE OUT [MODEL]
#
# TABLE is one of the names below, OUT a folder for the JSON. Rates of acceptance are simulated where --simulate is said, at the paper's own:
# 0.9234 of the middle's drafts and 0.4649 of the small model's, TriForce's table 2 at temperature 0. MODEL is a trained checkpoint with the
# embedded model's tokenizer, for the tables that nothing is simulated in: `qspec train benchmark-model --output RUN --minutes 6 --segment-minutes 12`
# makes one in 9 minutes.
set -euo pipefail
table=$1 out=$2 model=${3:-}
here=$(dirname "$0")
qspec() { python3 -m qspec_jax.cli "$@"; }
small=$out/jf68m
[ -e "$small/model.safetensors" ] || python3 "$here/small_model.py" "$small" 32000
rates="--simulate-acceptance 0.9234 --simulate-inner-acceptance 0.4649"

batch() { # ROWS CONTEXT BUDGET: a row of TriForce's table 4
    qspec bench decode --arch llama-2-7b --context "$2" --batch-size "$1" --gamma 6 --max-new-tokens 256 $rates \
        --draft "triforce:model=$small,middle=(retrieval:budget=$3)" --draft "triforce:model=$small,middle=(sparse:budget=0.03)" \
        --json --output "$out/triforce-$1x$2.json"
}

specache() { # ROWS CONTEXT
    # Random weights guess wrong nearly always, so that fetch=checked is as slow here as it can be; and choose other tokens in every step.
    qspec bench decode --arch mistral-7b --context "$2" --batch-size "$1" --max-new-tokens 48 --repeats 3 --draft none \
        --cache kivi:bits=1,residual=64 --cache specache:bits=1,host=store --cache specache:bits=2,host=store \
        --cache specache:bits=1,host=store,fetch=checked --cache specache:bits=1,host=store,fetch=now \
        --json --output "$out/$table.json"
}

half_a_million() { # METHOD...: with 9 of 32 layers resident less than 130 GB of the card are in use
    qspec bench decode --arch llama-2-7b --context 524288 "$@" --repeats 2 --cache int8:host=lower,resident=0.28 --baseline-cache full:host=all \
        --json --output "$out/$table.json"
}

case $table in
triforce-122k) # TriForce, table 2
    qspec bench decode --arch llama-2-7b --context 122880 --gamma 6 --max-new-tokens 256 $rates --draft "triforce:model=$small" \
        --draft "triforce:model=$small,middle=(sparse:budget=0.03)" --draft retrieval --json --output "$out/triforce-1x122880.json"
    ;;
triforce-batches) # TriForce, table 4
    batch 2 57344 1024
    batch 6 19456 768
    batch 10 12288 768
    ;;
triforce-real) # TriForce's variants on a trained pair; the embedded model is the small one
    first=qspec_jax/demo/model
    for temperature in 0 1; do
        qspec bench end-to-end --model "$model" --context 65536 --temperature $temperature --gamma 6 --max-new-tokens 256 --texts 2 \
            --draft "triforce:model=$first" --draft "triforce:model=$first,middle=(retrieval:weight_bits=4)" --draft retrieval \
            --draft "triforce:model=$first,middle=(streaming-llm:budget=4096)" --draft "small-model:model=$first,reads=window,sinks=16,window=1008" \
            --draft "triforce:model=$first,middle=(sparse:budget=0.06)" --draft sparse:budget=0.06 --draft quantspec \
            --json --output "$out/triforce-real-$temperature.json"
    done
    ;;
triforce-ablations) # TriForce, figures 3 and 6: acceptance by budget and by chunk
    budgets=() chunks=()
    for budget in 512 1024 2048 4096 8192; do budgets+=(--draft "retrieval:budget=$budget,weight_bits=16"); done
    for chunk in 1 2 4 16 32; do chunks+=(--draft "retrieval:chunk=$chunk,weight_bits=16"); done
    qspec eval acceptance --model "$model" --joined --texts 2 --context 65536 --max-new-tokens 256 --gamma 6 --mode teacher-forced \
        --no-calibrate "${budgets[@]}" "${chunks[@]}" --json > "$out/triforce-ablations.json"
    ;;
quantspec-table3) # QuantSpec, table 3: its baselines read a quarter of the context in bfloat16
    qspec bench end-to-end --model "$model" --context 16384 --context 65536 --temperature 0 --gamma 2 --gamma 4 --gamma 6 --texts 2 \
        --max-new-tokens 256 --draft streaming-llm:budget=0.25,weight_bits=16 --draft snapkv:budget=0.25,weight_bits=16 --draft quantspec \
        --draft sparse:budget=0.06 --json --output "$out/quantspec-table3.json"
    ;;
quantspec-shapes) # the same for large shapes, at the paper's rates
    for shape in llama-2-7b llama-2-13b llama-3.1-8b; do
        qspec bench decode --arch "$shape" --context 32768 --gamma 6 --max-new-tokens 640 --simulate-acceptance 0.92 --draft quantspec \
            --draft sparse:budget=0.03 --json --output "$out/quantspec-$shape.json"
    done
    ;;
triforce-offloaded) # TriForce, table 3: of the card JAX gets 24 GB; 80 GB of host memory
    megabytes=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits | head -n 1 || true)
    XLA_PYTHON_CLIENT_MEM_FRACTION=$(awk "BEGIN { print 24e9 / (${megabytes:-81559} * 2 ^ 20) }")
    export XLA_PYTHON_CLIENT_MEM_FRACTION
    qspec bench decode --arch llama-2-7b --context 130048 --gamma 12 --max-new-tokens 64 $rates --repeats 2 --cache full:host=all \
        --cache int8:host=all --baseline-cache full:host=all --draft "triforce:model=$small,middle=(retrieval:budget=8192)" \
        --draft retrieval:budget=8192,weight_bits=16 --json --output "$out/triforce-offloaded.json"
    ;;
offloaded-64k) # how near copies come to what the copy engine reaches, nothing resident; 45 GB of host memory
    qspec bench decode --arch llama-2-7b --context 65536 --gamma 7 --max-new-tokens 32 --simulate-acceptance 0.92 --repeats 3 \
        --cache int8:host=lower,resident=0 --baseline-cache full:host=all,resident=0 --draft quantspec --draft sparse:budget=0.03 --draft none \
        --json --output "$out/offloaded-64k.json"
    ;;
offloaded-512k) # a context whose bfloat16 cache takes 275 GB; a GPU of 141 GB, 90 GB of host memory
    half_a_million --draft sparse:budget=0.03 --gamma 15 --max-new-tokens 640 --simulate-acceptance 0.92
    ;;
offloaded-512k-one-by-one) # the same without a draft
    half_a_million --draft none --max-new-tokens 32
    ;;
specache-32k) # SpeCache, throughput at the largest batch: as many rows as 70 GB of host memory have room for
    specache 16 32768
    ;;
specache-8k)
    specache 64 8192
    ;;
specache-2k)
    specache 256 2048
    ;;
specache-real) # what SpeCache loses, with 1 bit in groups of 64: 9.4 % of a bfloat16 cache on the device, and what it fetches; on a trained model
    qspec eval perplexity --model "$model" --prompt-tokens 16384 --max-new-tokens 192 --cache full --cache kivi:bits=1,group=64,residual=64 \
        --cache specache:bits=1,group=64 --cache specache:bits=1,group=64,fetch=checked --cache specache:bits=1,group=64,k=128,fetch=checked \
        --cache specache:bits=2,group=64 --output "$out/specache-perplexity.json" --json
    for format in names text; do # which a model trained for 12 minutes with --needles 0.4 finds
        qspec eval needle --model "$model" --format $format --lengths 2048,4096,16384 --depths 0.1,0.5,0.9 --samples 8 --batch-size 8 --cache full \
            --cache kivi:bits=1,group=64,residual=64 --cache specache:bits=1,group=64 --cache specache:bits=1,group=64,fetch=checked \
            --json > "$out/specache-needle-$format.json"
    done
    ;;
*)
    echo "no table $table; there are triforce-122k, triforce-batches, triforce-real, triforce-ablations, quantspec-table3, quantspec-shapes," \
        "triforce-offloaded, offloaded-64k, offloaded-512k, offloaded-512k-one-by-one, specache-32k, specache-8k, specache-2k, specache-real" >&2
    exit 2
    ;;
esac
