"""Making training data: prompts from the sources, and the target's own responses to them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import httpx
import msgspec

from redraft.engine.protocol import Engine
from redraft.engine.types import GREEDY, FinishReason, GenerationRequest, SamplingParams, StopConditions, is_looping
from redraft.retrain.data import store
from redraft.retrain.data.conversation import Source
from redraft.retrain.data.errors import DataError
from redraft.retrain.data.prompts import Prompt
from redraft.retrain.data.responses import Response

MAX_TOKENS = 320
TEMPERATURE, TOP_P = 0.7, 0.95
ATTEMPTS = 5

Answer = tuple[tuple[int, ...], FinishReason]


class Responder(Protocol):
    """Whoever answers prompts; ``concurrency`` is how many at once."""

    concurrency: int

    async def respond(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, max_tokens: int) -> Answer: ...


class EngineResponder:
    """Any engine behind Redraft's own protocol."""

    def __init__(self, engine: Engine, concurrency: int = 8) -> None:
        self.concurrency = concurrency
        self._engine = engine
        self._requests = 0

    async def respond(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, max_tokens: int) -> Answer:
        self._requests += 1
        request = GenerationRequest(
            request_id=f"data-{self._requests}",
            prompt_ids=prompt_ids,
            stopping=StopConditions(max_tokens=max_tokens),
            sampling=sampling,
        )
        ids: list[int] = []
        reason: FinishReason | None = None
        async for commit in self._engine.generate(request):
            ids += commit.token_ids
            reason = commit.finish_reason or reason
        return tuple(ids), reason or "abort"


class SglangResponder:
    """An SGLang server's `/generate` (as of 0.5.17); close it after use.

    Every request at a time has a client of its own: one pool would search its connections for each request, and with
    hundreds of them that takes longer than the answer.
    """

    def __init__(self, url: str, concurrency: int = 512) -> None:
        if not _is_server(url):
            raise DataError(f"{url!r} is not the URL of a server, such as http://127.0.0.1:30000")
        self.concurrency = concurrency
        self._url = url.rstrip("/")
        certificates = httpx.create_ssl_context()
        self._clients = [
            httpx.AsyncClient(base_url=self._url, timeout=httpx.Timeout(None, connect=10), verify=certificates)
            for _ in range(concurrency)
        ]
        self._idle = list(self._clients)

    async def respond(self, prompt_ids: tuple[int, ...], sampling: SamplingParams, max_tokens: int) -> Answer:
        parameters: dict[str, Any] = {"temperature": sampling.temperature, "max_new_tokens": max_tokens}
        if sampling.mode == "sampled":
            parameters |= {"top_p": sampling.top_p, "sampling_seed": sampling.seed}
        client = self._idle.pop()
        try:
            response = await _post(client, {"input_ids": prompt_ids, "sampling_params": parameters})
            response.raise_for_status()
            body = response.json()
            ids = list(body["output_ids"])
            finish = body["meta_info"]["finish_reason"]
            reason: FinishReason = finish["type"] if finish["type"] in ("stop", "length") else "abort"
        except httpx.HTTPStatusError as error:
            raise DataError(
                f"{self._url} refused a prompt: {error.response.status_code} {error.response.text[:200]}"
            ) from error
        except httpx.HTTPError as error:
            raise DataError(f"{self._url} does not answer ({type(error).__name__}: {error})") from error
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._url} does not answer as SGLang 0.5.17 does: {response.text[:200]}") from error
        finally:
            self._idle.append(client)
        end = finish.get("matched")
        if reason == "stop" and isinstance(end, int) and ids[-1:] != [end]:
            ids.append(end)
        return tuple(ids), reason

    async def close(self) -> None:
        for client in self._clients:
            await client.aclose()


def _is_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


async def _post(client: httpx.AsyncClient, body: dict[str, Any]) -> httpx.Response:
    """Ask again where a connection broke: a busy server closes idle ones just as they are taken up."""
    for _ in range(ATTEMPTS - 1):
        try:
            return await client.post("/generate", json=body)
        except (httpx.ReadError, httpx.RemoteProtocolError):
            continue
    return await client.post("/generate", json=body)


def samplings(prompt: str, sampled: int) -> list[SamplingParams]:
    """How a prompt is answered: greedily, and ``sampled`` times at random with seeds of its own."""
    seeds = (hashlib.sha256(f"{prompt}\0{number}".encode()).digest()[:4] for number in range(sampled))
    return [
        GREEDY,
        *(
            SamplingParams(temperature=TEMPERATURE, top_p=TOP_P, seed=int.from_bytes(seed) & 0x7FFFFFFF)
            for seed in seeds
        ),
    ]


async def respond_to_all(
    folder: Path,
    responder: Responder,
    *,
    target: str,
    sampled: int = 3,
    sources: Collection[Source] = (),
    max_tokens: int = MAX_TOKENS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> store.Manifest:
    """Answer every prompt of a folder that has no answer yet; ``progress`` hears of answers there and wanted.

    ``sources`` asks for theirs alone, ``sampled`` of them a prompt beside what the whole folder is to hold.
    What was answered is kept when this is cancelled or fails, and a second call goes on from there. ``target`` is the
    identity of the model that answers; a folder holds the answers of one.
    """
    manifest = store.load_manifest(folder)
    if manifest.target not in (None, target):
        raise DataError(f"{folder} holds answers of another model ({manifest.target}); use a new folder")
    if manifest.max_tokens not in (None, max_tokens):
        raise DataError(f"{folder} holds answers of up to {manifest.max_tokens} tokens, not {max_tokens}")
    if sampled < (manifest.sampled or 0):
        raise DataError(f"{folder} is to hold {manifest.sampled} sampled answers a prompt, not {sampled}")
    unknown = set(sources) - set(manifest.sources)
    if unknown:
        raise DataError(f"{folder} holds the sources {', '.join(manifest.sources)}, not {', '.join(sorted(unknown))}")
    chosen = frozenset(sources or manifest.sources)
    everywhere = sampled if chosen == set(manifest.sources) else manifest.sampled
    manifest = msgspec.structs.replace(manifest, target=target, max_tokens=max_tokens, sampled=everywhere)
    writer = store.ResponseWriter(folder)
    store.save_manifest(folder, manifest)
    there = {response.key for response in store.load_responses(folder)}
    wanted = [
        (prompt.id, sampling)
        for prompt in store.load_prompts(folder)
        if prompt.source in chosen
        for sampling in samplings(prompt.id, sampled)
    ]
    total = len(wanted)
    done = sum(key in there for key in wanted)

    def unanswered() -> Iterator[tuple[Prompt, SamplingParams]]:
        for prompt in store.load_prompts(folder):
            for sampling in samplings(prompt.id, sampled) if prompt.source in chosen else ():
                if (prompt.id, sampling) not in there:
                    yield prompt, sampling

    todo = unanswered()

    async def work() -> None:
        nonlocal done
        for prompt, sampling in todo:
            ids, reason = await responder.respond(prompt.ids, sampling, max_tokens)
            if reason == "abort":
                raise DataError(f"the engine gave up on prompt {prompt.id}")
            writer.add(Response(prompt.id, sampling, ids, reason, is_looping(ids)))
            done += 1
            progress(done, total)

    progress(done, total)
    workers = [asyncio.create_task(work()) for _ in range(responder.concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        writer.close()
        manifest = _counted(folder, manifest)
    return manifest


def make_prompts(
    folder: Path, model_folder: Path, *, model: str, sources: Sequence[Source], command: str, commit: str | None
) -> store.Manifest:
    """Write a folder's conversations and prompts, rendered as ``model_folder``'s target is served."""
    from redraft.engine.chat.encoding import ChatEncoder
    from redraft.retrain.data.prompts import Prompts
    from redraft.retrain.data.sources import SOURCES

    if (folder / "prompts.jsonl.xz").exists():
        raise DataError(f"{folder} holds prompts already; use a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    encoder = ChatEncoder.from_folder(model_folder)
    conversations = [conversation for source in sources for conversation in SOURCES[source]()]
    prompts = Prompts(encoder, conversations)
    counted = store.save_prompts(folder, conversations, prompts)
    counts: dict[str, dict[str, int]] = {}
    for name, count in sorted(counted.items()):
        source, slash, split = name.partition("/")
        if slash:
            counts.setdefault(source, {})[split] = count
    return store.save_manifest(
        folder,
        store.Manifest(
            command=command,
            commit=commit,
            model=model,
            chat=chat_hash(model_folder),
            sources=tuple(sources),
            sessions=counted["sessions"],
            sessions_cut=prompts.cut,
            prompts_repeated=prompts.repeated,
            prompts=counted["prompts"],
            prompt_tokens=counted["tokens"],
            counts=counts,
        ),
    )


def chat_hash(model_folder: Path) -> str:
    """SHA-256, in hex, over a checkpoint's tokenizer and chat template: what prompts depend on."""
    from redraft.engine.checkpoints.checkpoint import chat_template

    tokenizer = hashlib.sha256((model_folder / "tokenizer.json").read_bytes()).digest()
    template = hashlib.sha256((chat_template(model_folder) or "").encode()).digest()
    return hashlib.sha256(tokenizer + template).hexdigest()


def _counted(folder: Path, manifest: store.Manifest) -> store.Manifest:
    responses = tokens = looping = 0
    for response in store.load_responses(folder):
        responses += 1
        tokens += len(response.token_ids)
        looping += response.looping
    if not responses:
        manifest = msgspec.structs.replace(manifest, target=None, max_tokens=None, sampled=None)
    return store.save_manifest(
        folder,
        msgspec.structs.replace(
            manifest,
            responses=responses,
            response_tokens=tokens,
            looping_share=round(looping / responses, 4) if responses else None,
        ),
    )
