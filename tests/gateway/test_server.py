"""The server takes its address or says why not, and lets running answers end when it is stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from redraft.gateway.server import AddressUnavailable, bind

pytestmark = pytest.mark.unit


def test_a_taken_port_is_named_with_what_to_do() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(AddressUnavailable, match=rf"Port {port} on 127\.0\.0\.1 is already in use.*gateway\.port"):
            bind("127.0.0.1", port)


def test_a_host_that_is_not_ours_is_named() -> None:
    for host in ("no.such.host.invalid", "192.0.2.1", "x" * 70):
        with pytest.raises(AddressUnavailable, match=r"gateway\.host"):
            bind(host, 0)


def test_a_port_can_be_taken_again_right_after_its_server_ended() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server_side, _ = first.accept()
        server_side.close()
    client.close()
    bind("127.0.0.1", port).close()


def test_a_running_answer_ends_before_the_server_does(serve: Any) -> None:
    gateway = serve()
    engine = gateway.engine
    going = threading.Event()

    def script(request: Any) -> Any:
        yield engine.commit(engine.ids("Hello "))
        engine.hanging.set()
        while not going.is_set():
            yield engine.commit(())
        yield from engine.answer("there.")

    engine.script = script
    with httpx.stream(
        "POST", f"http://127.0.0.1:{gateway.port}/v1/chat/completions", json=gateway.body(stream=True), trust_env=False
    ) as response:
        assert engine.hanging.wait(10)
        gateway.server.should_exit = True
        going.set()
        text = response.read().decode()
    assert "there." in text
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_an_answer_that_does_not_end_in_time_is_told_so(
    serve: Any, hang: object, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redraft.gateway.server.GRACEFUL_SECONDS", 0.05)
    gateway = serve()
    engine = gateway.engine
    engine.script = lambda request: [engine.commit(engine.ids("Hello ")), hang]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(gateway.post, stream=stream)
        assert engine.hanging.wait(10)
        gateway.server.should_exit = True
        response = answer.result(20)
    assert "shutting_down" in response.text
    assert "[DONE]" not in response.text
    assert response.status_code == (200 if stream else 503)
    assert engine.closed.is_set()


def test_the_engine_is_closed_when_the_server_stops(serve: Any) -> None:
    gateway = serve()
    gateway.server.should_exit = True
    gateway.thread.join(20)
    assert gateway.engine.shut


SCRIPT = """
from fastapi import FastAPI
from redraft.gateway.server import bind, serve
sock = bind("127.0.0.1", 0)
print(sock.getsockname()[1], flush=True)
serve(FastAPI(), sock)
print("ended", flush=True)
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_without_a_traceback(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SCRIPT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = int(process.stdout.readline())
            assert httpx.get(f"http://127.0.0.1:{port}/", trust_env=False).status_code == 404
            os.kill(process.pid, number)
            out, err = process.communicate(timeout=20)
        finally:
            process.kill()
    assert "Traceback" not in err
    assert process.returncode in (0, -number)
    assert number == signal.SIGTERM or out == "ended\n"
