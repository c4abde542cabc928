from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest
import torch

from redraft.engine.drafters.base import Drafter
from redraft.engine.drafters.dflash import DFlashDrafter
from redraft.engine.drafters.dflash_checkpoint import save
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.types import DrafterVersion, VerifyStep
from redraft.retrain.data.sample import Sample
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.paradigms.dflash import DFlashModel
from redraft.retrain.replay import AcceptCounts, ModelReplay, NgramReplay, Proposals, pooled, replay, walk

from .conftest import CPU, answered, make_sample, serve

pytestmark = pytest.mark.unit


def counted(steps: Sequence[VerifyStep], length: int, end: int) -> AcceptCounts:
    """What the engine's own records say, position by position; what lies past the answer's end was not reached."""
    reached, accepted = [0] * length, [0] * length
    for step in steps:
        for offset in range(min(step.block_length, end - 1 - step.position)):
            if offset <= step.accepted:
                reached[offset] += 1
            if offset < step.accepted:
                accepted[offset] += 1
    committed = sum(len(step.committed) for step in steps)
    return AcceptCounts(committed, len(steps), tuple(reached), tuple(accepted))


def check(
    target: FrozenTarget,
    checkpoint: Path,
    seeds: Iterable[int],
    serving: Drafter,
    replaying: Callable[[Sample], Proposals],
    length: int,
) -> int:
    """Compare replay with the engine on answers to random prompts; returns how many drafted tokens were accepted."""
    accepted = 0
    for seed in seeds:
        sample = answered(target, checkpoint, seed)
        ((start, end),) = sample.spans
        prompt, answer = list(sample.token_ids[:start]), list(sample.token_ids[start:end])
        served = serve(target, checkpoint, prompt, serving, length=length, stop=answer[-1], most=200)
        assert served.tokens == answer
        counts = walk(sample, replaying(sample), length)
        assert counts == counted(served.steps, length, end)
        assert counts.committed == len(answer) - 1
        accepted += sum(counts.accepted)
    return accepted


@pytest.mark.parametrize("length", [1, 2, 3])
def test_replay_of_a_drafter_counts_what_the_engine_commits(
    length: int, drafter: DFlashModel, target: FrozenTarget, checkpoint: Path, tmp_path: Path
) -> None:
    save(tmp_path, drafter.config, drafter.state_dict(), card="")
    serving = DFlashDrafter(tmp_path, DrafterVersion("dflash", "1"), target.target, target.identity, 512)
    replaying = ModelReplay(DFlashModel.load(tmp_path, CPU), target)
    assert check(target, checkpoint, range(6, 12), serving, replaying, length) > 0, "nothing was accepted"


@pytest.mark.parametrize("length", [1, 3])
def test_replay_of_the_floor_counts_what_the_engine_commits(length: int, make_checkpoint: Callable[..., Path]) -> None:
    """On a target that repeats itself."""
    checkpoint = make_checkpoint(num_hidden_layers=6, scale=0.1)
    target = FrozenTarget.load(checkpoint, CPU, torch.float32)
    assert check(target, checkpoint, [0], NgramDrafter(), NgramReplay(3), length) > 0, "nothing was accepted"


def test_the_floor_is_walked_at_any_block_length_as_if_at_that_one_alone() -> None:
    sample = make_sample([1, 2, 3, 4, 5, 6, 7, 8] * 10, [(8, 80)])
    (together,) = replay([sample], NgramReplay(7), [1, 3, 7])
    for length, counts in together.counts.items():
        (alone,) = replay([sample], NgramReplay(7), [length])
        assert counts == alone.counts[length]
    assert together.counts[7].verify_steps < together.counts[3].verify_steps < together.counts[1].verify_steps


def test_the_walk_counts_whole_blocks_censors_what_lies_past_the_end_and_counts_the_last_token() -> None:
    sample = make_sample(range(20), [(5, 12)])
    right = walk(sample, lambda start: range(start + 1, start + 4), 3)
    assert right == AcceptCounts(6, 2, (2, 2, 1), (2, 2, 1))
    wrong = walk(sample, lambda start: (0, 0, 0), 3)
    assert wrong == AcceptCounts(6, 6, (6, 0, 0), (0, 0, 0))
    second = walk(sample, lambda start: (start + 1, 0, start + 3), 3)
    assert second == AcceptCounts(6, 3, (3, 3, 0), (3, 0, 0))
    assert second.length.tau == 2
    assert second.hazard == (1, 0, None)


def test_an_answer_of_one_token_has_no_verify_step() -> None:
    assert walk(make_sample(range(9), [(8, 9)]), lambda start: (), 3).verify_steps == 0


def test_several_spans_are_walked_each_from_its_own_first_token() -> None:
    sample = make_sample(range(30), [(5, 9), (20, 24)])
    asked: list[int] = []

    def propose(start: int) -> Sequence[int]:
        asked.append(start)
        return range(start + 1, start + 9)

    assert walk(sample, propose, 7).committed == 6
    assert asked == [5, 20]


def test_counts_are_pooled_sum_over_sum_with_looping_answers_apart_and_sampled_ones_left_out() -> None:
    long = make_sample(range(30), [(5, 25)], id="long", source="code")
    short = make_sample(range(30), [(5, 8)], id="short", source="code")
    looping = make_sample(range(30), [(5, 8)], id="looping", source="code", looping=True)
    sampled = make_sample(range(30), [(5, 8)], id="sampled", source="code", greedy=False)
    other = make_sample(range(30), [(5, 8)], id="other", source="math")

    def right(_: object) -> Proposals:
        return lambda start: range(start + 1, start + 4)

    groups = pooled(replay([long, short, looping, sampled, other], right, [1, 3]), lambda sample: sample.source)
    assert {name: group[3].length.committed for name, group in groups.items()} == {"code": 21, "looping": 2, "math": 2}
    assert groups["code"][3].verify_steps == 6
    assert groups["code"][1].length.tau == 21 / 11
