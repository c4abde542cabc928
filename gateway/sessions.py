"""Which session a request belongs to when its client does not say: the one whose messages it continues."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from redraft.engine.chat.messages import Message

_LINKS_PER_SESSION = 64

Link = bytes


def message_chain(messages: Iterable[Message], start: Link = b"") -> list[Link]:
    """A hash for each message, over it and all before it; ``start`` continues an earlier chain."""
    links, link = [], start
    for message in messages:
        link = hashlib.blake2b(link + _canonical(message), digest_size=16).digest()
        links.append(link)
    return links


def beyond_first_user(messages: Sequence[Message], links: Sequence[Link]) -> Sequence[Link]:
    """The links that tell sessions apart: those after the first user message, with which many sessions begin."""
    first = next((i for i, message in enumerate(messages) if message.role == "user"), len(messages))
    return links[first + 1 :]


def _canonical(message: Message) -> bytes:
    """One spelling of what clients send back in several: null or empty content, spaces in arguments, new call ids."""
    role = "system" if message.role == "developer" else message.role
    calls = [(call.name, _canonical_json(call.arguments)) for call in message.tool_calls]
    return msgspec.json.encode((role, message.name, (message.content or "").strip(), calls))


def _canonical_json(text: str) -> str:
    try:
        return msgspec.json.encode(msgspec.json.decode(text), order="sorted").decode()
    except (msgspec.MsgspecError, RecursionError):
        return text


class _Session:
    def __init__(self) -> None:
        self.last_used = 0.0
        self.links: deque[Link] = deque()


class Sessions:
    """Bounded memory of sessions, per tenant; the idle are forgotten, and beyond ``limit`` the least recently used.

    A session is known by links of its message chain: those at the end of each request and of each answer to it.
    """

    def __init__(self, idle_seconds: float, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._idle_seconds = idle_seconds
        self._limit = limit
        self._clock = clock
        self._sessions: OrderedDict[tuple[str, str], _Session] = OrderedDict()
        self._by_link: dict[tuple[str, Link], str] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, tenant: str, links: Sequence[Link]) -> str | None:
        """The session that shares the longest prefix with a request's ``links``."""
        self._forget_idle()
        return next((id_ for link in reversed(links) if (id_ := self._by_link.get((tenant, link)))), None)

    def remember(self, tenant: str, session_id: str, links: Iterable[Link]) -> None:
        """Note that the session was used now, and that ``links`` are its."""
        self._forget_idle()
        session = self._sessions.setdefault((tenant, session_id), _Session())
        session.last_used = self._clock()
        self._sessions.move_to_end((tenant, session_id))
        for link in links:
            if self._by_link.get((tenant, link)) != session_id:
                self._by_link[tenant, link] = session_id
                session.links.append(link)
        while len(session.links) > _LINKS_PER_SESSION:
            self._unlink(tenant, session_id, session.links.popleft())
        while len(self._sessions) > self._limit:
            self._forget_oldest()

    def _forget_idle(self) -> None:
        horizon = self._clock() - self._idle_seconds
        while self._sessions and next(iter(self._sessions.values())).last_used < horizon:
            self._forget_oldest()

    def _forget_oldest(self) -> None:
        (tenant, session_id), session = self._sessions.popitem(last=False)
        for link in session.links:
            self._unlink(tenant, session_id, link)

    def _unlink(self, tenant: str, session_id: str, link: Link) -> None:
        if self._by_link.get((tenant, link)) == session_id:
            del self._by_link[tenant, link]


def new_session_id() -> str:
    return f"ses-{uuid.uuid4().hex}"
