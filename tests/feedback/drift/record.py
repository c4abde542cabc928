"""Write ``sessions.json``: how the bundled drafter fared, session by session, on recorded answers.

    python tests/feedback/drift/record.py DATA [SESSIONS]

``DATA`` is a folder of `redraft data generate`. Greedy answers of the calibrate split are replayed at block length 7;
a row a session and context bucket holds ``reached`` and ``accepted`` by position, then committed tokens, verify steps
and answers. ``SESSIONS`` takes that many of those drawn, all of which take hours. Looping answers are left out.
"""

from __future__ import annotations

import json
import random
import sys
from collections import defaultdict
from pathlib import Path

import torch

from redraft.engine.checkpoints import DEFAULT_MODEL, resolve
from redraft.engine.types import context_bucket
from redraft.retrain.data.sample import Sample
from redraft.retrain.data.store import load_samples
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.paradigms.dflash import DFlashModel
from redraft.retrain.replay import ModelReplay, walk

BLOCK_LENGTH = 7
SESSIONS = {"bfcl-single": 120, "bfcl-multi-turn": 90, "code": 60, "math": 120, "plain": 90}
SESSION_TOKENS = 6000
"""Longer sessions are left out, to be done in an hour."""

BUNDLED = Path(__file__).parents[3] / "engine" / "drafters" / "bundled" / "smollm2-135m-agent-dflash"


def main(data: Path, count: int | None) -> None:
    at = torch.device("cpu")
    target = FrozenTarget.load(resolve(DEFAULT_MODEL), at, torch.bfloat16)
    drafter = ModelReplay(DFlashModel.load(BUNDLED, at), target)
    sessions: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in load_samples(data, ("calibrate",)):
        if sample.greedy and not sample.looping:
            sessions[sample.source, sample.session].append(sample)
    by_source: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for key, samples in sessions.items():
        if sum(len(sample.token_ids) for sample in samples) <= SESSION_TOKENS:
            by_source[key[0]].append(key)
    rng = random.Random(0)
    chosen = [key for source, wanted in SESSIONS.items() for key in _some(rng, by_source[source], wanted)]
    rng.shuffle(chosen)
    chosen = chosen[:count]
    rows = []
    out = Path(__file__).with_name("sessions.json")
    for number, key in enumerate(chosen, 1):
        cells: dict[int, list[list[int]]] = {}
        for sample in sessions[key]:
            counts = walk(sample, drafter(sample), BLOCK_LENGTH)
            if not counts.verify_steps:
                continue
            cell = cells.setdefault(
                context_bucket(sample.spans[0][0]), [[0] * BLOCK_LENGTH, [0] * BLOCK_LENGTH, [0, 0, 0]]
            )
            cell[0] = [a + b for a, b in zip(cell[0], counts.reached, strict=True)]
            cell[1] = [a + b for a, b in zip(cell[1], counts.accepted, strict=True)]
            cell[2] = [cell[2][0] + counts.committed, cell[2][1] + counts.verify_steps, cell[2][2] + 1]
        rows += [[key[0], bucket, *cell] for bucket, cell in cells.items()]
        print(f"{number}/{len(chosen)}", file=sys.stderr)
        if number % 10 == 0 or number == len(chosen):
            out.write_text("[\n" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows) + "\n]\n")


def _some(rng: random.Random, keys: list[tuple[str, str]], wanted: int) -> list[tuple[str, str]]:
    return rng.sample(keys, min(wanted, len(keys)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)
