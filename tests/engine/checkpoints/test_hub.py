"""Models from a hub: what can be served is fetched whole; what cannot is refused before its weights are."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration
MakeCheckpoint = Callable[..., Path]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Answers as the hub's API does, out of folders; notes which files were asked for."""

    def __init__(self) -> None:
        self.models: dict[str, Path] = {}
        self.gated: set[str] = set()
        self.fetched: list[str] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args: object) -> None:
                pass

            def do_HEAD(self) -> None:
                self.do_GET()

            def do_GET(self) -> None:
                path = self.path.partition("?")[0].strip("/").removeprefix("api/models/")
                model = "/".join(path.split("/")[:2])
                if model not in hub.models:
                    self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
                elif "/resolve/" not in path:
                    self.answer(200, hub.listing(model, tree="/tree/" in path))
                elif model in hub.gated:
                    self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
                else:
                    self.send_file(hub.models[model], path.split("/", 4)[4])

            def send_file(self, folder: Path, name: str) -> None:
                content = (folder / name).read_bytes()
                if self.command == "GET":
                    hub.fetched.append(name)
                etag = hashlib.sha256(content).hexdigest()
                self.answer(200, content, {"X-Repo-Commit": COMMIT, "ETag": f'"{etag}"'})

            def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
                self.send_response(status)
                for name, value in ({"Content-Length": str(len(content))} | (headers or {})).items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def listing(self, model: str, tree: bool) -> bytes:
        files = [(path.name, path.stat().st_size) for path in sorted(self.models[model].iterdir())]
        if tree:
            oid = "0" * 40
            return json.dumps([{"type": "file", "path": n, "size": s, "oid": oid} for n, s in files]).encode()
        siblings = [{"rfilename": name, "size": size} for name, size in files]
        return json.dumps({"id": model, "sha": COMMIT, "siblings": siblings}).encode()


@pytest.fixture
def hub() -> Iterator[Hub]:
    hub = Hub()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


@pytest.fixture
def call(hub: Hub, tmp_path: Path) -> Callable[..., str]:
    """Runs ``pull`` or ``resolve`` in a process that sees this hub and an empty cache; returns folder or error."""

    def run(function: str, model: str, **environment: str) -> str:
        script = """
            import sys
            from redraft.engine import checkpoints

            try:
                print(getattr(checkpoints, sys.argv[1])(sys.argv[2]))
            except checkpoints.CheckpointError as error:
                print(type(error).__name__, error)
        """
        kept = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(script), function, model],
            env=kept | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0"} | environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    return run


def test_a_model_is_fetched_whole_then_found_without_the_hub(
    hub: Hub, call: Callable[..., str], make_checkpoint: MakeCheckpoint
) -> None:
    source = hub.models["org/model"] = make_checkpoint(shards=2)
    (source / "README.md").write_text("not needed")
    (source / "pytorch_model.bin").write_text("not wanted")
    assert "ModelNotFoundError" in call("resolve", "org/model")
    assert "redraft models pull org/model" in call("resolve", "org/model")
    folder = Path(call("pull", "org/model"))
    wanted = {path.name for path in source.iterdir()} - {"README.md", "pytorch_model.bin"}
    assert {path.name for path in folder.iterdir()} == wanted
    for name in wanted:
        assert (folder / name).read_bytes() == (source / name).read_bytes()
    fetched = len(hub.fetched)
    assert call("pull", "org/model") == call("resolve", "org/model", HF_HUB_OFFLINE="1") == str(folder)
    assert len(hub.fetched) == fetched


def test_a_download_that_broke_off_is_completed(
    hub: Hub, call: Callable[..., str], make_checkpoint: MakeCheckpoint
) -> None:
    hub.models["org/model"] = make_checkpoint(shards=2)
    folder = Path(call("pull", "org/model"))
    (folder / "model-00002-of-00002.safetensors").unlink()
    said = call("resolve", "org/model")
    assert "Error" in said
    assert "redraft models pull org/model" in said
    assert call("pull", "org/model") == call("resolve", "org/model") == str(folder)


@pytest.mark.parametrize("wrong", [{"architectures": ["MambaForCausalLM"]}, {"attention_bias": True}])
def test_an_unsupported_model_is_refused_before_its_weights_are_fetched(
    hub: Hub, call: Callable[..., str], make_checkpoint: MakeCheckpoint, wrong: dict[str, object]
) -> None:
    hub.models["org/model"] = make_checkpoint(wrong)
    assert "not supported" in call("pull", "org/model")
    assert hub.fetched
    assert not any(name.endswith(".safetensors") for name in hub.fetched)


def test_pickled_weights_are_refused_before_anything_is_fetched(
    hub: Hub, call: Callable[..., str], make_checkpoint: MakeCheckpoint
) -> None:
    folder = hub.models["org/model"] = make_checkpoint()
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no model*.safetensors" in call("pull", "org/model")
    assert not hub.fetched


def test_an_unknown_model_is_said_to_be_unknown(call: Callable[..., str]) -> None:
    assert call("pull", "org/nothing").startswith("PullError The hub has no model org/nothing")


def test_a_gated_model_is_answered_with_what_to_do(
    hub: Hub, call: Callable[..., str], make_checkpoint: MakeCheckpoint
) -> None:
    hub.models["org/model"] = make_checkpoint()
    hub.gated.add("org/model")
    assert "org/model is gated: accept its licence" in call("pull", "org/model")


def test_an_unreachable_hub_is_named(call: Callable[..., str]) -> None:
    said = call("pull", "org/model", HF_ENDPOINT="http://127.0.0.1:9")
    assert said.startswith("PullError org/model could not be fetched from http://127.0.0.1:9")
    assert "Check the network" in said


def test_what_cannot_be_a_hub_id_is_refused(call: Callable[..., str]) -> None:
    assert call("pull", "org/bad--name").startswith("CheckpointError 'org/bad--name' is not a Hugging Face id")
    assert call("pull", "a/b/c").startswith("ModelNotFoundError")
