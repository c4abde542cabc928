"""A checkpoint's identity: what a drafter belongs to."""

from __future__ import annotations

import hashlib
import json
import mmap
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

from redraft.engine.checkpoints.bf16 import to_bf16
from redraft.engine.checkpoints.checkpoint import chat_template, expected_shapes, open_tensors, validate
from redraft.engine.checkpoints.safetensors_file import TensorEntry

_CHUNK_BYTES = 1 << 24


def identity(folder: Path) -> str:
    """SHA-256, in hex, over the tensors' names, shapes and bf16 bytes, the tokenizer and the chat template.

    Not over files: a sharded copy equals a single file, fp32 and fp16 weights count as the bf16 they are served in,
    and a tied head counts once.
    """
    names = sorted(expected_shapes(validate(folder)))
    tensors = open_tensors(folder)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        maps: dict[Path, mmap.mmap] = {}
        for file in sorted({tensors[name].file for name in names}):
            stream = stack.enter_context(file.open("rb"))
            maps[file] = stack.enter_context(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        digests = list(pool.map(lambda name: _tensor_digest(maps[tensors[name].file], tensors[name]), names))
    total = hashlib.sha256()
    for name, digest in zip(names, digests, strict=True):
        total.update(json.dumps([name, *tensors[name].shape]).encode() + b"\0" + digest)
    total.update(hashlib.sha256((folder / "tokenizer.json").read_bytes()).digest())
    total.update(hashlib.sha256((chat_template(folder) or "").encode()).digest())
    return total.hexdigest()


def _tensor_digest(data: mmap.mmap, entry: TensorEntry) -> bytes:
    digest = hashlib.sha256()
    with memoryview(data) as whole:
        for start in range(entry.start, entry.stop, _CHUNK_BYTES):
            with whole[start : min(start + _CHUNK_BYTES, entry.stop)] as chunk:
                digest.update(chunk if entry.dtype == "BF16" else _rounded(chunk, entry.dtype))
    return digest.digest()


def _rounded(chunk: memoryview, dtype: str) -> memoryview:
    import numpy as np

    values = np.frombuffer(chunk, "<f2" if dtype == "F16" else "<f4")
    return to_bf16(values.astype(np.float32)).data.cast("B")
