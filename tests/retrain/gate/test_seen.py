from __future__ import annotations

import msgspec
import pytest

from redraft.retrain.gate.seen import TrainingRecord

from ..conftest import make_sample, random_tokens

pytestmark = pytest.mark.unit

SEEN = make_sample(random_tokens(200, 1), [(120, 160), (180, 200)], id="seen", session="old")
OTHER = make_sample(random_tokens(200, 2), [(120, 200)], id="other", session="new")


def test_a_session_is_seen_by_its_name_or_by_any_sample_of_it() -> None:
    record = TrainingRecord.of([SEEN])
    assert record.names(msgspec.structs.replace(OTHER, session="old"))
    assert record.names(msgspec.structs.replace(OTHER, id="seen"))
    assert not record.names(OTHER)


def test_an_answer_is_seen_under_any_name_behind_any_template() -> None:
    record = TrainingRecord.of([SEEN])
    moved = make_sample((*random_tokens(50, 3), *SEEN.token_ids[40:]), [(130, 170), (190, 210)])
    assert record.repeats(moved)
    assert not record.repeats(OTHER)


def test_a_common_template_is_no_repetition() -> None:
    template = random_tokens(120, 4)
    one = make_sample((*template, *random_tokens(90, 5)), [(180, 210)])
    other = make_sample((*template, *random_tokens(90, 6)), [(180, 210)])
    assert not TrainingRecord.of([one]).repeats(other)


def test_spans_of_an_answer_are_enough_where_they_are_most_of_it() -> None:
    half = msgspec.structs.replace(SEEN, spans=((122, 158), (182, 200)))
    assert TrainingRecord.of([half]).repeats(SEEN)
    little = msgspec.structs.replace(SEEN, spans=((122, 130),))
    assert not TrainingRecord.of([little]).repeats(SEEN)


def test_records_of_ancestors_are_joined_and_survive_being_written() -> None:
    joined = TrainingRecord.of([SEEN]) | TrainingRecord.of([OTHER])
    assert joined.names(SEEN)
    assert joined.names(OTHER)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(joined), type=TrainingRecord) == joined
