"""Text to token ids and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import tokenizers

from redraft.engine.checkpoints.checkpoint import eos_ids
from redraft.engine.checkpoints.errors import CheckpointError

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def _byte_level_alphabet() -> dict[str, int]:
    """The byte each character of a byte-level token stands for (GPT-2, ``encoder.py``, ``bytes_to_unicode``)."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTES = _byte_level_alphabet()


class Tokenizer:
    """A checkpoint's ``tokenizer.json``; ``special_tokens`` maps its control tokens to their ids."""

    def __init__(self, definition: str, eos_ids: tuple[int, ...] = ()) -> None:
        self.definition = definition
        self._tokenizer = _load(definition)
        self.eos_ids = eos_ids
        self.special_tokens: dict[str, int] = {
            token.content: i for i, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        }
        self.vocab_size: int = self._tokenizer.get_vocab_size(with_added_tokens=True)
        byte_ids = (self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256))
        self.byte_fallback_ids = frozenset(i for i in byte_ids if i is not None)
        self.special_ids = frozenset(self.special_tokens.values())
        self._added_ids = frozenset(self._tokenizer.get_added_tokens_decoder())
        self._is_byte_level = "ByteLevel" in repr(self._tokenizer.decoder)

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        file = folder / "tokenizer.json"
        try:
            return cls(file.read_text(encoding="utf-8"), eos_ids(folder))
        except OSError as error:
            raise CheckpointError(f"{file} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise CheckpointError(f"{file} is corrupt: {error}.") from error

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of ``text``; control tokens written in it are recognised.

        ``add_special_tokens`` puts those around it that the checkpoint wants around a bare text, if any.
        """
        return _encode(self._tokenizer, text, add_special_tokens)

    def encode_ordinary(self, text: str) -> list[int]:
        """Token ids of ``text`` as nothing but text: a control token written in it stays a run of characters."""
        return _encode(self._ordinary, text, add_special_tokens=False)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ``ids``, by default without control tokens; bytes that are no UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, id_: int) -> bytes:
        """The bytes one token stands for; a control token's are its name, an id without a token has none."""
        token: str = self._tokenizer.id_to_token(id_) or ""
        if id_ in self._added_ids:
            return token.encode()
        if self._is_byte_level:
            return bytes(_BYTES[char] for char in token)
        if id_ in self.byte_fallback_ids:
            return bytes([int(token[3:5], 16)])
        return token.replace("▁", " ").encode()

    def detokenizer(self) -> Detokenizer:
        return Detokenizer(self)

    @cached_property
    def _ordinary(self) -> tokenizers.Tokenizer:
        tokenizer = _load(self.definition)
        tokenizer.encode_special_tokens = True
        return tokenizer


def _encode(tokenizer: tokenizers.Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    """A batch of one, because only batches let other threads run meanwhile; megabytes take seconds."""
    ids: list[int] = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
    return ids


def _load(definition: str) -> tokenizers.Tokenizer:
    try:
        tokenizer = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:
        raise ValueError(str(error)) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Detokenizer:
    """Text of a growing run of token ids, as it becomes certain.

    No character is split: what may still change with the next token is held back. All that ``push`` and ``finish``
    return, put together, is ``Tokenizer.decode`` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._returned = 0

    def push(self, ids: Iterable[int]) -> str:
        new = [i for i in ids if i not in self._tokenizer.special_ids]
        if not new:
            return ""
        self._window += new
        if self._window[-1] in self._tokenizer.byte_fallback_ids:
            return ""  # a run of byte tokens is text or is not, as a whole
        text = self._tokenizer.decode(self._window)
        complete = not text.endswith(_INCOMPLETE)
        stable = len(text) if complete else len(text) - 1
        fresh = text[self._returned : stable]
        self._returned = max(self._returned, stable)
        if complete:
            self._window = self._window[-1:]
            self._returned = len(self._tokenizer.decode(self._window))
        return fresh

    def finish(self) -> str:
        """The text held back; call once, at the end."""
        return self._tokenizer.decode(self._window)[self._returned :]
