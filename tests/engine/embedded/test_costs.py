"""What passes cost is measured on the core that pays it, and leaves no trace there."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from redraft.engine.drafters.dflash import DFlashDrafter
from redraft.engine.embedded import costs
from redraft.engine.embedded.core import EngineCore
from redraft.engine.embedded.costs import REPETITIONS, CostMeter
from redraft.engine.policy.cost import CostTable
from redraft.engine.types import DrafterPointer, DrafterVersion

from .conftest import VERSION, answers, run
from .test_core import GREEDY, mixed_requests

pytestmark = pytest.mark.unit
MakeCore = Callable[..., EngineCore]
MakeDrafter = Callable[..., DFlashDrafter]
NEWER = DrafterVersion("dflash", "newer")


def measure(meter: CostMeter) -> CostTable:
    while meter.advance():
        pass
    assert meter.table is not None
    return meter.table


def test_a_table_has_a_time_for_every_size_of_pass_and_every_drafter(
    make_core: MakeCore, make_drafter: MakeDrafter
) -> None:
    core = make_core(make_drafter(), max_running=4)
    meter = CostMeter(core)
    assert meter.table is None
    table = measure(meter)
    assert (table.verify.contexts, table.verify.rows) == ((512,), (1, 2, 4, 8, 16, 32))
    assert table.draft.keys() == {"test", "builtin"}
    assert {grid.rows for grid in table.draft.values()} == {(1, 2, 4)}
    assert all(ms > 0 for grid in (table.verify, *table.draft.values()) for row in grid.ms for ms in row)
    assert table.draft["test"].at(4, 400) + table.verify.at(32, 400) > table.verify.at(4, 400)


@pytest.mark.parametrize(("context_length", "block_size"), [(16, 64), (100, 8), (512, 8)])
def test_no_pass_is_longer_than_the_context(make_core: MakeCore, context_length: int, block_size: int) -> None:
    core = make_core(context_length=context_length, block_size=block_size, slots=512)
    assert measure(CostMeter(core)).verify.contexts == (context_length,)


def test_measuring_leaves_no_trace(make_core: MakeCore, make_drafter: MakeDrafter) -> None:
    expected = answers(run(make_core(make_drafter()), mixed_requests(GREEDY)))
    drafter = make_drafter()
    core = make_core(drafter)
    target_kv, draft_kv = core._kv.clone(), drafter.kv
    measure(CostMeter(core))
    assert drafter.kv is draft_kv is core.cache.draft_kv[VERSION]
    assert draft_kv is not None
    assert not draft_kv.any()
    assert core._kv.equal(target_kv)
    assert core.cache.used_slots == 0
    assert answers(run(core, mixed_requests(GREEDY))) == expected


def test_a_drafter_loaded_later_is_absent_until_measured_and_again_when_it_is_gone(
    make_core: MakeCore, make_drafter: MakeDrafter
) -> None:
    core = make_core(make_drafter())
    meter = CostMeter(core)
    measure(meter)
    core.versions.add(make_drafter(version=NEWER))
    assert meter.advance()
    assert meter.table is not None
    assert "newer" not in meter.table.draft
    assert "newer" in measure(meter).draft
    core.activate(DrafterPointer(target="tiny", serving=VERSION))
    assert "newer" not in measure(meter).draft


def test_a_drafter_that_goes_while_it_is_measured_is_let_go(make_core: MakeCore, make_drafter: MakeDrafter) -> None:
    core = make_core(make_drafter())
    meter = CostMeter(core)
    measure(meter)
    core.versions.add(make_drafter(version=NEWER))
    meter.advance()
    core.activate(DrafterPointer(target="tiny", serving=VERSION))
    assert not meter.advance()


def test_slow_passes_are_measured_less_often_and_then_at_fewer_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    def grid(pass_seconds: float) -> tuple[int, tuple[int, ...]]:
        runs: list[tuple[int, int]] = []
        clock = ticks(pass_seconds)
        monkeypatch.setattr(costs, "perf_counter", lambda: next(clock))
        *_, found = costs._timed(lambda *point: runs.append(point), (10, 20, 30), (1, 2), seconds=20)
        assert found is not None
        assert {ms for row in found.ms for ms in row} == {pass_seconds * 1e3}
        return len(runs), found.contexts

    warm_up = 2
    assert grid(0.5) == (warm_up + REPETITIONS * 6, (10, 20, 30))
    assert grid(2.0) == (warm_up + 10, (10, 20, 30))
    assert grid(8.0) == (warm_up + 2, (10,))


def ticks(seconds: float) -> Iterator[float]:
    now = 0.0
    while True:
        yield now
        now += seconds
