"""A completion as OpenAI's text completion object, or as its stream of chunks."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UnsetType

from redraft.engine.types import Capabilities
from redraft.gateway.answer import Answer
from redraft.gateway.completion import Completion, ScoredToken, Step
from redraft.gateway.logprobs import text_logprobs
from redraft.gateway.prompt import Prepared
from redraft.gateway.response import Statistics, Usage
from redraft.gateway.text_response import TextChoice, TextCompletion, TextLogprobsOut


class TextAnswer(Answer):
    """Each prompt's choices follow one another; in a stream, an echoed prompt comes with its choice's first text."""

    id_prefix = "cmpl"

    def __init__(self, id_: str, completion: Completion, prepared: Prepared, capabilities: Capabilities) -> None:
        super().__init__(id_, completion, prepared, capabilities)
        self._echoes = [prompt.echo for prompt in prepared.prompts for _ in range(prepared.generation.n)]
        self._opened: set[int] = set()

    def _whole(self, *, usage: Usage, redraft: Statistics | UnsetType) -> TextCompletion:
        choices = [
            TextChoice(
                text=self._echoes[index] + choice.text,
                index=index,
                logprobs=self._logprobs(choice.logprobs),
                finish_reason=choice.finish_reason,
            )
            for index, choice in enumerate(self._completion.choices)
        ]
        return TextCompletion(**self._envelope, choices=choices, usage=usage, redraft=redraft)

    def _choices(self, step: Step) -> list[TextChoice]:
        if not step.deltas and not step.logprobs and step.finish_reason is None:
            return []
        text = step.text
        if step.choice not in self._opened:
            self._opened.add(step.choice)
            text = self._echoes[step.choice] + text
        logprobs = self._logprobs(step.logprobs) if step.logprobs else None
        return [TextChoice(text=text, index=step.choice, logprobs=logprobs, finish_reason=step.finish_reason)]

    def _chunk(
        self, choices: list[TextChoice], *, usage: Usage | UnsetType | None, redraft: Statistics | UnsetType
    ) -> TextCompletion:
        return TextCompletion(**self._envelope, choices=choices, usage=usage, redraft=redraft)

    def _logprobs(self, scored: Sequence[ScoredToken]) -> TextLogprobsOut | None:
        if self._prepared.generation.logprobs is None:
            return None
        return text_logprobs(self._completion.tokenizer, scored)
