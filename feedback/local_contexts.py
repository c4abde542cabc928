"""The tokens behind the events on local disk: a file a session, in which each turn is what it adds to the one before.

``<tenant>/<ss>/<session>.<created>``: tenant and session are hashes, ``ss`` the session's first two digits, so nothing
that a client says becomes a path. A file is frames of length and CRC-32, then a compressed turn; a frame cut short by a
crash is cut off by the next turn. A file takes turns until it is ``FILE_BYTES`` long; the session's next one follows.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
from msgspec import Struct

from redraft.engine.types import SamplingParams, shared_length
from redraft.feedback.contexts import TurnContext, context_id, session_key
from redraft.feedback.metrics import CaptureMetrics

FILE_BYTES = 1 << 20
REMEMBERED = 1024
"""Sessions whose last turn is kept in memory, so that the next one is written without reading their file."""

_CREATED = "[0-9]" * 12
_NAME = f"{'[0-9a-f]' * 16}.{_CREATED}"
_HEAD = struct.Struct("<II")
_ID = re.compile(r"[0-9a-f]{40}")
_LEVEL = 6


class _Turn(Struct, frozen=True, array_like=True):
    """A turn as stored: ``shared`` tokens of the one before in this file, then ``tokens``."""

    id: str
    tenant: str
    session: str
    time: float
    target: str
    prompt_tokens: int
    sampling: SamplingParams
    shared: int
    tokens: tuple[int, ...]


_DECODER = msgspec.msgpack.Decoder(_Turn)


class _Last(Struct):
    """The end of a session's newest file, as this process left it."""

    path: Path
    size: int
    ids: set[str]
    tokens: tuple[int, ...]


class LocalContextStore:
    """A `ContextStore` in a folder that only its user may read; safe for several processes at once."""

    def __init__(self, folder: Path, *, max_bytes: int | None = None, metrics: CaptureMetrics | None = None) -> None:
        self._folder = folder
        self._max_bytes = max_bytes
        self._metrics = metrics or CaptureMetrics()
        self._last: OrderedDict[str, _Last] = OrderedDict()
        self.damaged = 0

    def put(self, context: TurnContext) -> str:
        id_ = context_id(context)
        paths = self._files(context.tenant, id_[:16])
        path = paths[-1] if paths and paths[-1].stat().st_size < FILE_BYTES else self._new(context, id_)
        with _locked(path) as file:
            last = self._remembered(id_[:16], path, os.fstat(file).st_size)
            if id_ in last.ids:
                return id_
            shared = shared_length(last.tokens, context.token_ids)
            data = _encode(id_, context, shared)
            os.ftruncate(file, last.size)
            try:
                if os.pwrite(file, data, last.size) < len(data):
                    raise OSError(f"{path}: no space left")
            except OSError:
                os.ftruncate(file, last.size)
                raise
            last.size += len(data)
            last.ids.add(id_)
            last.tokens = context.token_ids
        self._metrics.wrote("contexts", len(data))
        return id_

    def get(self, tenant: str, context_id: str) -> TurnContext | None:
        if not _ID.fullmatch(context_id):
            return None
        for path in reversed(self._files(tenant, context_id[:16])):
            for id_, context in self._read(path):
                if id_ == context_id:
                    return context if context.tenant == tenant else None
        return None

    def ids(self, tenant: str) -> Iterator[str]:
        for path in sorted((self._folder / _tenant_key(tenant)).glob(f"??/{_NAME}")):
            yield from (id_ for id_, _ in self._read(path))

    def erase(self, tenant: str, session: str | None = None) -> int:
        if session is not None:
            paths = self._files(tenant, session_key(tenant, session))
        else:
            paths = list((self._folder / _tenant_key(tenant)).glob(f"??/{_NAME}"))
        erased = sum(self._forget(path, lambda context: True) for path in paths)
        if session is None:
            shutil.rmtree(self._folder / _tenant_key(tenant), ignore_errors=True)
        return erased

    def expire(self, before: float) -> int:
        """As `ContextStore.expire`; beyond the store's bytes, the sessions begun first go too."""
        expired = 0
        for path in self._paths():
            if _created(path) < before:
                expired += self._forget(path, lambda context: context.time < before)
        return expired + (self._trim(self._max_bytes) if self._max_bytes is not None else 0)

    def _trim(self, max_bytes: int) -> int:
        sizes = {path: path.stat().st_size for path in self._paths()}
        total, forgotten = sum(sizes.values()), 0
        for path in sorted(sizes, key=_created):
            if total <= max_bytes:
                break
            total -= sizes[path]
            forgotten += self._forget(path, lambda context: True)
        return forgotten

    def size(self) -> int:
        """Bytes of all files."""
        return sum(path.stat().st_size for path in self._paths())

    def _paths(self) -> list[Path]:
        return list(self._folder.glob(f"*/??/{_NAME}"))

    def _remembered(self, key: str, path: Path, size: int) -> _Last:
        """What the file holds; read again where another process wrote to it or a crash left it."""
        last = self._last.get(key)
        if last is None or (last.path, last.size) != (path, size):
            last = _Last(path, 0, set(), ())
            for id_, context, end in _turns(path.read_bytes()):
                last.ids.add(id_)
                last.tokens = context.token_ids
                last.size = end
            self.damaged += last.size < size
            self._last[key] = last
        self._last.move_to_end(key)
        if len(self._last) > REMEMBERED:
            self._last.popitem(last=False)
        return last

    def _read(self, path: Path) -> Iterator[tuple[str, TurnContext]]:
        """The turns of a file, up to where it is damaged."""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return
        end = 0
        for id_, context, end in _turns(data):  # noqa: B007
            yield id_, context
        self.damaged += end < len(data)

    def _forget(self, path: Path, stale: Callable[[TurnContext], bool]) -> int:
        """Take turns out of a file, in one step; returns how many."""
        new = path.with_name(f".{path.name}.new")
        with suppress(FileNotFoundError), _locked(path):
            new.unlink(missing_ok=True)
            turns = [context for _, context in self._read(path)]
            keep = [context for context in turns if not stale(context)]
            if not keep:
                path.unlink()
            elif len(keep) < len(turns):
                with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                    before: tuple[int, ...] = ()
                    for context in keep:
                        file.write(_encode(context_id(context), context, shared_length(before, context.token_ids)))
                        before = context.token_ids
                new.replace(path)
            return len(turns) - len(keep)
        return 0

    def _files(self, tenant: str, key: str) -> list[Path]:
        """A session's files, oldest first."""
        return sorted((self._folder / _tenant_key(tenant) / key[:2]).glob(f"{key}.{_CREATED}"))

    def _new(self, context: TurnContext, id_: str) -> Path:
        folder = self._folder / _tenant_key(context.tenant) / id_[:2]
        for parent in (self._folder, folder.parent, folder):
            parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        taken = {_created(path) for path in self._files(context.tenant, id_[:16])}
        created = max(int(context.time), max(taken, default=-1) + 1)
        path = folder / f"{id_[:16]}.{created:012d}"
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        return path


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """A file open for writing by one process at a time; the file that is there once the lock is held."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if os.path.samestat(os.fstat(file), path.stat()):
                yield file
                return
        finally:
            os.close(file)


def _encode(id_: str, context: TurnContext, shared: int) -> bytes:
    turn = _Turn(
        id_,
        context.tenant,
        context.session,
        context.time,
        context.target,
        context.prompt_tokens,
        context.sampling,
        shared,
        context.token_ids[shared:],
    )
    payload = zlib.compress(msgspec.msgpack.encode(turn), _LEVEL)
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def _turns(data: bytes) -> Iterator[tuple[str, TurnContext, int]]:
    """Every turn with its id and the end of its frame, up to the first frame that is not whole."""
    tokens: tuple[int, ...] = ()
    offset = 0
    while offset + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, offset)
        offset += _HEAD.size
        payload = data[offset : offset + length]
        offset += length
        if not length or len(payload) < length or zlib.crc32(payload) != checksum:
            return
        try:
            turn = _DECODER.decode(zlib.decompress(payload))
        except (zlib.error, msgspec.DecodeError):
            return
        tokens = tokens[: turn.shared] + turn.tokens
        context = TurnContext(
            tenant=turn.tenant,
            session=turn.session,
            time=turn.time,
            target=turn.target,
            token_ids=tokens,
            prompt_tokens=turn.prompt_tokens,
            sampling=turn.sampling,
        )
        yield turn.id, context, offset


def _created(path: Path) -> int:
    """The time in a file's name."""
    return int(path.name.rpartition(".")[2])


def _tenant_key(tenant: str) -> str:
    return hashlib.blake2b(tenant.encode(), digest_size=16).hexdigest()
