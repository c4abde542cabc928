"""A folder of training data: manifest, conversations, prompts and responses.

| file | one line each |
| --- | --- |
| ``manifest.json`` | what made it, and the SHA-256 of every other file |
| ``conversations.jsonl.xz`` | a `Conversation` |
| ``prompts.jsonl.xz`` | a `Prompt`, whose ids are stored as how many it shares with the line before, and the rest |
| ``responses-NNNNN.jsonl.xz`` | a `Response`; a shard never changes once written |
| ``responses.partial.jsonl`` | responses since the last shard, while generating |
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import lzma
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from redraft.engine.types import SamplingParams, shared_length
from redraft.retrain.data.conversation import Conversation, Source
from redraft.retrain.data.errors import DataError
from redraft.retrain.data.prompts import Prompt
from redraft.retrain.data.responses import Response
from redraft.retrain.data.sample import Sample
from redraft.retrain.data.splits import SPLITS, Split, split_of
from redraft.retrain.files import replace

SHARD_RESPONSES = 4000
_XZ_PRESET = 6
_MANIFEST, _CONVERSATIONS, _PROMPTS = "manifest.json", "conversations.jsonl.xz", "prompts.jsonl.xz"
_SHARDS, _PARTIAL = "responses-*.jsonl.xz", "responses.partial.jsonl"

T = TypeVar("T")


class Manifest(Struct, frozen=True, kw_only=True):
    """What a folder holds and where it came from.

    ``chat`` identifies tokenizer and template, with which prompts are valid for any target; ``target`` is the
    identity of the model that answered, None while nobody has. ``counts`` are prompts by source and split, ``sha256``
    is by file.
    """

    command: str
    commit: str | None
    model: str
    chat: str
    target: str | None = None
    sources: tuple[Source, ...]
    max_tokens: int | None = None
    sampled: int | None = None
    sessions: int
    sessions_cut: int
    prompts_repeated: int
    prompts: int
    prompt_tokens: int
    responses: int = 0
    response_tokens: int = 0
    looping_share: float | None = None
    counts: dict[str, dict[str, int]]
    sha256: dict[str, str] = {}


class _StoredPrompt(Struct, frozen=True):
    id: str
    source: Source
    family: str
    split: Split
    session: str
    turn: int
    shared: int
    rest: tuple[int, ...]


def load_manifest(folder: Path) -> Manifest:
    try:
        return msgspec.json.decode((folder / _MANIFEST).read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no training data (no {_MANIFEST}); make some: redraft data generate {folder}"
        ) from None
    except msgspec.MsgspecError as error:
        raise DataError(f"{folder / _MANIFEST} is damaged: {error}") from error


def save_manifest(folder: Path, manifest: Manifest) -> Manifest:
    """Write a manifest, with hashes of the files that are there now; returns what was written."""
    files = sorted([*folder.glob("*.jsonl.xz")])
    manifest = msgspec.structs.replace(manifest, sha256={file.name: _digest(file) for file in files})
    text = json.dumps(msgspec.to_builtins(manifest), indent=2) + "\n"
    replace(folder / _MANIFEST, text.encode())
    return manifest


def verify(folder: Path) -> None:
    """Raise `DataError` unless every file is as the manifest says, and no answers are there that it does not know."""
    known = load_manifest(folder).sha256
    for name, digest in known.items():
        file = folder / name
        if not file.exists() or _digest(file) != digest:
            raise DataError(f"{file} is not the file that was made ({'changed' if file.exists() else 'missing'})")
    for file in [*folder.glob(_SHARDS), *folder.glob(_PARTIAL)]:
        if file.name not in known:
            raise DataError(f"{folder} is being answered, or that broke off; finish it: redraft data generate {folder}")


def save_prompts(folder: Path, conversations: Iterable[Conversation], prompts: Iterable[Prompt]) -> Counter[str]:
    """Write conversations and prompts; returns counts: sessions, prompts, tokens, and "source/split" each."""
    folder.mkdir(parents=True, exist_ok=True)
    counts: Counter[str] = Counter()

    def stored() -> Iterator[_StoredPrompt]:
        last: tuple[int, ...] = ()
        for prompt in prompts:
            shared = shared_length(last, prompt.ids)
            last = prompt.ids
            counts.update({"prompts": 1, "tokens": len(prompt.ids), f"{prompt.source}/{prompt.split}": 1})
            yield _StoredPrompt(
                prompt.id,
                prompt.source,
                prompt.family,
                prompt.split,
                prompt.session,
                prompt.turn,
                shared,
                prompt.ids[shared:],
            )

    def counted() -> Iterator[Conversation]:
        for conversation in conversations:
            counts["sessions"] += 1
            yield conversation

    _write_xz(folder / _CONVERSATIONS, counted())
    _write_xz(folder / _PROMPTS, stored())
    return counts


def load_prompts(folder: Path, splits: Collection[Split] = SPLITS) -> Iterator[Prompt]:
    """Prompts in the order they were made: turns of a session follow one another."""
    last: tuple[int, ...] = ()
    for line in _read_xz(folder / _PROMPTS, _StoredPrompt):
        last = last[: line.shared] + line.rest
        if line.split in splits:
            yield Prompt(line.id, line.source, line.family, line.split, line.session, line.turn, last)


def load_conversations(folder: Path, splits: Collection[Split] = SPLITS) -> Iterator[Conversation]:
    for conversation in _read_xz(folder / _CONVERSATIONS, Conversation):
        if split_of(conversation.source, conversation.family) in splits:
            yield conversation


def load_responses(folder: Path) -> Iterator[Response]:
    """Every response once, in no particular order; a line that a crash left half-written is passed over."""
    seen: set[tuple[str, SamplingParams]] = set()
    for response in _stored_responses(folder):
        if response.key not in seen:
            seen.add(response.key)
            yield response


def _stored_responses(folder: Path) -> Iterator[Response]:
    """Responses of the shards and of the partial one, which a crash may have left beside the shard it became."""
    for shard in sorted(folder.glob(_SHARDS)):
        yield from _read_xz(shard, Response)
    partial = folder / _PARTIAL
    if partial.exists():
        yield from _decoded(partial.read_bytes().split(b"\n")[:-1], Response, partial)


def load_samples(folder: Path, splits: Collection[Split] = SPLITS) -> Iterator[Sample]:
    """Every response with its prompt, prompts in order; the answer is the supervised span."""
    by_prompt: dict[str, list[Response]] = {}
    for response in load_responses(folder):
        by_prompt.setdefault(response.prompt, []).append(response)
    for prompt in load_prompts(folder, splits):
        for number, response in enumerate(sorted(by_prompt.get(prompt.id, ()), key=_order)):
            ids = prompt.ids + response.token_ids
            yield Sample(
                id=f"{prompt.id}/{number}",
                source=prompt.source,
                family=prompt.family,
                split=prompt.split,
                session=prompt.session,
                token_ids=ids,
                spans=((len(prompt.ids), len(ids)),),
                greedy=response.sampling.mode == "greedy",
                looping=response.looping,
            )


def _order(response: Response) -> tuple[bool, int]:
    return response.sampling.mode == "sampled", response.sampling.seed or 0


class ResponseWriter:
    """Appends responses to a folder; what was added is kept whatever happens to the process.

    Raises `DataError` while another process writes there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise DataError(f"{folder} is being written by another process; wait for it, or use a new folder") from None
        partial = folder / _PARTIAL
        whole = partial.read_bytes().rpartition(b"\n")[0] if partial.exists() else b""
        replace(partial, whole + b"\n" * bool(whole))
        self._stream = partial.open("ab")
        self._lines = whole.count(b"\n") + bool(whole)

    def add(self, response: Response) -> None:
        self._stream.write(msgspec.json.encode(response) + b"\n")
        self._stream.flush()
        self._lines += 1
        if self._lines >= SHARD_RESPONSES:
            self._close_shard()
            self._stream = (self._folder / _PARTIAL).open("ab")

    def close(self) -> None:
        self._close_shard()
        os.close(self._lock)

    def _close_shard(self) -> None:
        self._stream.close()
        partial = self._folder / _PARTIAL
        if self._lines:
            number = max((int(file.name[10:15]) for file in self._folder.glob(_SHARDS)), default=-1) + 1
            shard = self._folder / f"responses-{number:05d}.jsonl.xz"
            replace(shard, lzma.compress(partial.read_bytes(), preset=_XZ_PRESET))
        partial.unlink()
        self._lines = 0


def _write_xz(file: Path, items: Iterable[Struct]) -> None:
    unfinished = file.with_suffix(".tmp")
    with lzma.open(unfinished, "wb", preset=_XZ_PRESET) as stream:
        for item in items:
            stream.write(msgspec.json.encode(item) + b"\n")
    unfinished.replace(file)


def _read_xz(file: Path, kind: type[T]) -> Iterator[T]:
    try:
        with lzma.open(file, "rb") as stream:
            yield from _decoded(stream, kind, file)
    except FileNotFoundError:
        raise DataError(f"{file} is missing; {file.parent} is not a whole folder of training data") from None
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"{file} is damaged: {error}") from error


def _decoded(lines: Iterable[bytes], kind: type[T], file: Path) -> Iterator[T]:
    decoder = msgspec.json.Decoder(kind)
    try:
        for line in lines:
            yield decoder.decode(line)
    except msgspec.MsgspecError as error:
        raise DataError(f"{file} is damaged: {error}") from error


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
