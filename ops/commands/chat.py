"""Talking to a running deployment."""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Iterator
from typing import Annotated, Any

import httpx
import typer

from redraft.ops.commands.options import ConfigPath, running_state
from redraft.ops.errors import CliError


def chat(
    config: ConfigPath = None,
    once: Annotated[str | None, typer.Option(metavar="TEXT", help="Ask one thing, print the answer, leave.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message.")] = None,
    temperature: Annotated[float | None, typer.Option(min=0, help="0 is greedy.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer.")] = None,
) -> None:
    """Talk to the running deployment; answers stream. Ctrl-C stops an answer, /new starts over, Ctrl-D leaves."""
    url = running_state(config).url
    limits = {"temperature": temperature, "max_tokens": max_tokens}
    settings = {name: value for name, value in limits.items() if value is not None}
    opening = [{"role": "system", "content": system}] if system else []
    with httpx.Client(base_url=url, timeout=httpx.Timeout(10, read=None), trust_env=False) as client:
        model = _get_model(client)
        if once is not None:
            _ask(client, {"model": model, "messages": [*opening, {"role": "user", "content": once}], **settings})
            return
        print(f"{model} at {url}; /new starts over, Ctrl-D leaves", file=sys.stderr)
        conversation: list[dict[str, str]] = list(opening)
        session = uuid.uuid4().hex
        while (text := _read_line()) not in (None, "/quit"):
            if text == "/new":
                conversation, session = list(opening), uuid.uuid4().hex
                continue
            turn = [*conversation, {"role": "user", "content": text}]
            try:
                answer = _ask(client, {"model": model, "messages": turn, **settings}, session)
            except KeyboardInterrupt:
                print("(stopped)", file=sys.stderr)
            except CliError as error:
                print(f"error: {error}", file=sys.stderr)
            else:
                conversation = [*turn, {"role": "assistant", "content": answer}]


def _read_line() -> str | None:
    """A line that is not blank; None at the end of input."""
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        while not (text := input(prompt).strip()):
            pass
    except EOFError:
        return None
    return text


def _get_model(client: httpx.Client) -> str:
    try:
        response = client.get("/v1/models")
        if response.is_error:
            raise CliError(_message(response))
        return str(response.json()["data"][0]["id"])
    except httpx.HTTPError as error:
        raise CliError(f"{client.base_url} does not answer: {error}; look at: redraft status") from None


def _ask(client: httpx.Client, body: dict[str, Any], session: str | None = None) -> str:
    """Print an answer as it streams, and return it whole."""
    headers = {"X-Redraft-Session": session} if session else {}
    answer = []
    try:
        with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}, headers=headers) as response:
            if response.is_error:
                response.read()
                raise CliError(_message(response))
            for event in _events(response):
                if "error" in event:
                    raise CliError(event["error"]["message"])
                for choice in event["choices"]:
                    piece = choice["delta"].get("content") or ""
                    answer.append(piece)
                    print(piece, end="", flush=True)
    except httpx.HTTPError as error:
        raise CliError(f"the connection broke: {error or type(error).__name__}; look at: redraft status") from None
    finally:
        if answer:
            print()
    return "".join(answer)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in response.iter_lines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def _message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return f"{response.request.url} answered {response.status_code}"
