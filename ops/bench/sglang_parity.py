"""A drafter's accept length in stock SGLang beside the embedded engine's, on the same prompts.

Start SGLang on the same target, with ``--speculative-algorithm DFLASH --speculative-draft-model-path DRAFTER``, or for
an EAGLE-3 drafter of block size N with ``--speculative-algorithm EAGLE3 --speculative-eagle-topk 1
--speculative-num-steps N-1 --speculative-num-draft-tokens N`` and what `redraft train export` wrote; then

    python -m redraft.ops.bench.sglang_parity --url http://127.0.0.1:30000 --model TARGET --drafter DRAFTER --data DATA

where DATA is a folder of ``redraft data generate``. One JSON object goes to standard output.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch

from redraft.engine.config import EngineConfig
from redraft.engine.drafters.loading import load_config
from redraft.engine.embedded.server import build_core
from redraft.engine.types import AcceptLength, GenerationRequest, SamplingParams, StopConditions
from redraft.ops.bench.report import envelope, progress, spread
from redraft.retrain.data.splits import Split
from redraft.retrain.data.store import load_samples, verify
from redraft.retrain.provenance import present_commit

START_SECONDS = 300
TEST: tuple[Split, ...] = ("test",)
METHOD = (
    "Greedy answers to prompts of the test split whose recorded answer does not loop, one at a time in SGLang and in "
    "the embedded engine on the same device, the same block size. tau is committed tokens over verify steps, pooled, "
    "without the token that prefill samples."
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--commit", default=present_commit(), help="for a copy of the code without its history")
    arguments = parser.parse_args()
    verify(arguments.data)
    samples = [s for s in load_samples(arguments.data, TEST) if s.greedy and not s.looping]
    prompts = [sample.token_ids[: sample.spans[0][0]] for sample in spread(samples, arguments.prompts)]
    progress(f"{len(prompts)} prompts through the embedded engine")
    block_size = load_config(Path(arguments.drafter)).block_size
    config = EngineConfig(model=arguments.model, drafter=arguments.drafter, block_size=block_size)
    ours, our_answers = _embedded(config, prompts, arguments.max_tokens)
    progress("the same through SGLang")
    _wait_for(arguments.url)
    theirs, their_answers = _sglang(arguments.url, prompts, arguments.max_tokens)
    if not ours.tau or not theirs.tau:
        raise SystemExit(f"no verify steps in {'SGLang' if ours.tau else 'the embedded engine'}: is a drafter loaded?")
    metrics = {
        "tau_embedded": ours.tau,
        "tau_sglang": theirs.tau,
        "tau_sglang_over_embedded": theirs.tau / ours.tau,
        "equal_answers_share": sum(a == b for a, b in zip(our_answers, their_answers, strict=True)) / len(prompts),
    }
    table = [
        {"engine": name, "committed": accept.committed, "verify_steps": accept.verify_steps}
        for name, accept in (("embedded", ours), ("sglang", theirs))
    ]
    method = f"{METHOD} {len(prompts)} prompts, {arguments.max_tokens} tokens at most, block size {block_size}."
    print(json.dumps(envelope("sglang_parity", method, arguments.commit, metrics, table) | {"device": _device()}))


def _wait_for(url: str) -> None:
    for _ in range(START_SECONDS):
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health").is_success:
                return
        time.sleep(1)
    raise SystemExit(f"{url} does not become healthy")


def _sglang(
    url: str, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> tuple[AcceptLength, list[tuple[int, ...]]]:
    total, answers = AcceptLength(), []
    with httpx.Client(base_url=url, timeout=120) as client:
        for prompt in prompts:
            sampling = {"temperature": 0, "max_new_tokens": max_tokens}
            reply: dict[str, Any] = (
                client.post("/generate", json={"input_ids": list(prompt), "sampling_params": sampling})
                .raise_for_status()
                .json()
            )
            meta = reply["meta_info"]
            answers.append(tuple(reply["output_ids"]))
            if "spec_verify_ct" in meta:
                total += AcceptLength(meta["completion_tokens"] - 1, meta["spec_verify_ct"])
    return total, answers


def _embedded(
    config: EngineConfig, prompts: Sequence[tuple[int, ...]], max_tokens: int
) -> tuple[AcceptLength, list[tuple[int, ...]]]:
    core, _ = build_core(config)
    total, answers = AcceptLength(), []
    for index, prompt in enumerate(prompts):
        core.submit(
            GenerationRequest(
                request_id=str(index),
                prompt_ids=prompt,
                stopping=StopConditions(max_tokens=max_tokens),
                sampling=SamplingParams(temperature=0),
            )
        )
        tokens: list[int] = []
        while core.running or core.waiting:
            for commit in core.step():
                tokens += commit.token_ids
                if commit.verify_step is not None:
                    total = total.add_step(commit.verify_step)
        answers.append(tuple(tokens))
    return total, answers


def _device() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    main()
