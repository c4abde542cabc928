"""The embedded engine's process: loads the target, then serves clients on a Unix socket.

The main thread runs the engine; a second thread does all input and output, so that a slow client or a long pass never
hold each other up. Health and capabilities are answered by the second thread from what the first last published.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue

import msgspec
import torch

from redraft.engine.chat.grammar import GrammarCompiler
from redraft.engine.chat.tokenizer import Tokenizer
from redraft.engine.checkpoints import resolve, served_name
from redraft.engine.checkpoints.checkpoint import validate
from redraft.engine.checkpoints.errors import CheckpointError
from redraft.engine.checkpoints.identity import identity
from redraft.engine.config import EngineConfig
from redraft.engine.drafters.base import Drafter
from redraft.engine.drafters.loading import check, find, load_drafter, load_version
from redraft.engine.embedded import wire
from redraft.engine.embedded.cache import PAGE
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.costs import CostMeter
from redraft.engine.embedded.model import Target
from redraft.engine.embedded.selftest import rows_are_invariant
from redraft.engine.embedded.threads import ThreadGovernor, usable_cores
from redraft.engine.policy.fixed import FixedLength
from redraft.engine.protocol import EngineError, EngineOverloaded, EngineUnavailable, RequestRefused
from redraft.engine.types import Capabilities, Commit, DrafterVersion, GenerationRequest, Health

logger = logging.getLogger(__name__)

PARAMETERS = frozenset(
    {
        *("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
        *("logit_bias", "seed", "n", "max_tokens", "stop", "stop_token_ids", "ignore_eos"),
    }
)

MAX_UNREAD_BYTES = 16 << 20
"""A client that leaves this much unread is cut off."""


@dataclass(slots=True, eq=False)
class Connection:
    writer: asyncio.StreamWriter
    requests: set[str] = field(default_factory=set)

    def send(self, data: bytes) -> None:
        """Called on the input/output thread."""
        if self.writer.is_closing():
            return
        self.writer.write(data)
        if self.writer.transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self.writer.transport.abort()


@dataclass(frozen=True, slots=True)
class Closed:
    """A client went away."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """What became of a call to load a drafter: the drafter, or what is wrong with it."""

    call: int
    drafter: Drafter | str


Inbox = SimpleQueue[tuple[Connection, wire.ToEngine | Closed | Loaded] | None]

Registered = Callable[[str], tuple[DrafterVersion, Path] | None]
"""The version and folder of the drafter that is to serve a target, by its identity; None if none is registered."""


def nothing_registered(identity: str) -> None:
    """No registry: ``engine.drafter`` says who drafts."""


def build_core(config: EngineConfig, serving: Registered = nothing_registered) -> tuple[EngineCore, Capabilities]:
    """Load the target and everything around it; raises `EngineUnavailable` or `CheckpointError` in words."""
    folder = resolve(config.model)
    model = validate(folder)
    context = min(config.context_length or model.context_length, model.context_length)
    target_identity = identity(folder)
    drafter_folder = find(config.drafter, target_identity)
    if drafter_folder is not None:
        check(drafter_folder, model, target_identity, context)
    device = _device(config)
    torch.set_num_threads(_threads(config))
    dtype = torch.bfloat16
    lossless = config.lossless
    target = Target(folder, model, device=device, dtype=dtype, invariant=lossless != "tolerant")
    if lossless != "tolerant" and not rows_are_invariant(target):
        if lossless == "invariant":
            raise EngineUnavailable(
                "the self-test found rows whose bits depend on their batch on this machine; "
                "set engine.lossless to tolerant or auto"
            )
        target = Target(folder, model, device=device, dtype=dtype, invariant=False)
        lossless = "tolerant"
    slots = config.kv_bytes // target.kv_bytes_per_token // PAGE * PAGE
    if slots < PAGE:
        raise EngineUnavailable(
            f"engine.kv_bytes is {config.kv_bytes}, room for fewer than {PAGE} tokens; "
            f"one token takes {target.kv_bytes_per_token} bytes"
        )
    tokenizer = Tokenizer.from_folder(folder)
    grammars = _grammars(tokenizer, model.vocab)
    registered = _outcome(
        lambda: (
            None
            if (found := serving(target_identity)) is None
            else load_version(*found, target, target_identity, slots, context)
        )
    )
    fault = ""
    if isinstance(registered, str):
        fault, registered = f"the registered drafter should serve, but cannot: {registered}", None
    drafter = registered or load_drafter(config.drafter, target, target_identity, slots, context)
    if fault:
        instead = f"{drafter.version.kind} {drafter.version.id}" if drafter else "no drafter"
        fault = f"{fault.rstrip('.')}. Until a version is promoted, or the engine starts again, {instead} serves"
        logger.error(fault)
    core = EngineCore(
        target,
        target.new_kv(slots),
        identity=target_identity,
        tokenizer=tokenizer,
        grammars=grammars,
        context_length=context,
        drafter=drafter,
        policy=FixedLength(config.block_size),
        block_size=config.block_size,
        max_running=config.max_running,
        max_waiting=config.max_waiting,
    )
    core.versions.fault = fault
    capabilities = Capabilities(
        target=target_identity,
        model_name=served_name(config.model),
        context_length=context,
        vocab_size=model.vocab,
        max_prompt_tokens=core.max_tokens_per_request - 1,
        lossless="tolerant" if lossless == "tolerant" else "invariant",
        parameters=PARAMETERS,
        constrained_decoding=grammars is not None,
        logprobs=True,
        hot_swap=True,
        telemetry=True,
        draft_prob=True,
    )
    return core, capabilities


def _grammars(tokenizer: Tokenizer, vocab_size: int) -> GrammarCompiler | None:
    try:
        return GrammarCompiler(tokenizer, vocab_size)
    except ValueError as error:
        logger.warning("constrained answers are off, for this tokenizer cannot be constrained: %s", error)
        return None


def _threads(config: EngineConfig) -> int:
    return config.threads or usable_cores()


def _device(config: EngineConfig) -> torch.device:
    if config.device == "cuda" and not torch.cuda.is_available():
        raise EngineUnavailable("engine.device is cuda, but this torch sees no CUDA device; set it to cpu or auto")
    cuda = config.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


class EngineServer:
    """Moves messages between the core's thread and the clients' thread."""

    def __init__(self, core: EngineCore, capabilities: Capabilities, socket: Path, threads: ThreadGovernor) -> None:
        self._core = core
        self._threads = threads
        self._capabilities = capabilities
        self._socket = socket
        self._inbox: Inbox = SimpleQueue()
        self._owners: dict[str, Connection] = {}
        self._costs = CostMeter(core)
        while self._costs.advance():
            threads.update()
        self._table = self._costs.table
        self._loading = threading.Lock()
        self._behind = True
        self._health = self._measure()
        self._io = asyncio.new_event_loop()

    def run(self) -> None:
        """Serve until SIGTERM or SIGINT; running requests are cut. Raises `OSError` if the socket cannot be bound."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._inbox.put(None))
        server = self._io.run_until_complete(self._listen())
        thread = threading.Thread(target=self._serve, args=(server,), daemon=True)
        thread.start()
        while self._take_messages():
            self._threads.update()
            if self._busy:
                self._step()
            else:
                self._catch_up()
        self._io.call_soon_threadsafe(self._io.stop)
        thread.join()
        self._socket.unlink(missing_ok=True)

    @property
    def _busy(self) -> bool:
        return bool(self._core.running or self._core.waiting)

    def _step(self) -> None:
        commits = self._core.step()
        self._behind = True
        self._health = self._measure()
        self._send(commits)
        self._forget_finished()

    def _catch_up(self) -> None:
        """One piece of what waits until there is nothing to run."""
        self._behind = self._core.rematerialise() or self._costs.advance()
        self._table = self._costs.table

    def _take_messages(self) -> bool:
        """Handle what has arrived, waiting while there is nothing to do; False to stop."""
        while True:
            try:
                item = self._inbox.get(block=not (self._busy or self._behind))
            except Empty:
                return True
            if item is None:
                return False
            self._handle(*item)

    def _handle(self, connection: Connection, message: wire.ToEngine | Closed | Loaded) -> None:
        match message:
            case wire.Submit(request):
                self._submit(connection, request)
            case wire.Abort(request_id):
                self._send(self._core.abort(request_id))
            case Closed():
                for request_id in connection.requests:
                    self._core.abort(request_id)
            case wire.LoadDrafter(call, version) if version in self._core.versions.loaded:
                self._post(connection, wire.Reply(call))
            case wire.LoadDrafter():
                threading.Thread(target=self._load, args=(connection, message), daemon=True).start()
            case Loaded(call, drafter):
                self._add(drafter)
                self._post(connection, wire.Reply(call, error=drafter if isinstance(drafter, str) else None))
            case wire.Activate(call, pointer):
                error = self._change(lambda: self._core.activate(pointer))
                self._post(connection, wire.Reply(call, error=error))
            case wire.SetSpeculation(call, scope, on):
                error = self._change(lambda: self._core.set_speculation(scope, on))
                self._post(connection, wire.Reply(call, error=error))
        self._forget_finished()
        self._health = self._measure()

    def _change(self, change: Callable[[], None]) -> str | None:
        """Why it was refused, if it was; else in force, and to be seen in the health."""
        try:
            change()
        except RequestRefused as error:
            return str(error)
        self._behind = True
        self._health = self._measure()
        return None

    def _load(self, connection: Connection, message: wire.LoadDrafter) -> None:
        """Load a drafter, one at a time, on a thread of its own; torch's count of threads is each thread's own."""
        torch.set_num_threads(1)
        with self._loading:
            outcome = _outcome(lambda: self._core.load_drafter(message.version, Path(message.path)))
        assert outcome is not None
        self._inbox.put((connection, Loaded(message.call, outcome)))

    def _add(self, drafter: Drafter | str) -> None:
        if not isinstance(drafter, str):
            self._core.versions.add(drafter)
            self._behind = True

    def _send(self, commits: Iterable[Commit]) -> None:
        by_connection: dict[Connection, list[Commit]] = {}
        for commit in commits:
            by_connection.setdefault(self._owners[commit.request_id], []).append(commit)
        for connection, group in by_connection.items():
            self._post(connection, wire.Commits(tuple(group)))

    def _submit(self, connection: Connection, request: GenerationRequest) -> None:
        try:
            self._core.submit(request)
        except EngineError as error:
            refused = wire.Refused(
                request.request_id,
                str(error),
                error.param if isinstance(error, RequestRefused) else None,
                isinstance(error, EngineOverloaded),
            )
            self._post(connection, refused)
        else:
            self._owners[request.request_id] = connection
            connection.requests.add(request.request_id)

    def _forget_finished(self) -> None:
        for request_id in self._owners.keys() - self._core.request_ids:
            self._owners.pop(request_id).requests.discard(request_id)

    def _measure(self) -> Health:
        core = self._core
        slot_bytes = core.kv_bytes_per_slot
        return Health(
            ready=True,
            detail=core.versions.fault,
            running=len(core.running),
            waiting=len(core.waiting),
            kv_used_bytes=core.cache.used_slots * slot_bytes,
            kv_budget_bytes=core.cache.slots * slot_bytes,
            drafter=core.drafter.version if core.drafter else None,
            token=core.versions.token,
            speculation=core.speculating,
        )

    def _post(self, connection: Connection, message: wire.FromEngine) -> None:
        self._io.call_soon_threadsafe(connection.send, wire.encode(message))

    async def _listen(self) -> asyncio.Server:
        """Bind the socket in place of one that nobody removed; anything else at its path is an error."""
        self._socket.parent.mkdir(parents=True, exist_ok=True)
        server = await asyncio.start_unix_server(self._client, path=str(self._socket))
        self._socket.chmod(0o600)
        return server

    def _serve(self, server: asyncio.Server) -> None:
        asyncio.set_event_loop(self._io)
        self._io.run_forever()
        server.close()
        for task in asyncio.all_tasks(self._io):
            task.cancel()
        self._io.run_until_complete(asyncio.sleep(0))
        self._io.close()

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection(writer)
        decoder = msgspec.msgpack.Decoder(wire.ToEngine)
        try:
            while True:
                message = decoder.decode(await wire.read_frame(reader))
                match message:
                    case wire.GetHealth(call):
                        connection.send(wire.encode(wire.Reply(call, self._health)))
                    case wire.GetCapabilities(call):
                        connection.send(wire.encode(wire.Reply(call, self._capabilities)))
                    case wire.GetCosts(call):
                        connection.send(wire.encode(wire.Reply(call, self._table)))
                    case _:
                        self._inbox.put((connection, message))
        except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
            pass
        finally:
            self._inbox.put((connection, Closed()))
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


def _outcome(load: Callable[[], Drafter | None]) -> Drafter | str | None:
    """What ``load`` gives, or in words why it gives nothing; what nobody foresaw is logged in full."""
    try:
        return load()
    except CheckpointError as error:
        return str(error)
    except Exception as error:
        logger.exception("a drafter could not be loaded")
        return f"{type(error).__name__}: {error}"


def main(config: EngineConfig, socket: Path, serving: Registered = nothing_registered) -> None:
    """Load and serve; raises `EngineUnavailable` or `CheckpointError` with what is wrong and what to do.

    A registered drafter that cannot serve ends nothing: the log and the health say so, and ``engine.drafter`` serves.
    """
    core, capabilities = build_core(config, serving)
    EngineServer(core, capabilities, socket, ThreadGovernor(_threads(config))).run()
