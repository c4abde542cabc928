"""Scenario families: conversations that say the same thing are one family, so that no split sees another's text."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

import msgspec

from redraft.retrain.data.conversation import Conversation

_GRAM = 4
_NEAR = 0.5
_WORD = re.compile(r"\w+")


def normalised(text: str) -> str:
    """A text's words in lower case, numbers made alike."""
    return " ".join("0" if word.isdigit() else word for word in _WORD.findall(text.lower()))


def joined(conversations: Iterable[Conversation], *, near: bool) -> Iterator[Conversation]:
    """The same conversations, in families that share no user text.

    Families with an equal normalised user text become one, transitively; with ``near`` also those with texts that
    have half of their runs of four words in common. A joined family has the name of its first member.
    """
    conversations = list(conversations)
    groups = _Groups()
    holders: defaultdict[str, list[str]] = defaultdict(list)
    for conversation in conversations:
        groups.add(conversation.family)
        for text in conversation.user_texts:
            holders[normalised(text)].append(conversation.family)
    for families in holders.values():
        for family in families[1:]:
            groups.join(families[0], family)
    if near:
        for one, other in _near_pairs(list(holders)):
            groups.join(holders[one][0], holders[other][0])
    for conversation in conversations:
        yield msgspec.structs.replace(conversation, family=groups.first(conversation.family))


def _near_pairs(texts: list[str]) -> Iterator[tuple[str, str]]:
    """Pairs of texts whose sets of word runs have a Jaccard index of at least a half."""
    grams = [_grams(text.split()) for text in texts]
    holders: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for i, mine in enumerate(grams):
        shared: defaultdict[int, int] = defaultdict(int)
        for gram in mine:
            for j in holders[gram]:
                shared[j] += 1
            holders[gram].append(i)
        for j, count in shared.items():
            if count >= _NEAR * (len(mine) + len(grams[j]) - count):
                yield texts[i], texts[j]


def _grams(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[i : i + _GRAM]) for i in range(max(1, len(words) - _GRAM + 1))}


class _Groups:
    """Union-find; a group's first member stays its name."""

    def __init__(self) -> None:
        self._parents: dict[str, str] = {}
        self._order: dict[str, int] = {}

    def add(self, name: str) -> None:
        self._parents.setdefault(name, name)
        self._order.setdefault(name, len(self._order))

    def first(self, name: str) -> str:
        while (parent := self._parents[name]) != name:
            self._parents[name] = self._parents[parent]
            name = parent
        return name

    def join(self, one: str, other: str) -> None:
        first, second = sorted((self.first(one), self.first(other)), key=self._order.__getitem__)
        self._parents[second] = first
