#!/usr/bin/env bash
# Trains every way of drafting on the same answers in equal steps, and compares them with `redraft bench`.
#
# On a host with an H200 (the six runs share it), with redraft[engine,train] in the active environment. WORK/data is a
# folder of `redraft data generate`; without it an embedded engine makes one, which takes hours (bundled.sh asks SGLang).
#
#   ops/recipes/comparison.sh WORK [STEPS]
set -euo pipefail
work=${1:?the folder to work in}
steps=${2:-850}
configs=$(cd "$(dirname "$0")/../../configs" && pwd)
mkdir -p "$work/recipes" "$work/drafters"
[ -e "$work/data/manifest.json" ] || redraft data generate "$work/data" --sampled 0

recipe() { # NAME FILE [LINE …]: FILE with what all have in common, and LINEs of its own
    local name=$1 file=$2
    shift 2
    {
        grep -vE '^(sequences|cache_bytes|held_out|eval_every|layers):' "$configs/$file"
        printf '%s\n' 'sequences: 16' 'cache_bytes: 8589934592' 'held_out: 16' 'eval_every: 300' "$@"
    } > "$work/recipes/$name.yaml"
}
recipe dflash-equal dflash.yaml 'layers: 3'
recipe diffusion-only dflash.yaml 'layers: 3' 'injection: false'
recipe injection-only dflash.yaml 'layers: 3' 'autoregressive: true'
recipe eagle3-1 eagle3.yaml 'layers: 1'
recipe eagle3-3 eagle3.yaml 'layers: 3'
recipe mtp dflash.yaml

runs=()
for file in "$work"/recipes/*.yaml; do
    name=$(basename "$file" .yaml)
    case $name in eagle3-*) kind=eagle3 ;; mtp) kind=mtp ;; *) kind=dflash ;; esac
    redraft train "$kind" --data "$work/data" --out "$work/runs/$name" --config "$file" --steps "$steps" \
        2> "$work/$name.log" &
    runs+=($!)
done
for run in "${runs[@]}"; do wait "$run"; done
for name in "$work"/runs/*; do cp -r "$name/drafter" "$work/drafters/$(basename "$name")"; done

redraft bench drafters-gpu --drafters "$work/drafters" --json > "$work/drafters_gpu.json"
redraft bench drafters --drafters "$work/drafters" --json > "$work/drafters.json"
