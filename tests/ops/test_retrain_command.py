"""`redraft retrain run` tells its verdict, whatever becomes of it afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest

from redraft.engine.types import FLOOR, DrafterVersion
from redraft.ops import deployment
from redraft.ops.commands import retrain
from redraft.ops.config import LoadedConfig, RedraftConfig
from redraft.retrain.errors import Stopped
from redraft.retrain.loop import Outcome
from redraft.retrain.period import Period
from redraft.retrain.registry.errors import RegistryError

pytestmark = pytest.mark.unit

Redraft = Callable[..., tuple[int, str, str]]

OUTCOME = Outcome("accepted", "it is faster", DrafterVersion("dflash", "a" * 16), "report.md")


@pytest.fixture
def published(monkeypatch: pytest.MonkeyPatch) -> Mock:
    """What publishing the accepted version does; nothing is trained."""

    async def publishing(change: Any) -> Any:
        return outcome()

    outcome = Mock()
    shelf = Mock(publishing=publishing, damaged=lambda: {"b": "b.json is damaged"})
    loop = Mock()
    loop.run_once.return_value = OUTCOME
    monkeypatch.setattr("redraft.retrain.background.be_background", lambda: None)
    monkeypatch.setattr(retrain, "open_shelf", lambda _: shelf)
    outcome.run_once = loop.run_once
    monkeypatch.setattr(retrain, "_loop", lambda _: (loop, FLOOR))
    monkeypatch.setattr(retrain, "_period", lambda *_: Period(0, "asked for"))
    return outcome


@pytest.mark.parametrize("as_json", [True, False])
def test_a_verdict_is_told_even_if_the_version_cannot_be_made_to_serve(
    redraft: Redraft, published: Mock, as_json: bool
) -> None:
    published.side_effect = RegistryError("another serves by now")
    code, out, error = redraft("retrain", "run", "--once", *(["--json"] if as_json else []))
    assert code == 1 and error.endswith("error: another serves by now\n")
    assert "b.json is damaged" in error
    if as_json:
        assert json.loads(out)["result"] == "accepted"
    else:
        assert out == "Accepted: it is faster\nThe report is report.md\n"


def test_an_accepted_version_that_the_engine_does_not_take_is_a_failure(redraft: Redraft, published: Mock) -> None:
    published.return_value = Mock(in_force=False, detail="version a was overtaken")
    code, _, error = redraft("retrain", "run", "--once")
    assert code == 1 and error.endswith("error: version a was overtaken\n")
    published.return_value = Mock(in_force=True, detail="version a serves")
    code, out, _ = redraft("retrain", "run", "--once")
    assert code == 0 and out.endswith("Version a serves\n")


def test_a_run_that_goes_on_says_so_and_what_it_does_not_take(redraft: Redraft, published: Mock) -> None:
    def run_once(serving: Any, period: Any, progress: Any, begins: Callable[[Period, bool], None]) -> Outcome:
        begins(Period(0, "a drop on Monday"), True)
        return Outcome("refused", "no better")

    published.run_once.side_effect = run_once
    code, _, error = redraft("retrain", "run", "--once", "--why", "mine")
    assert code == 10
    assert "a run that was stopped goes on; --since and --why are for one that begins" in error
    assert "a drop on Monday" in error and "mine" not in error


def test_a_run_that_is_stopped_exits_as_shells_expect(redraft: Redraft, published: Mock) -> None:
    published.run_once.side_effect = Stopped("training was asked to stop; what it had is saved")
    code, out, error = redraft("retrain", "run", "--once")
    assert (code, out) == (130, "")
    assert error.endswith("training was asked to stop; what it had is saved\n")


def test_settings_that_a_running_deployment_does_not_have_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given = LoadedConfig(RedraftConfig.model_validate({"gate": {"draws": 1234}}), {}, None)
    monkeypatch.setattr(deployment, "load", lambda _: (given, Mock()))
    monkeypatch.setattr(deployment, "in_force", lambda _: (RedraftConfig(), True))
    assert deployment.unapplied(None) == ["gate.draws"]
    monkeypatch.setattr(deployment, "in_force", lambda _: (RedraftConfig(), False))
    assert deployment.unapplied(None) == []
