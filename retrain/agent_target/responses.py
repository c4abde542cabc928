"""Scores of answers that lie in a folder of training data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from redraft.engine.chat.tokenizer import Tokenizer
from redraft.retrain.agent_target.prepared import Prepared
from redraft.retrain.agent_target.scoring import looping_share, shares
from redraft.retrain.data.store import load_prompts, load_responses, verify


def score(folder: Path, prepared: Prepared, model: Path) -> dict[str, Any]:
    """Shares over the greedy responses to prompts of the test split; ``model`` is the folder of a tokenizer."""
    verify(folder)
    tokenizer = Tokenizer.from_folder(model)
    prompts = {prompt.id: prompt for prompt in load_prompts(folder, splits=["test"])}
    responses = [r for r in load_responses(folder) if r.prompt in prompts and r.sampling.mode == "greedy"]
    cases = {case.id: case for case in prepared.cases}
    answered = [(cases[r.prompt], tokenizer.decode(r.token_ids)) for r in responses if r.prompt in cases]
    looping = [(prompts[r.prompt].source, r.looping) for r in responses]
    return {"responses": len(responses), **shares(answered), **looping_share(looping)}
