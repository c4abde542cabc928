from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor

from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, load
from redraft.retrain.blocks import choose_blocks
from redraft.retrain.config import TrainConfig, load_recipe
from redraft.retrain.data.sample import Sample
from redraft.retrain.errors import Stopped, TrainingError
from redraft.retrain.features import Captured, FeatureCapture
from redraft.retrain.frozen import FrozenTarget
from redraft.retrain.journal import Journal
from redraft.retrain.paradigms.dflash import DFlashModel
from redraft.retrain.replay import ModelReplay, walk
from redraft.retrain.strategy import BlockStrategy
from redraft.retrain.trainer import BEST, DRAFTER, HeldOut, Trainer, cosine_with_warmup, systematic

from .conftest import CPU, make_record, make_sample, random_tokens

pytestmark = pytest.mark.unit

RECIPE = TrainConfig(
    steps=6, sequences=3, blocks=5, warmup=2, learning_rate=1e-2, save_every=3, log_every=1, loss="distribution"
)
SAMPLES = [
    make_sample(random_tokens(20 + 7 * seed, seed), [(8, 12), (14 + seed, 20 + 7 * seed)], id=str(seed))
    for seed in range(5)
]


HELD_OUT = [make_sample(random_tokens(30, seed), [(10, 30)], id=f"held out {seed}") for seed in (8, 9)]


@dataclass
class Run:
    trainer: Trainer
    strategy: BlockStrategy
    drawn: list[str]

    @property
    def weights(self) -> dict[str, Tensor]:
        return {name: value.clone() for name, value in self.strategy.model.state_dict().items()}


@pytest.fixture
def start(target: FrozenTarget, shape: DFlashConfig, tmp_path: Path) -> Callable[..., Run]:
    """A run in a folder of that name.

    Steps ``spoil`` see features that are no numbers, step ``crash`` ends it, and it is asked to stop before pass
    ``stop``.
    """

    def make(
        name: str,
        samples: Sequence[Sample] = SAMPLES,
        spoil: Sequence[int] = (),
        crash: int = -1,
        held_out: Sequence[Sample] = (),
        stop: int = -1,
        **overrides: Any,
    ) -> Run:
        config = RECIPE.model_copy(update=overrides)
        record = make_record(config, target)
        strategy = BlockStrategy(DFlashModel(shape, CPU, config.seed), target, config, record)
        capture = FeatureCapture(target.target, shape.feature_layers)
        drawn: list[str] = []

        def captured(samples: Sequence[Sample], lengths: Sequence[int]) -> list[Captured]:
            step = len(drawn) // config.sequences
            drawn.extend(sample.id for sample in samples)
            if step == crash:
                raise InterruptedError
            factor = math.nan if step in spoil else 1.0
            sequences = [sample.token_ids[:length] for sample, length in zip(samples, lengths, strict=True)]
            return [Captured(each.features * factor, each.hidden) for each in capture(sequences)]

        calls = count()

        def between() -> None:
            if next(calls) == stop:
                raise Stopped("stop")

        judges = HeldOut(held_out, ModelReplay(strategy.model, target)) if held_out else None
        trainer = Trainer(strategy, samples, captured, config, tmp_path / name, record, judges, between)
        return Run(trainer, strategy, drawn)

    return make


def log(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(start: Callable[..., Run], tmp_path: Path) -> None:
    whole = start("whole")
    whole.trainer.run()

    broken = start("broken", crash=5)
    with pytest.raises(InterruptedError):
        broken.trainer.run()
    resumed = start("broken")
    resumed.trainer.resume()
    assert resumed.trainer.step == 3
    resumed.trainer.run()
    assert resumed.drawn == whole.drawn[9:], "the order of data changed"
    assert all(torch.equal(value, resumed.weights[name]) for name, value in whole.weights.items())
    timeless = [[{**line, "ms_per_step": 0} for line in log(tmp_path / name)] for name in ("whole", "broken")]
    assert timeless[0] == timeless[1]
    states = [torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("whole", "broken")]
    for mine, theirs in zip(*(state["optimizer"]["state"].values() for state in states), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


def test_a_state_is_saved_only_after_the_drafter_that_goes_with_it(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, step: int) -> None:
        raise OSError("no space left")

    run = start("run")
    monkeypatch.setattr(run.strategy, "export", full)
    with pytest.raises(OSError, match="no space left"):
        run.trainer.run()
    with pytest.raises(TrainingError, match="nothing was saved"):
        start("run").trainer.resume()


def test_a_damaged_state_is_named(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start("run", steps=3)
    run.trainer.run()
    file = tmp_path / "run" / "state.pt"
    whole = file.read_bytes()
    other = BytesIO()
    torch.save({"step": 3}, other)
    for damaged in (b"", b"not a state", b"hello\n", other.getvalue(), whole[: len(whole) // 2]):
        file.write_bytes(damaged)
        with pytest.raises(TrainingError, match=r"state\.pt is damaged"):
            start("run", steps=3).trainer.resume()


def test_a_damaged_log_costs_its_own_lines_and_no_training(start: Callable[..., Run], tmp_path: Path) -> None:
    start("run", steps=3, log_every=1, save_every=2).trainer.run()
    file = tmp_path / "run" / "log.jsonl"
    first, *rest = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + b'{"step": \xff\n' + b"".join(rest))
    again = start("run", steps=3, log_every=1, save_every=2).trainer
    again.resume()
    again.run()
    assert file.read_bytes() == first


def test_a_full_disk_is_told_with_the_file_and_leaves_no_part_of_it(
    start: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(state: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0")

    run = start("run", steps=3)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)
        with pytest.raises(OSError, match="is the disk full") as error:
            run.trainer.run()
    assert error.value.filename == str(tmp_path / "run" / "state.pt.partial")
    assert not list((tmp_path / "run").glob("*.partial"))

    def full_too(self: object, folder: Path, card: str) -> None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(type(run.strategy.model), "save", full_too)
    with pytest.raises(OSError, match="is the disk full") as error:
        start("other", steps=3).trainer.run()
    assert not list((tmp_path / "other").glob("*.partial"))


def test_a_run_is_not_resumed_with_another_recipe(start: Callable[..., Run]) -> None:
    start("run").trainer.run()
    with pytest.raises(TrainingError, match=r"run with blocks 5, not 7"):
        start("run", blocks=7).trainer.resume()
    with pytest.raises(TrainingError, match=r"nothing was saved"):
        start("other").trainer.resume()


def test_steps_without_a_finite_gradient_change_nothing_and_three_in_a_row_end_the_run(
    start: Callable[..., Run], tmp_path: Path
) -> None:
    run = start("run", spoil=(0, 1, 2))
    before = run.weights
    with pytest.raises(TrainingError, match=r"not finite in 3 steps in a row"):
        run.trainer.run()
    assert all(torch.equal(value, run.weights[name]) for name, value in before.items())
    assert run.trainer.step == 3

    some = start("some", spoil=(1, 2, 4))
    some.trainer.run()
    assert all(value.isfinite().all() for value in some.weights.values())
    assert log(tmp_path / "some")[-1]["skipped"] == 3


@pytest.mark.parametrize("steps", [1, 2])
def test_a_run_too_short_for_three_bad_steps_is_ended_by_as_many_as_it_has(
    start: Callable[..., Run], tmp_path: Path, steps: int
) -> None:
    run = start("run", steps=steps, spoil=range(steps))
    with pytest.raises(TrainingError, match=f"not finite in {steps} steps in a row"):
        run.trainer.run()
    assert not (tmp_path / "run" / DRAFTER).exists()


@pytest.mark.parametrize("stop", range(0, 24, 3))
def test_a_run_that_was_asked_to_stop_anywhere_goes_on_as_if_it_had_not(
    start: Callable[..., Run], tmp_path: Path, stop: int
) -> None:
    """A step has three passes here, and a replay of held-out answers two; both are due at 0, 2, 4 and 6."""
    overrides: dict[str, Any] = {"held_out": HELD_OUT, "eval_every": 2, "pass_tokens": 1}
    whole, broken, resumed = (start(name, **overrides) for name in ("whole", "broken", "broken"))
    whole.trainer.run()
    broken = start("broken", **overrides, stop=stop)
    with pytest.raises(Stopped):
        broken.trainer.run()
    resumed.trainer.resume()
    resumed.trainer.run()
    assert resumed.trainer.evaluated == whole.trainer.evaluated
    assert all(torch.equal(value, resumed.weights[name]) for name, value in whole.weights.items())
    best = [load(tmp_path / name / BEST)[1] for name in ("whole", "broken")]
    assert all(torch.equal(value, best[1][name]) for name, value in best[0].items())


def test_held_out_answers_are_replayed_on_the_way_and_the_best_checkpoint_is_kept(
    start: Callable[..., Run], target: FrozenTarget, tmp_path: Path
) -> None:
    learnable = make_sample([*range(10, 40), *range(10, 40)], [(30, 60)], id="learnable")
    run = start("run", samples=[learnable], held_out=[learnable], steps=60, eval_every=15, warmup=5, loss="tokens")
    lengths: list[int] = []
    evaluate = run.trainer._evaluate

    def spoilt() -> dict[str, float | list[float]]:
        """From the third replay on the model is no good."""
        if len(lengths) >= 2:
            with torch.no_grad():
                run.strategy.model.norm.weight.zero_()
        lengths.append(run.trainer.step)
        return evaluate()

    run.trainer._evaluate = spoilt  # type: ignore[method-assign]
    run.trainer.run()
    assert lengths == [0, 15, 30, 45, 60]
    lines = [line for line in log(tmp_path / "run") if "held_out_tau" in line]
    assert [(line["step"], line["held_out_committed"], line["held_out_verify_steps"]) for line in lines] == [
        (step, length.committed, length.verify_steps) for step, length in run.trainer.evaluated
    ]
    best = run.trainer.best
    assert best is not None
    assert best.step == 15
    replayed = walk(learnable, ModelReplay(DFlashModel.load(tmp_path / "run" / BEST, CPU), target)(learnable), 3)
    assert replayed.length == best.length
    assert replayed.length.verify_steps < run.trainer.evaluated[0].length.verify_steps


def test_how_a_step_is_cut_into_passes_does_not_change_it(start: Callable[..., Run], tmp_path: Path) -> None:
    one, many = start("one", steps=1), start("many", steps=1, pass_tokens=1)
    for run in (one, many):
        run.trainer.run()
    assert sorted(one.drawn) == sorted(many.drawn)
    for key in ("loss", "grad_norm", "accepted"):
        assert log(tmp_path / "one")[0][key] == pytest.approx(log(tmp_path / "many")[0][key], rel=1e-3)


@pytest.mark.parametrize("weights", ["prefix_decay", "dpace"])
def test_a_step_s_loss_is_the_weighted_mean_over_its_labels(
    start: Callable[..., Run], target: FrozenTarget, shape: DFlashConfig, weights: str
) -> None:
    """Label by label: the draft of slot k of a block at a against the token at a + k, in spans only."""
    run = start("run", loss="tokens", weights=weights, blocks=100)
    model = run.strategy.model
    capture = FeatureCapture(target.target, shape.feature_layers)
    captured = capture([sample.token_ids for sample in SAMPLES])
    terms = run.strategy.loss(SAMPLES, captured, torch.Generator())
    total = weight_sum = 0.0
    for sample, (features, _) in zip(SAMPLES, captured, strict=True):
        for first, end in sample.spans:
            for at in range(first, end - 1):
                with torch.no_grad():
                    hidden = model(
                        features[None, :at],
                        torch.tensor([[at]]),
                        torch.tensor([[sample.token_ids[at]]]),
                        target.embedding,
                    )[0, 0]
                labels = sample.token_ids[at + 1 : min(at + shape.block_size, end)]
                logprob = (hidden @ target.head.T).log_softmax(-1)[range(len(labels)), labels]
                prefix = ((logprob.exp() + 1) / 2).cumprod(0)
                for slot in range(len(labels)):
                    weight = math.exp(-slot / 4) if weights == "prefix_decay" else float(prefix[slot:].sum())
                    total -= weight * float(logprob[slot])
                    weight_sum += weight
    assert terms.loss.item() == pytest.approx(total, rel=1e-3)
    assert terms.weight.item() == pytest.approx(weight_sum, rel=1e-3)


def test_the_target_s_distribution_is_taken_where_it_predicts_the_label(
    start: Callable[..., Run], target: FrozenTarget, shape: DFlashConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row a + k - 1 of the target predicts the token at a + k; only slots with labels count."""
    seen: dict[str, Tensor] = {}

    def spy(hidden: Tensor, head: Tensor, labels: Tensor, valid: Tensor, weigh: object, teacher: Tensor) -> None:
        seen.update(labels=labels[valid], teacher=teacher[valid])

    monkeypatch.setattr("redraft.retrain.strategy.block_loss", spy)
    capture = FeatureCapture(target.target, shape.feature_layers)
    tokens = random_tokens(30, 1)
    greedy = target.target.logits(capture([tokens])[0].hidden).argmax(-1).tolist()
    sample = make_sample([*tokens, greedy[-1]], [(20, 31)])
    captured = capture([sample.token_ids])
    start("run").strategy.loss([sample], captured, torch.Generator())
    expected = F.rms_norm(captured[0].hidden, captured[0].hidden.shape[-1:], target.target.norm, 1e-5)
    rows = {tuple(row.tolist()): position for position, row in enumerate(expected)}
    for label, teacher in zip(seen["labels"].tolist(), seen["teacher"], strict=True):
        position = min(rows.items(), key=lambda item: float((torch.tensor(item[0]) - teacher).abs().max()))[1]
        assert sample.token_ids[position + 1] == label


def test_a_pass_without_a_label_gives_every_parameter_a_zero_gradient(
    start: Callable[..., Run], target: FrozenTarget, shape: DFlashConfig
) -> None:
    run = start("run")
    sample = make_sample(random_tokens(12, 0), [(4, 5)])
    capture = FeatureCapture(target.target, shape.feature_layers)
    terms = run.strategy.loss([sample], capture([sample.token_ids]), torch.Generator())
    torch.autograd.backward(terms.loss)
    assert terms.loss.item() == terms.weight.item() == 0
    for name, parameter in run.strategy.model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_looping_answers_and_those_too_short_to_draft_in_are_not_learnt_from(start: Callable[..., Run]) -> None:
    looping = make_sample(random_tokens(20, 0), [(4, 20)], id="looping", looping=True)
    short = make_sample(random_tokens(20, 0), [(19, 20)], id="short")
    run = start("run", samples=[looping, short, SAMPLES[0]])
    run.trainer.run()
    assert set(run.drawn) == {SAMPLES[0].id}
    with pytest.raises(TrainingError, match="nothing can be learnt"):
        start("none", samples=[looping, short])


def test_what_lies_beyond_the_target_s_context_is_not_learnt_from(
    start: Callable[..., Run], shape: DFlashConfig
) -> None:
    beyond = shape.context_length + 10
    long = make_sample(random_tokens(beyond, 0), [(4, 20), (30, beyond)], id="long")
    run = start("run", samples=[long], steps=2)
    assert run.strategy.length(long) == 20
    run.trainer.run()
    alone = make_sample(random_tokens(beyond, 0), [(30, beyond)], id="alone")
    with pytest.raises(TrainingError, match="nothing can be learnt"):
        start("none", samples=[alone])


def test_a_log_goes_on_after_a_line_that_a_crash_left_half_written(tmp_path: Path) -> None:
    first = Journal(tmp_path, 0)
    for step in (1, 2, 3):
        first.add(step, {"loss": math.nan})
    first.close()
    with (tmp_path / "log.jsonl").open("a") as stream:
        stream.write('{"step": 4, "lo')
    again = Journal(tmp_path, 2)
    again.add(3, {"loss": 0.5})
    again.close()
    assert log(tmp_path) == [{"step": 1, "loss": None}, {"step": 2, "loss": None}, {"step": 3, "loss": 0.5}]


def test_every_epoch_draws_every_sample_once(start: Callable[..., Run]) -> None:
    run = start("run", steps=5)
    run.trainer.run()
    epochs = [run.drawn[first : first + 5] for first in (0, 5, 10)]
    assert [sorted(epoch) for epoch in epochs] == [sorted(sample.id for sample in SAMPLES)] * 3


def test_samples_of_equal_weight_are_drawn_in_one_permutation_an_epoch(start: Callable[..., Run]) -> None:
    equal = [msgspec.structs.replace(sample, weight=0.3) for sample in SAMPLES]
    one, other = start("one"), start("other", samples=equal)
    orders = [[run.trainer._order(epoch) for epoch in range(50)] for run in (one, other)]
    assert orders[0] == orders[1]
    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders[0])
    assert orders[0][:2] == [[0, 3, 1, 2, 4], [1, 0, 3, 2, 4]], "the draws of earlier runs are no longer repeated"


def test_samples_are_drawn_in_proportion_to_their_weights(start: Callable[..., Run]) -> None:
    weights = [0.5, 1.0, 3.5, 0.0, 5.0]
    samples = [msgspec.structs.replace(sample, weight=weight) for sample, weight in zip(SAMPLES, weights, strict=True)]
    run = start("run", samples=samples)
    drawn = Counter(sample.id for step in range(4000) for sample in run.trainer._draw(step))
    assert {name: number / 12000 for name, number in drawn.items()} == pytest.approx(
        {"0": 0.05, "1": 0.1, "2": 0.35, "4": 0.5}, rel=0.1
    )
    run.trainer.run()
    assert set(run.drawn) <= {sample.id for sample in start("again", samples=samples).trainer.drawn()} < {*"0124"}


@pytest.mark.parametrize("seed", range(20))
def test_an_epoch_has_a_sample_as_often_as_its_share_says_rounded_up_or_down(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(50, dtype=torch.float64, generator=generator) ** 3 + 1e-3
    expected = weights * (50 / weights.sum())
    found = torch.bincount(systematic(weights, generator), minlength=50)
    assert found.sum() == 50
    assert bool(((found >= expected.floor()) & (found <= expected.ceil())).all())


def test_every_step_draws_blocks_anew(start: Callable[..., Run], monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[int, ...]] = []

    def spy(spans: Sequence[tuple[int, int]], count: int, generator: torch.Generator) -> Tensor:
        blocks = choose_blocks(spans, count, generator)
        drawn.append(tuple(blocks[:, 0].tolist()))
        return blocks

    monkeypatch.setattr("redraft.retrain.strategy.choose_blocks", spy)
    start("run", samples=SAMPLES[-1:], sequences=1, blocks=3).trainer.run()
    assert len(set(drawn)) == RECIPE.steps


def test_equal_seeds_train_equal_drafters(start: Callable[..., Run], tmp_path: Path) -> None:
    runs = [start(name, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    for run in runs:
        run.trainer.run()
    exported = [load(tmp_path / name / DRAFTER)[1] for name in ("a", "b", "c")]
    assert all(torch.equal(value, exported[1][name]) for name, value in exported[0].items())
    assert not torch.equal(exported[0]["fc.weight"], exported[2]["fc.weight"])


def test_the_learning_rate_warms_up_and_ends_at_nothing() -> None:
    shares = [cosine_with_warmup(step, 100, 10) for step in range(100)]
    assert shares[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert max(shares) == shares[10] == 1
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[55] == pytest.approx(0.5)
    assert shares[-1] < 0.001


def test_a_run_says_where_its_drafter_comes_from(
    start: Callable[..., Run], target: FrozenTarget, tmp_path: Path
) -> None:
    start("run").trainer.run()
    record = json.loads((tmp_path / "run" / "provenance.json").read_text())
    assert record["target"] == target.identity
    assert record["config"]["seed"] == RECIPE.seed
    card = (tmp_path / "run" / DRAFTER / "README.md").read_text()
    assert target.identity in card
    assert "| learning rate | 0.01 |" in card
    assert any((tmp_path / "run" / "tensorboard").iterdir())
    last = log(tmp_path / "run")[-1]
    assert last["step"] == 6
    assert len(last["accepted_by_slot"]) == 3


def test_a_recipe_is_strict_and_names_what_was_meant(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("step: 5\n")
    with pytest.raises(TrainingError, match=r"no key step; did you mean steps\?"):
        load_recipe(file)
    file.write_text("steps: five\n")
    with pytest.raises(TrainingError, match=r"steps: .*integer"):
        load_recipe(file)
    file.write_text("steps: 5\nlearning_rate: 1e-3\n")
    assert load_recipe(file, steps=None, seed=3) == TrainConfig(steps=5, seed=3, learning_rate=0.001)
    with pytest.raises(TrainingError, match="cannot be read"):
        load_recipe(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    "text", ["learning_rate: .inf", "weight_decay: .nan", f"seed: {1 << 63}", f"sequences: {10**12}", "block_size: 65"]
)
def test_absurd_numbers_are_refused_by_their_key(tmp_path: Path, text: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(TrainingError, match=f"{text.partition(':')[0]}: Input should be"):
        load_recipe(file)


def test_a_key_that_is_there_twice_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text("steps: 5\nseed: 1\nsteps: 6\n")
    with pytest.raises(TrainingError, match=r"recipe\.yaml:3: .*steps is there twice"):
        load_recipe(file)


@pytest.mark.parametrize("text", ["a: b: c", "steps: [1\n\n", "steps: 2026-13-45", "[" * 5000, "a: \0"])
def test_a_recipe_that_is_not_yaml_is_one_line(tmp_path: Path, text: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(text)
    with pytest.raises(TrainingError, match="not valid YAML") as raised:
        load_recipe(file)
    assert "\n" not in str(raised.value)


def test_the_shipped_recipe_is_sound() -> None:
    assert load_recipe(Path(__file__).parents[2] / "configs" / "dflash.yaml").layers == 3
