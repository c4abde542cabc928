"""What the adapter imitates: BFCL's ground truth, and plain replies of the base's own; train families only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile
from pathlib import Path
from random import Random

from redraft.engine.chat.encoding import ChatEncoder
from redraft.engine.checkpoints import identity
from redraft.retrain.agent_target.prepared import ABSTAINING, PLAIN_SOURCES, Case, Example, Prepared, category_of
from redraft.retrain.agent_target.recipe import Recipe
from redraft.retrain.data.conversation import Conversation, Source
from redraft.retrain.data.errors import DataError
from redraft.retrain.data.masks import encode_with_spans
from redraft.retrain.data.sources import SOURCES
from redraft.retrain.data.sources.bfcl import answers
from redraft.retrain.data.splits import Split, split_of
from redraft.retrain.data.store import load_manifest, load_samples, verify

_TOOL_SOURCES: tuple[Source, ...] = ("bfcl-single", "bfcl-multi-turn")
CALLING = ("simple_python", "live_simple", "multiple", "live_multiple", "parallel", "live_parallel")


def prepare(base: Path, plain: Path, recipe: Recipe) -> Prepared:
    """Everything training and scoring need; ``plain`` holds prompts and the base's responses to them."""
    verify(plain)
    base_identity = identity(base)
    manifest = load_manifest(plain)
    if manifest.target != base_identity:
        raise DataError(
            f"the replies in {plain} are of the target {manifest.target}, not of {base_identity} ({base}), which is to "
            "keep its manners; make them with it: redraft data generate"
        )
    chat = ChatEncoder.from_folder(base)
    conversations = [conversation for source in _TOOL_SOURCES for conversation in SOURCES[source]()]
    return Prepared(
        recipe=recipe,
        commit=manifest.commit,
        identity=base_identity,
        train=tuple(_mixture(chat, conversations, plain, recipe, "train")),
        held_out=tuple(_mixture(chat, conversations, plain, recipe, "calibrate")),
        cases=tuple(case for case, _ in cases(conversations)),
    )


def cases(conversations: Iterable[Conversation]) -> Iterator[tuple[Case, Conversation]]:
    """BFCL's single-turn cases of test families, with what answers them; a case has its prompt's id."""
    truths = {case: calls for category in CALLING for case, calls in answers(category).items()}
    for conversation in conversations:
        if split_of(conversation.source, conversation.family) != "test":
            continue
        id_ = f"{conversation.id}:{conversation.asked_turns[0]}"
        if conversation.id in truths:
            calls = tuple((name, values) for call in truths[conversation.id] for name, values in call.items())
            yield Case(id_, conversation.tools, calls), conversation
        elif category_of(conversation.id) in ABSTAINING:
            yield Case(id_, conversation.tools, ()), conversation


def _mixture(
    chat: ChatEncoder, conversations: Sequence[Conversation], plain: Path, recipe: Recipe, split: Split
) -> list[Example]:
    random = Random(recipe.seed)
    tool = _tool_examples(chat, conversations, recipe, split, random)
    replies = list(_replies(chat, plain, recipe, split))
    if not replies:
        raise DataError(
            f"{plain} holds no whole reply to a plain prompt of the {split} split; make some with the base: "
            f"redraft data generate {plain}"
        )
    wanted = round(len(tool) * recipe.plain_share / (1 - recipe.plain_share))
    return tool + random.sample(replies, min(wanted, len(replies)))


def _tool_examples(
    chat: ChatEncoder, conversations: Sequence[Conversation], recipe: Recipe, split: Split, random: Random
) -> list[Example]:
    chosen = [c for c in conversations if c.truth and split_of(c.source, c.family) == split]
    single = [c for c in chosen if c.source == "bfcl-single"]
    refusals = [c for c in single if category_of(c.id) in ABSTAINING]
    calling = len(single) - len(refusals)
    wanted = round(calling * recipe.refusal_share / (1 - recipe.refusal_share))
    left_out = {c.id for c in random.sample(refusals, max(0, len(refusals) - wanted))}
    examples = (_example(chat, c, recipe.window) for c in chosen if c.id not in left_out)
    # Variants of one scenario often begin alike and are then cut to the same window.
    return list(dict.fromkeys(example for example in examples if example.spans))


def _example(chat: ChatEncoder, conversation: Conversation, window: int) -> Example:
    """As many whole turns as fit into the window, the first ones, so that nothing is asked without what led to it."""
    messages, tools = conversation.messages, conversation.tools
    lengths = ((turn, len(chat.encode_chat(messages[:turn], tools))) for turn in conversation.asked_turns)
    prompts = list(takewhile(lambda prompt: prompt[1] < window, lengths))
    if not prompts:
        return Example(conversation.source, (), ())
    ids, spans = encode_with_spans(chat, messages[: prompts[-1][0] + 1], tools)
    end = max((stop for _, stop in spans if stop <= window), default=0)
    return Example(
        conversation.source, ids[:end], tuple(span for span in spans if span[0] >= prompts[0][1] and span[1] <= end)
    )


def _replies(chat: ChatEncoder, folder: Path, recipe: Recipe, split: Split) -> Iterator[Example]:
    """What the base wrote of its own accord, but for answers that loop or do not end."""
    for sample in load_samples(folder, splits=(split,)):
        ended = sample.token_ids[-1] in chat.tokenizer.eos_ids
        if sample.source in PLAIN_SOURCES and ended and not sample.looping and len(sample.token_ids) <= recipe.window:
            yield Example(sample.source, sample.token_ids, sample.spans)
