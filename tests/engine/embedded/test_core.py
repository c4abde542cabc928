from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from redraft.engine.drafters.base import DraftSequence, Proposal, TargetRows
from redraft.engine.embedded import sampler
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.sampler import TokenChooser
from redraft.engine.policy.fixed import FixedLength
from redraft.engine.protocol import EngineOverloaded, RequestRefused
from redraft.engine.types import (
    Commit,
    DrafterVersion,
    GenerationRequest,
    Principal,
    SamplingParams,
    SpeculationScope,
    StopConditions,
    TokenLogprob,
)

from .conftest import answers, run

pytestmark = pytest.mark.unit

MakeCore = Callable[..., EngineCore]
GREEDY = SamplingParams(temperature=0)


def request(
    request_id: str = "r",
    prompt: Sequence[int] = tuple(range(40)),
    max_tokens: int = 24,
    sampling: SamplingParams = GREEDY,
    **overrides: Any,
) -> GenerationRequest:
    stopping = overrides.pop("stopping", StopConditions(max_tokens=max_tokens, ignore_eos=True))
    return GenerationRequest(
        request_id=request_id, prompt_ids=tuple(prompt), stopping=stopping, sampling=sampling, **overrides
    )


class ScriptedDrafter:
    """Proposes the true continuation of each prompt, each token wrong with a given probability."""

    version = DrafterVersion("scripted", "test")
    feature_layers: tuple[int, ...] = ()
    kv: Tensor | None = None

    def __init__(self, truth: Sequence[Sequence[int]], wrong: float, seed: int = 0) -> None:
        self.truth = truth
        self.wrong = wrong
        self.random = random.Random(seed)

    def new_kv(self, slots: int) -> Tensor | None:
        return None

    def materialise(self, rows: TargetRows) -> None:
        pass

    def propose(self, sequences: Sequence[DraftSequence]) -> list[Proposal]:
        return [self.proposal(list(sequence.tokens), max(sequence.length, 0)) for sequence in sequences]

    def proposal(self, tokens: list[int], length: int) -> Proposal:
        ahead: Sequence[int] = [self.random.randrange(256) for _ in range(length)]
        for whole in self.truth:
            if list(whole[: len(tokens)]) == tokens:
                ahead = whole[len(tokens) : len(tokens) + length]
        return Proposal(tuple(map(self.spoil, ahead)))

    def spoil(self, token: int) -> int:
        return (token + 1) % 256 if self.random.random() < self.wrong else token


def mixed_requests(sampling: SamplingParams, speculation: bool = True) -> list[GenerationRequest]:
    rng = random.Random(3)
    return [
        request(
            f"r{index}",
            [rng.randrange(256) for _ in range(rng.randrange(5, 150))],
            max_tokens=rng.randrange(1, 40),
            sampling=sampling,
            n=1 + index % 2,
            speculation=speculation,
        )
        for index in range(8)
    ]


SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, seed=5),
]


def truth_of(make_core: MakeCore, sampling: SamplingParams) -> tuple[dict[tuple[str, int], list[int]], list[list[int]]]:
    requests = mixed_requests(sampling, speculation=False)
    expected = answers(run(make_core(), requests))
    prompts = {r.request_id: list(r.prompt_ids) for r in requests}
    return expected, [prompts[request_id] + ids for (request_id, _), ids in expected.items()]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("block_size", [2, 5, 16])
@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_answers_do_not_depend_on_drafter_or_block_length(
    make_core: MakeCore, sampling: SamplingParams, block_size: int, wrong: float
) -> None:
    expected, truth = truth_of(make_core, sampling)
    core = make_core(ScriptedDrafter(truth, wrong), policy=FixedLength(block_size), block_size=block_size)
    commits = run(core, mixed_requests(sampling))
    assert answers(commits) == expected
    accepted = sum(c.verify_step.accepted for c in commits if c.verify_step)
    assert (accepted == 0) == (wrong == 1.0), "the drafter must have had its say"


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_answers_do_not_depend_on_the_batch_or_on_prefix_hits(make_core: MakeCore, sampling: SamplingParams) -> None:
    together = answers(run(make_core(), mixed_requests(sampling)))
    core = make_core()
    one_by_one: dict[tuple[str, int], list[int]] = {}
    for single in mixed_requests(sampling):
        one_by_one |= answers(run(core, [single]))
    again: dict[tuple[str, int], list[int]] = {}
    for single in mixed_requests(sampling):
        commits = run(core, [single])
        assert len(single.prompt_ids) < 17 or commits[0].cached_tokens > 0
        again |= answers(commits)
    assert together == one_by_one == again


def is_lossless(make_core: MakeCore, sampling: SamplingParams) -> bool:
    expected, truth = truth_of(make_core, sampling)
    return answers(run(make_core(ScriptedDrafter(truth, 0.3)), mixed_requests(sampling))) == expected


def test_a_sampler_that_ignores_the_position_is_caught(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: noise drawn in the order of calls instead of by position."""
    calls = iter(range(10**9))
    noise_key = sampler.noise_key
    monkeypatch.setattr(sampler, "noise_key", lambda seed, choice, position: noise_key(seed, choice, next(calls)))
    assert not is_lossless(make_core, SAMPLINGS[1])


def test_a_verifier_that_is_always_greedy_is_caught(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted fault: rows behind drafted tokens are taken greedily even where the request samples."""
    choose = TokenChooser.choose

    def wrong(self: TokenChooser, logits: Tensor, arg_max: int, position: int) -> int:
        return arg_max if is_verifying else choose(self, logits, arg_max, position)

    verify = EngineCore._verify
    is_verifying = False

    def watched(self: EngineCore, block: Any, *rest: Any) -> Commit:
        nonlocal is_verifying
        is_verifying = len(block.tokens) > 1
        try:
            return verify(self, block, *rest)
        finally:
            is_verifying = False

    monkeypatch.setattr(TokenChooser, "choose", wrong)
    monkeypatch.setattr(EngineCore, "_verify", watched)
    assert not is_lossless(make_core, SAMPLINGS[1])


@pytest.mark.parametrize("sampling", SAMPLINGS[:2], ids=["greedy", "sampled"])
def test_an_acceptance_rule_that_trusts_the_drafter_is_caught(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    """Planted fault: a drafted token is taken whatever the target says."""
    verify, choose = EngineCore._verify, TokenChooser.choose
    drafted: list[int] = []

    def watched(self: EngineCore, block: Any, *rest: Any) -> Commit:
        drafted[:] = reversed(block.tokens[1:])
        return verify(self, block, *rest)

    def wrong(self: TokenChooser, logits: Tensor, arg_max: int, position: int) -> int:
        return drafted.pop() if drafted else choose(self, logits, arg_max, position)

    monkeypatch.setattr(EngineCore, "_verify", watched)
    monkeypatch.setattr(TokenChooser, "choose", wrong)
    assert not is_lossless(make_core, sampling)


def test_verify_steps_account_for_every_token_but_the_first(make_core: MakeCore) -> None:
    commits = run(make_core(), mixed_requests(GREEDY))
    for key, ids in answers(commits).items():
        own = [c for c in commits if (c.request_id, c.choice) == key]
        assert own[0].verify_step is None
        assert len(own[0].token_ids) == 1
        steps = [c.verify_step for c in own[1:] if c.verify_step is not None]
        assert len(steps) == len(own) - 1
        assert 1 + sum(len(step.committed) for step in steps) == len(ids)
        assert [c.finish_reason is not None for c in own] == [False] * (len(own) - 1) + [True]
        for commit, step in zip(own[1:], steps, strict=True):
            assert commit.token_ids == step.committed
            assert step.block_length <= len(step.drafted)
            assert step.accepted <= step.block_length
            assert step.committed[: step.accepted] == step.drafted[: step.accepted]
            assert len(step.committed) - step.accepted in (0, 1)
            assert step.total_rows >= step.block_length + 1


def test_steps_tell_the_targets_entropy_and_that_a_fixed_length_was_not_chosen(
    make_core: MakeCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entropy of the target's own distribution, whatever was asked of the sampler."""
    asked = [
        request(
            str(seed),
            sampling=SamplingParams(temperature=0.3, top_k=2, frequency_penalty=1.0, logit_bias=((9, 5.0),), seed=seed),
        )
        for seed in (1, 2)
    ]
    truth = answers(run(make_core(), asked))
    drafter = ScriptedDrafter([[*each.prompt_ids, *truth[each.request_id, 0]] for each in asked], 0.3)
    expected: dict[tuple[int | None, int], float] = {}
    choose = TokenChooser.choose

    def watched(self: TokenChooser, logits: Tensor, arg_max: int, position: int) -> int:
        distribution = torch.distributions.Categorical(logits=logits.double())
        expected[self._seed, position] = float(distribution.entropy())
        return choose(self, logits, arg_max, position)

    monkeypatch.setattr(TokenChooser, "choose", watched)
    commits = run(make_core(drafter), asked)
    assert answers(commits) == truth
    steps = [(commit.seed, commit.verify_step) for commit in commits if commit.verify_step]
    assert any(step.accepted for _, step in steps)
    for seed, step in steps:
        assert step.explored
        positions = range(step.position + 1, step.position + 1 + len(step.committed))
        assert step.target_entropy == pytest.approx([expected[seed, position] for position in positions], rel=1e-3)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 16])
def test_no_token_follows_a_stop_at_any_place_in_a_block(make_core: MakeCore, max_tokens: int) -> None:
    plain = answers(run(make_core(), [request(max_tokens=40, speculation=False)]))["r", 0]
    truth = [list(range(40)) + plain]
    core = make_core(ScriptedDrafter(truth, 0.0), policy=FixedLength(16), block_size=16)
    commits = run(core, [request("short", max_tokens=max_tokens)])
    assert answers(commits)["short", 0] == plain[:max_tokens]
    assert commits[-1].finish_reason == "length"


def test_an_end_token_inside_a_block_ends_the_answer_and_is_committed(make_core: MakeCore) -> None:
    plain = answers(run(make_core(), [request(max_tokens=40, speculation=False)]))["r", 0]
    stop = plain[9]
    length = plain.index(stop) + 1
    core = make_core(ScriptedDrafter([list(range(40)) + plain], 0.0), policy=FixedLength(16), block_size=16)
    stopping = StopConditions(max_tokens=40, token_ids=(stop,), ignore_eos=True)
    commits = run(core, [request("stopped", stopping=stopping)])
    assert answers(commits)["stopped", 0] == plain[:length]
    assert commits[-1].finish_reason == "stop"


def test_a_stop_string_across_tokens_ends_the_answer_where_it_begins(make_core: MakeCore) -> None:
    core = make_core()
    plain = answers(run(core, [request(max_tokens=40, speculation=False)]))["r", 0]
    text = core._tokenizer.decode(plain)
    stop = text[10:13]
    commits = run(core, [request("s", stopping=StopConditions(max_tokens=40, strings=(stop,), ignore_eos=True))])
    assert commits[-1].finish_reason == "stop"
    assert commits[-1].text_end == text.index(stop)
    assert core._tokenizer.decode(answers(commits)["s", 0]).startswith(text[: text.index(stop)])


@pytest.mark.parametrize("offset", range(16))
def test_a_stop_string_is_found_at_every_offset_of_a_block(make_core: MakeCore, offset: int) -> None:
    """vLLM, SGLang: a stop string early in an accepted block was missed (sgl-project/sglang#23802)."""
    letters = make_core()._tokenizer.encode("abcdefghijklmnopqrst")
    sampling = SamplingParams(temperature=2.0, seed=offset, logit_bias=tuple((letter, 90.0) for letter in letters))
    stopping = StopConditions(max_tokens=40, ignore_eos=True)
    plain = answers(run(make_core(), [request(sampling=sampling, stopping=stopping, speculation=False)]))["r", 0]
    drafter = ScriptedDrafter([list(range(40)) + plain], 0.0)
    core = make_core(drafter, policy=FixedLength(17), block_size=17)
    text = core._tokenizer.decode(plain)
    assert len(text) == len(plain) == 40, "a token a letter"
    for length in (1, 3):
        stop = text[1 + offset : 1 + offset + length]
        end = text.index(stop)
        stops = StopConditions(max_tokens=40, strings=("never", stop), ignore_eos=True)
        commits = run(core, [request("s", sampling=sampling, stopping=stops)])
        assert commits[-1].text_end == end
        assert answers(commits)["s", 0] == plain[: end + length]
        assert commits[-1].finish_reason == "stop"
        assert max(len(c.token_ids) for c in commits) > 1 or end < 2, "the stop must fall inside an accepted block"


def test_aborting_frees_the_place_at_once(make_core: MakeCore) -> None:
    core = make_core(max_running=1)
    core.submit(request("a", max_tokens=300))
    core.submit(request("b"))
    core.step()
    core.abort("a")
    assert core.request_ids == {"b"}
    commits = core.step()
    assert [c.request_id for c in commits] == ["b"]


def test_whoever_listens_to_an_aborted_request_is_told(make_core: MakeCore) -> None:
    core = make_core(max_running=1)
    core.submit(request("running", max_tokens=300))
    core.submit(request("waiting"))
    core.step()
    for request_id in ("running", "waiting"):
        (commit,) = core.abort(request_id)
        assert (commit.request_id, commit.finish_reason, commit.token_ids) == (request_id, "abort", ())
    assert core.abort("unknown") == []
    assert not core.request_ids


def test_a_fault_in_one_request_aborts_that_one_alone(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(run(make_core(), [request("sound")]))
    choose = TokenChooser.choose

    def faulty(self: TokenChooser, logits: Tensor, arg_max: int, position: int) -> int:
        if self._seed == 666 and position > 45:
            raise RuntimeError("the grammar is lost")
        return choose(self, logits, arg_max, position)

    monkeypatch.setattr(TokenChooser, "choose", faulty)
    faulty_request = request("faulty", sampling=SamplingParams(temperature=1.0, seed=666), n=2)
    core = make_core()
    commits = run(core, [request("sound"), faulty_request])
    assert {key: ids for key, ids in answers(commits).items() if key[0] == "sound"} == expected
    assert [c.finish_reason for c in commits if c.request_id == "faulty"][-1] == "abort"
    assert core.cache.used_slots == sum(s.capacity for s in core.cache._idle.values())


def test_a_fault_at_the_last_token_is_told_too(make_core: MakeCore, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(logits: Tensor, token: int, alternatives: int) -> TokenLogprob:
        raise RuntimeError("no such row")

    core = make_core()
    core.submit(request(max_tokens=1, logprobs=1))
    monkeypatch.setattr("redraft.engine.embedded.core.token_logprob", faulty)
    assert [commit.finish_reason for commit in core.step()] == ["abort"]
    assert not core.request_ids


def test_many_choices_of_one_client_do_not_fill_the_queue_of_others(make_core: MakeCore) -> None:
    core = make_core(max_running=1, max_waiting=1)
    core.submit(request("many", n=16, sampling=SamplingParams(temperature=1.0)))
    core.step()
    core.submit(request("other"))


def test_many_choices_of_one_client_take_turns_with_others(make_core: MakeCore) -> None:
    core = make_core(max_running=1)
    commits = run(core, [request("many", n=4, sampling=SamplingParams(temperature=1.0)), request("other", n=2)])
    finished = [(commit.request_id, commit.choice) for commit in commits if commit.finish_reason]
    assert finished == [("many", 0), ("other", 0), ("many", 1), ("other", 1), ("many", 2), ("many", 3)]


def test_aborting_while_the_prompt_is_being_read_leaves_a_usable_cache(make_core: MakeCore) -> None:
    core = make_core()
    prompt = [index % 250 for index in range(400)]
    core.submit(request("a", prompt))
    core.step()
    core.abort("a")
    resumed = run(core, [request("b", prompt)])
    assert 0 < resumed[0].cached_tokens < 400
    fresh = run(make_core(), [request("b", prompt)])
    assert answers(resumed) == answers(fresh)


def test_a_full_queue_turns_requests_away(make_core: MakeCore) -> None:
    core = make_core(max_running=1, max_waiting=1)
    core.submit(request("a"))
    core.step()
    core.submit(request("b"))
    with pytest.raises(EngineOverloaded, match="1 requests waiting"):
        core.submit(request("c"))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request(prompt=()), "empty"),
        (request(prompt=(1, 2, 320)), "outside 0 to 319"),
        (request(prompt=(1, -1)), "outside"),
        (request(prompt=range(200), max_tokens=400), "200 prompt tokens and 400"),
        (request(max_tokens=0), "max_tokens is 0"),
        (request(n=0), "n is 0"),
        (request(n=10**12), "n is 1000000000000"),
        (request(logprobs=-1), "logprobs is -1"),
        (request(logprobs=321), "0 to 320"),
        (request(sampling=SamplingParams(logit_bias=((320, 1.0),))), "logit_bias has token ids outside 0 to 319"),
    ],
)
def test_what_can_never_run_is_refused_in_words(make_core: MakeCore, bad: GenerationRequest, message: str) -> None:
    core = make_core()
    with pytest.raises(RequestRefused, match=message):
        core.submit(bad)
    assert not core.request_ids


def test_a_request_larger_than_the_kv_budget_is_refused_instead_of_waiting_forever(make_core: MakeCore) -> None:
    core = make_core(slots=128)
    with pytest.raises(RequestRefused, match="K/V budget of 128 tokens"):
        core.submit(request(prompt=range(100), max_tokens=100))


def test_a_request_waits_for_kv_and_then_runs(make_core: MakeCore) -> None:
    core = make_core(slots=128)
    commits = run(core, [request("a", range(60), 40), request("b", range(100, 160), 40)])
    assert {c.request_id for c in commits if c.finish_reason} == {"a", "b"}
    assert core.cache.used_slots <= 128


@pytest.mark.parametrize(
    "scope", [SpeculationScope("all"), SpeculationScope("tenant", "acme"), SpeculationScope("request", "r")]
)
def test_speculation_switches_off_and_on_without_changing_the_answer(
    make_core: MakeCore, scope: SpeculationScope
) -> None:
    mine = request("r", [1, 2, 3, 4] * 20, max_tokens=40, principal=Principal("acme"))
    expected = answers(run(make_core(), [mine]))
    core = make_core()
    core.submit(mine)
    commits = core.step()
    core.set_speculation(scope, on=False)
    for _ in range(6):
        quiet = core.step()
        assert all(c.verify_step is None or c.verify_step.block_length == 0 for c in quiet)
        commits += quiet
    core.set_speculation(scope, on=True)
    later: list[Commit] = []
    while core.running:
        later += core.step()
    assert answers(commits + later) == expected


def test_a_request_switch_ends_with_its_request(make_core: MakeCore) -> None:
    core = make_core()
    core.submit(request("r"))
    core.set_speculation(SpeculationScope("request", "r"), on=False)
    run(core, [])
    assert not core._switched_off
    for on in (True, False):
        with pytest.raises(RequestRefused, match="no request r is running"):
            core.set_speculation(SpeculationScope("request", "r"), on=on)


def test_choices_differ_and_each_is_what_it_is_alone(make_core: MakeCore) -> None:
    sampling = SamplingParams(temperature=1.0, seed=3)
    several = answers(run(make_core(), [request("r", sampling=sampling, n=4)]))
    assert len({tuple(ids) for ids in several.values()}) == 4
    alone = answers(run(make_core(), [request("r", sampling=sampling, n=1)]))
    assert alone["r", 0] == several["r", 0]


def test_a_seed_is_drawn_and_recorded_when_the_client_gives_none(make_core: MakeCore) -> None:
    first = run(make_core(), [request(sampling=SamplingParams(temperature=1.0))])
    seed = first[0].seed
    again = run(make_core(), [request(sampling=SamplingParams(temperature=1.0, seed=seed))])
    assert answers(first) == answers(again)
