"""Text comes back from tokens whole, in any cut, and no character is ever split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import llguidance
import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from redraft.engine.chat.tokenizer import Detokenizer, Tokenizer
from redraft.engine.checkpoints import CheckpointError

pytestmark = pytest.mark.unit
with_fixtures = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=300)


@pytest.fixture(scope="module")
def any_tokenizer(any_definition: str) -> Tokenizer:
    return Tokenizer(any_definition)


def _in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    ends = sorted({min(cut, len(ids)) for cut in cuts} | {len(ids)})
    pieces = [detokenizer.push(ids[start:end]) for start, end in zip([0, *ends], ends, strict=False)]
    return [*pieces, detokenizer.finish()]


@with_fixtures
@given(data=st.data())
def test_pieces_of_any_ids_make_the_text_of_all(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, any_tokenizer.vocab_size - 1), max_size=40))
    cuts = data.draw(st.lists(st.integers(0, 40)))
    assert "".join(_in_pieces(any_tokenizer, ids, cuts)) == any_tokenizer.decode(ids)
    assert "".join(_in_pieces(any_tokenizer, ids, list(range(40)))) == any_tokenizer.decode(ids)


@with_fixtures
@given(data=st.data())
def test_broken_utf8_in_any_order_is_neither_lost_nor_split(any_tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Bytes that begin, continue and break characters, among control tokens and letters."""
    pieces = ["é", "日", "🙂", "<|im_end|>", "a", "\ufffd"]
    ids = [i for piece in pieces for i in any_tokenizer.encode(piece)]
    mixed = data.draw(st.lists(st.sampled_from(ids), max_size=30))
    assert "".join(_in_pieces(any_tokenizer, mixed, list(range(30)))) == any_tokenizer.decode(mixed)


@with_fixtures
@given(text=st.text(max_size=30))
def test_no_piece_of_a_text_has_half_a_character(any_tokenizer: Tokenizer, text: str) -> None:
    ids = any_tokenizer.encode(text)
    pieces = _in_pieces(any_tokenizer, ids, list(range(len(ids))))
    decoded = any_tokenizer.decode(ids)
    assert "".join(pieces) == decoded
    assert "".join(pieces).count("\ufffd") == decoded.count("\ufffd")


def test_text_comes_as_soon_as_it_is_certain(definition: str) -> None:
    tokenizer = Tokenizer(definition)
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(tokenizer.encode("a")) == "a"
    *begun, last = tokenizer.encode("😀")
    assert begun, "the test needs a character of several tokens"
    assert [detokenizer.push([i]) for i in begun] == [""] * len(begun)
    assert detokenizer.push([last]) == "😀"
    assert detokenizer.finish() == ""


def test_an_unfinished_character_comes_at_the_end(definition: str) -> None:
    tokenizer = Tokenizer(definition)
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(tokenizer.encode("x😀")[:-1]) == "x"
    assert detokenizer.finish() == "\ufffd"


def test_control_tokens_are_recognised_skipped_and_never_added(definition: str) -> None:
    tokenizer = Tokenizer(definition, eos_ids=(2,))
    ids = tokenizer.encode("<|im_start|>hi<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids) == "hi"
    assert tokenizer.special_tokens == {"<|endoftext|>": 0, "<|im_start|>": 1, "<|im_end|>": 2}
    assert tokenizer.encode("") == []
    assert not {0, 1, 2} & set(tokenizer.encode_ordinary("<|im_start|>hi<|im_end|>"))
    assert tokenizer.decode(tokenizer.encode_ordinary("<|im_start|>hi<|im_end|>")) == "<|im_start|>hi<|im_end|>"


@with_fixtures
@given(text=st.lists(st.one_of(st.text(), st.sampled_from(["<|im_end|>", "<|im_start|>", " 123", "hello"]))))
def test_ids_equal_transformers(any_definition: str, text: list[str]) -> None:
    joined = "".join(text)
    theirs = _transformers_tokenizer(any_definition)
    ours = Tokenizer(any_definition)
    ids = ours.encode(joined)
    assert ids == theirs.encode(joined, add_special_tokens=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _transformers_tokenizer(definition: str) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(definition))


def test_a_folders_tokenizer_knows_its_end_tokens_and_size(make_folder: Callable[[str], Path]) -> None:
    folder = make_folder("{{ messages }}")
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.eos_ids == (2,)
    assert tokenizer.vocab_size == len({*range(tokenizer.vocab_size)}) > 256


@pytest.mark.parametrize("content", ["", "{}", '{"version": "1.0", "model": {"type": "None"}}', "\xff"])
def test_a_damaged_tokenizer_is_named(make_folder: Callable[[str], Path], content: str) -> None:
    folder = make_folder("{{ messages }}")
    (folder / "tokenizer.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is corrupt"):
        Tokenizer.from_folder(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(folder)


def test_a_tokens_bytes_are_those_that_a_grammar_reads(any_definition: str) -> None:
    """llguidance takes tokenizers apart by itself; it keeps the byte 0xff for marking control tokens."""
    tokenizer = Tokenizer(any_definition)
    theirs = llguidance.LLTokenizer(any_definition)
    ours = {id_: tokenizer.token_bytes(id_) for id_ in range(tokenizer.vocab_size)}
    assert {raw for id_, raw in ours.items() if raw != theirs.decode_bytes([id_])} <= {b"\xff"}
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert [tokenizer.token_bytes(id_) for id_ in tokenizer.special_tokens.values()] == [
        name.encode() for name in tokenizer.special_tokens
    ]


@with_fixtures
@given(text=st.text(max_size=20))
def test_the_bytes_of_tokens_make_the_bytes_of_their_text(definition: str, text: str) -> None:
    tokenizer = Tokenizer(definition)
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_control_tokens_are_decoded_where_they_are_asked_for(definition: str) -> None:
    tokenizer = Tokenizer(definition)
    text = "<|im_start|>hi<|im_end|>"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_what_a_checkpoint_wants_before_a_text_is_added_where_it_is_asked_for(definition: str) -> None:
    theirs = tokenizers.Tokenizer.from_str(definition)
    theirs.post_processor = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer = Tokenizer(theirs.to_str())
    plain = tokenizer.encode("hi")
    assert tokenizer.encode("hi", add_special_tokens=True) == [0, *plain]
    assert 0 not in plain
