"""The drafter versions in memory: which one new sequences take, and which stay for running ones and for an undo."""

from __future__ import annotations

from collections.abc import Collection

from redraft.engine.drafters.base import Drafter
from redraft.engine.drafters.ngram import NgramDrafter
from redraft.engine.embedded.cache import PrefixCache
from redraft.engine.protocol import RequestRefused
from redraft.engine.types import DrafterPointer, DrafterVersion


class DrafterVersions:
    """Weights are kept for the versions that the pointer in force names, for those loaded since, and for n-gram.

    ``fault`` says in words why the one that should serve from the start does not; ``token`` is the pointer's in force.
    Draft K/V is kept in ``cache`` for what new sequences take and for what running ones have.
    """

    def __init__(self, serving: Drafter | None, cache: PrefixCache, *, slots: int, identity: str) -> None:
        self.floor = NgramDrafter()
        self.loaded: dict[DrafterVersion, Drafter] = {self.floor.version: self.floor}
        self.serving: Drafter | None = None
        self.fault = ""
        self._cache = cache
        self._slots = slots
        self._identity = identity
        self.token = 0
        self._kept: set[DrafterVersion | None] = set()
        if serving is not None:
            self.add(serving)
            self._serve(self.loaded[serving.version])

    def add(self, drafter: Drafter) -> None:
        """Make a version ready to activate; one that is here already stays as it is."""
        self.loaded.setdefault(drafter.version, drafter)
        self._kept.add(drafter.version)

    def activate(self, pointer: DrafterPointer) -> None:
        """Let new sequences take ``pointer.serving``; raises `RequestRefused` with what to do instead."""
        serving = pointer.serving
        if pointer.target != self._identity:
            raise RequestRefused(
                f"the pointer is for the target {pointer.target[:12]}; this engine serves {self._identity[:12]}"
            )
        if pointer.token < self.token:
            raise RequestRefused(
                f"pointer {pointer.token} is out of date: {self.token} is in force; read the pointer store again"
            )
        if serving not in self.loaded:
            raise RequestRefused(f"drafter {serving.kind} {serving.id} is not loaded; load it from its folder first")
        self.fault = ""
        self.token = pointer.token
        self._kept = {serving, pointer.previous}
        self._serve(self.loaded[serving])

    def retire(self, running: Collection[DrafterVersion]) -> None:
        """Free what neither new sequences nor those that run with the versions ``running`` can need."""
        serving = self.serving.version if self.serving else None
        for version, drafter in list(self.loaded.items()):
            if version in running or version == serving:
                continue
            if drafter.kv is not None:
                drafter.kv = None
                self._cache.drop_draft_kv(version)
            if version not in self._kept and drafter is not self.floor:
                del self.loaded[version]

    def _serve(self, drafter: Drafter) -> None:
        if drafter.kv is None:
            drafter.kv = drafter.new_kv(self._slots)
        if drafter.kv is not None:
            self._cache.draft_kv[drafter.version] = drafter.kv
        self.serving = drafter
