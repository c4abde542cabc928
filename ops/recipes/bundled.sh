#!/usr/bin/env bash
# Makes the default target's adapter and its bundled drafter again, from nothing but the packages that hold the data.
#
# On a host with a GPU, with redraft[engine,train] in the active environment and a second environment with SGLang 0.5.17
# whose python is $SGLANG_PYTHON. The adapter is equal only up to the order in which a GPU
# adds, so the merged identity is a new one: every later step takes it from the merge.
#
#   SGLANG_PYTHON=/opt/sglang/bin/python ops/recipes/bundled.sh WORK
set -euo pipefail
work=${1:?the folder to work in}
sglang=${SGLANG_PYTHON:?the python of an environment with SGLang}
recipe=$(cd "$(dirname "$0")/../.." && pwd)/configs/dflash.yaml
url=http://127.0.0.1:30000
mkdir -p "$work"

serve() { # MODEL [FLAG …]: until the next call
    stop
    setsid "$sglang" -m sglang.launch_server --model-path "$@" --host 127.0.0.1 --port 30000 \
        --attention-backend triton --sampling-backend pytorch --grammar-backend none > "$work/sglang.log" 2>&1 &
    server=$!
    until curl -sf "$url/health" > /dev/null; do
        kill -0 "$server" || { tail -n 20 "$work/sglang.log" >&2; exit 1; }
        sleep 1
    done
}
stop() { [ -z "${server:-}" ] || { kill -- "-$server" && wait "$server" || true; } }
trap stop EXIT

base=$(redraft models pull smollm2-135m)

# The adapter: ground-truth calls, and plain replies in the base's own words.
serve "$base" --max-running-requests 512
redraft data generate "$work/plain" --model smollm2-135m --sglang "$url" --source plain --source math --source code --sampled 2
python -m redraft.retrain.agent_target prepare "$work/agent-data" --plain "$work/plain"
stop && server=
python -m redraft.retrain.agent_target train "$work/agent-data" "$work/adapter" --base "$base" | tee "$work/adapter.log"
python -m redraft.retrain.agent_target merge "$base" "$work/adapter" "$work/target"

# The drafter: the merged target's own answers to every prompt.
serve "$work/target" --max-running-requests 512 --cuda-graph-max-bs 512
redraft data generate "$work/data" --model "$work/target" --sglang "$url" --sampled 2
redraft data generate "$work/data" --model "$work/target" --sglang "$url" --sampled 3 --source plain --source code
python -m redraft.retrain.agent_target score "$work/data" "$work/agent-data" --model "$work/target"
stop && server=
redraft train dflash --data "$work/data" --out "$work/run" --model "$work/target" --config "$recipe"
redraft train eval "$work/run" --data "$work/data" --model "$work/target" --split calibrate

# The same checkpoint in stock SGLang.
serve "$work/target" --speculative-algorithm DFLASH --speculative-draft-model-path "$work/run/drafter"
python -m redraft.ops.bench.sglang_parity --url "$url" --model "$work/target" --drafter "$work/run/drafter" --data "$work/data"
