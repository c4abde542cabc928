"""The training loop, the same for every drafter.

Nothing in a run is random but by the seed and a step's number: initial weights, the order of data, the blocks. So a run
resumes exactly from weights, optimizer state and step alone.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple, Protocol

import msgspec
import torch
from torch import Tensor, nn

from redraft.engine.types import AcceptLength
from redraft.retrain.config import TrainConfig
from redraft.retrain.data.sample import Sample
from redraft.retrain.errors import Stopped, TrainingError
from redraft.retrain.features import Captured
from redraft.retrain.files import replace
from redraft.retrain.journal import Journal
from redraft.retrain.losses import LossTerms
from redraft.retrain.optimizer import adamw
from redraft.retrain.provenance import Provenance
from redraft.retrain.replay import Drafting, walk
from redraft.retrain.saving import written

MAX_BAD_STEPS = 3
"""In a row, after which a run ends."""

BETAS = (0.9, 0.95)

STATE = "state.pt"
DRAFTER = "drafter"
BEST = "best"
"""The run folder's state to resume from, its last checkpoint, and the one with the best held-out accept length."""


class Strategy(Protocol):
    """What one kind of drafter adds to the loop."""

    @property
    def model(self) -> nn.Module: ...

    def length(self, sample: Sample) -> int:
        """Tokens of a sample from which something can be learnt; 0 if nothing can."""
        ...

    def loss(self, samples: Sequence[Sample], captured: Sequence[Captured], generator: torch.Generator) -> LossTerms:
        """Differentiable sums over a few sequences; ``generator`` (on the CPU) decides what is drawn."""
        ...

    def export(self, folder: Path, step: int) -> None:
        """Write the drafter as a checkpoint with its model card."""
        ...


Progress = Callable[[int, int, str], None]
"""Called with steps done, all steps, and what is being done."""


def silent(done: int, wanted: int, text: str) -> None:
    pass


def at_once() -> None:
    pass


class HeldOut(NamedTuple):
    """Answers that are not learnt from, and the model in training as it drafts in them."""

    samples: Sequence[Sample]
    drafting: Drafting


class Evaluated(NamedTuple):
    """The held-out accept length after a step."""

    step: int
    length: AcceptLength


class Trainer:
    """One run in ``folder``; ``capture`` gives the target's features of the first tokens of samples.

    With ``held_out`` answers the run replays them before the first step, every ``eval_every`` steps and after the last,
    and keeps the best checkpoint. ``between`` is called between passes: it may wait there, or raise `Stopped`, upon
    which the run saves its state. Raises `TrainingError` if there is nothing to learn from.
    """

    def __init__(
        self,
        strategy: Strategy,
        samples: Sequence[Sample],
        capture: Callable[[Sequence[Sample], Sequence[int]], list[Captured]],
        config: TrainConfig,
        folder: Path,
        record: Provenance,
        held_out: HeldOut | None = None,
        between: Callable[[], None] = at_once,
    ) -> None:
        self._strategy = strategy
        self._samples = [
            sample for sample in samples if not sample.looping and sample.weight > 0 and strategy.length(sample)
        ]
        if not self._samples:
            raise TrainingError("no sample has an answer of two tokens that does not loop; nothing can be learnt")
        self._capture = capture
        self._config = config
        self._folder = folder
        self._record = record
        self._held_out = held_out
        self._between = between
        self._weights = torch.tensor([sample.weight for sample in self._samples], dtype=torch.float64)
        self._parameters = [parameter for parameter in strategy.model.parameters() if parameter.requires_grad]
        self._device = self._parameters[0].device
        decayed = [parameter for parameter in self._parameters if parameter.dim() > 1]
        others = [parameter for parameter in self._parameters if parameter.dim() <= 1]
        self._optimizer = adamw(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate,
            betas=BETAS,
            fused=True,
        )
        self.step = 0
        self.evaluated: list[Evaluated] = []
        zero = torch.zeros((), device=self._device)
        self._bad = {"skipped": zero.clone(), "streak": zero.clone(), "longest": zero.clone()}

    def resume(self) -> None:
        """Go on from the folder's last state; raises `TrainingError` if it is missing, damaged or another run's."""
        file = self._folder / STATE
        try:
            state = torch.load(file, map_location=self._device, weights_only=True)
            run, model, optimizer, bad, step, evaluated = (
                state[key] for key in ("run", "model", "optimizer", "bad", "step", "evaluated")
            )
        except FileNotFoundError:
            raise TrainingError(f"{self._folder} has no {STATE}; nothing was saved to resume from") from None
        except (RuntimeError, EOFError, UnpicklingError, LookupError, TypeError, ValueError) as error:
            raise TrainingError(f"{file} is damaged; remove it, and the run begins anew") from error
        mine = self._fingerprint()
        for key, theirs in run.items():
            if mine.get(key) != theirs:
                raise TrainingError(f"{file} is of a run with {key} {theirs}, not {mine.get(key)}; use a new folder")
        self._strategy.model.load_state_dict(model)
        self._optimizer.load_state_dict(optimizer)
        self._bad = bad
        self.step = step
        self.evaluated = [Evaluated(at, AcceptLength(*counts)) for at, *counts in evaluated]

    @property
    def best(self) -> Evaluated | None:
        """The first of the best; None before any replay of held-out answers."""
        return max(self.evaluated, key=lambda each: each.length.tau or 0.0, default=None)

    def drawn(self) -> list[Sample]:
        """The samples that the remaining steps read, once each, in their order."""
        drawn = {sample.id for step in range(self.step, self._config.steps) for sample in self._draw(step)}
        return [sample for sample in self._samples if sample.id in drawn]

    def run(self, progress: Progress = silent) -> None:
        """Train to the last step, logging, saving and exporting on the way.

        Raises `TrainingError` after MAX_BAD_STEPS steps in a row without a finite gradient.
        """
        config = self._config
        self._folder.mkdir(parents=True, exist_ok=True)
        replace(self._folder / "provenance.json", msgspec.json.format(msgspec.json.encode(self._record)) + b"\n")
        journal = Journal(self._folder, self.step)
        since, started = self.step, time.perf_counter()
        sums: list[LossTerms] = []
        try:
            if self._evaluation_due():
                journal.add(self.step, self._evaluate())
            while self.step < config.steps:
                terms, norm = self._train_step()
                sums.append(terms)
                self.step += 1
                last = self.step == config.steps
                values: dict[str, float | list[float]] = {}
                if last or self.step % config.log_every == 0:
                    values |= _summary(sums)
                    seconds = time.perf_counter() - started
                    values |= {
                        "grad_norm": float(norm),
                        "learning_rate": self._learning_rate(self.step - 1),
                        "skipped": float(self._bad["skipped"]),
                        "ms_per_step": seconds * 1e3 / (self.step - since),
                    }
                    text = f"loss {values['loss']:.3f}  drafted right {values['accepted']:.2f}"
                    progress(self.step, config.steps, text)
                    self._check()
                    since, started, sums = self.step, time.perf_counter(), []
                if self._evaluation_due():
                    self._check()
                    values |= self._evaluate()
                if values:
                    journal.add(self.step, values)
                if last or self.step % config.save_every == 0:
                    self._check()
                    self.save()
        except Stopped:
            self.save()
            raise
        finally:
            journal.close()

    def save(self) -> None:
        """Write the checkpoint and then the state to resume from, each whole or not at all."""
        self._strategy.export(self._folder / DRAFTER, self.step)
        state = {
            "step": self.step,
            "run": self._fingerprint(),
            "model": self._strategy.model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "bad": self._bad,
            "evaluated": [(at, length.committed, length.verify_steps) for at, length in self.evaluated],
        }
        partial = self._folder / f"{STATE}.partial"
        with written(partial):
            torch.save(state, partial)
        partial.replace(self._folder / STATE)

    def _train_step(self) -> tuple[LossTerms, Tensor]:
        config = self._config
        for group in self._optimizer.param_groups:
            group["lr"] = self._learning_rate(self.step)
        self._optimizer.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(_mix(config.seed, self.step, 1))
        total: LossTerms | None = None
        for samples in self._passes(self._draw(self.step)):
            self._between()
            captured = self._capture(samples, [self._strategy.length(sample) for sample in samples])
            terms = self._strategy.loss(samples, captured, generator)
            torch.autograd.backward(terms.loss)
            terms = LossTerms(*(term.detach() for term in terms))
            total = terms if total is None else LossTerms(*map(torch.add, total, terms))
        assert total is not None
        grads = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        torch._foreach_mul_(grads, 1 / total.weight.clamp(min=1e-8))
        norm = nn.utils.clip_grad_norm_(self._parameters, config.clip)
        self._apply(norm)
        return total, norm

    def _apply(self, norm: Tensor) -> None:
        """An optimizer step that leaves everything as it is where the gradient is not finite, without asking the GPU.

        ``found_inf`` is how torch's gradient scaler tells a fused optimizer to skip.
        """
        bad = (~norm.isfinite()).float()
        self._optimizer.found_inf = bad  # type: ignore[attr-defined]
        self._optimizer.step()
        self._bad["skipped"] += bad
        self._bad["streak"] = (self._bad["streak"] + bad) * bad
        self._bad["longest"] = torch.maximum(self._bad["longest"], self._bad["streak"])

    def _check(self) -> None:
        most = min(MAX_BAD_STEPS, self._config.steps)
        if self._bad["longest"] >= most:
            raise TrainingError(
                f"the gradient was not finite in {most} steps in a row, by step {self.step}; the last saved state is "
                "unharmed. Lower learning_rate, or look for broken features or weights."
            )

    def _evaluation_due(self) -> bool:
        due = self.step % self._config.eval_every == 0 or self.step == self._config.steps
        return self._held_out is not None and due and self.step not in (each.step for each in self.evaluated)

    def _evaluate(self) -> dict[str, float | list[float]]:
        """Replay the held-out answers; export what is better than ever before."""
        assert self._held_out is not None
        samples, drafting = self._held_out
        length = AcceptLength()
        for sample in samples:
            self._between()
            length += walk(sample, drafting(sample), drafting.longest).length
        self.evaluated.append(Evaluated(self.step, length))
        if self.best is self.evaluated[-1]:
            self._strategy.export(self._folder / BEST, self.step)
        return {
            "held_out_tau": length.tau or 0.0,
            "held_out_committed": length.committed,
            "held_out_verify_steps": length.verify_steps,
        }

    def _learning_rate(self, step: int) -> float:
        config = self._config
        return config.learning_rate * cosine_with_warmup(step, config.steps, config.warmup)

    def _draw(self, step: int) -> list[Sample]:
        """The samples of a step: one order an epoch, cut into steps across epochs' borders."""
        count = len(self._samples)
        first = step * self._config.sequences
        places = range(first, first + self._config.sequences)
        orders = {epoch: self._order(epoch) for epoch in {place // count for place in places}}
        return [self._samples[orders[place // count][place % count]] for place in places]

    def _order(self, epoch: int) -> list[int]:
        generator = torch.Generator().manual_seed(_mix(self._config.seed, epoch, 2))
        order = torch.randperm(len(self._samples), generator=generator)
        return systematic(self._weights, generator)[order].tolist()

    def _passes(self, samples: list[Sample]) -> Iterator[list[Sample]]:
        """Samples of like length together, so that padding is small, within ``pass_tokens`` padded tokens."""
        group: list[Sample] = []
        for sample in sorted(samples, key=self._strategy.length, reverse=True):
            if group and (len(group) + 1) * self._strategy.length(group[0]) > self._config.pass_tokens:
                yield group
                group = []
            group.append(sample)
        yield group

    def _fingerprint(self) -> dict[str, str | int | float | bool | None]:
        """What must be equal for a run to be the same run."""
        free = {"save_every", "log_every", "eval_every", "held_out", "cache_bytes", "device"}
        config = {key: value for key, value in self._record.config.items() if key not in free}
        record = self._record
        run = {"target": record.target, "data": record.data, "initial": record.initial, "samples": len(self._samples)}
        return {**run, **config}


def cosine_with_warmup(step: int, steps: int, warmup: int) -> float:
    """Share of the learning rate at a step: linear from 0 over ``warmup``, then a half cosine to 0 at ``steps``."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def systematic(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Ascending indices, as many as float64 weights [count]: each as often as its share says, rounded up or down.

    Equal weights give each once. Systematic resampling (Kitagawa 1996).
    """
    edges = weights.cumsum(0) * (len(weights) / weights.sum())
    points = torch.arange(len(weights)) + torch.rand((), dtype=torch.float64, generator=generator)
    return torch.searchsorted(edges, points, right=True).clamp(max=len(weights) - 1)


def _mix(*numbers: int) -> int:
    """A seed of its own for every purpose and step."""
    mixed = 0
    for number in numbers:
        mixed = ((mixed ^ number) * 0x9E3779B97F4A7C15 + 0x632BE59BD9B4E019) % (1 << 63)
    return mixed


def _summary(steps: Sequence[LossTerms]) -> dict[str, float | list[float]]:
    loss, weight, correct, reached = (torch.stack(term).sum(0) for term in zip(*steps, strict=True))
    by_slot = (correct / reached.clamp(min=1)).tolist()
    return {"loss": float(loss / weight.clamp(min=1e-8)), "accepted": sum(by_slot), "accepted_by_slot": by_slot}
