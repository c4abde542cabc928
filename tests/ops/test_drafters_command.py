"""`redraft drafters` says what there is, changes who serves, and refuses in words."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from redraft.engine.checkpoints import identity
from redraft.engine.checkpoints.checkpoint import load_config as load_model
from redraft.engine.drafters.dflash_checkpoint import DFlashConfig, expected_shapes, save
from redraft.engine.drafters.loading import content_id
from redraft.engine.types import FLOOR, AcceptLength, DrafterVersion
from redraft.retrain.provenance import Provenance
from redraft.retrain.registry.record import GateResult, VersionRecord
from redraft.retrain.registry.registry import Registry, open_registry

pytestmark = pytest.mark.unit

Redraft = Callable[..., tuple[int, str, str]]


@pytest.fixture
def redraft(redraft: Redraft, tmp_path: Path, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> Redraft:
    """`redraft drafters` for a deployment of its own."""
    for name in [name for name in os.environ if name.startswith("REDRAFT_")]:
        monkeypatch.delenv(name)
    for name in ("STATE", "CACHE"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(tmp_path / name.lower()))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("REDRAFT_ENGINE__MODEL", str(tiny_checkpoint))
    monkeypatch.setenv("REDRAFT_RETRAIN__FOLDER", str(tmp_path / "retrain"))
    return partial(redraft, "drafters")


@pytest.fixture
def registry(tmp_path: Path, tiny_checkpoint: Path) -> Registry:
    return open_registry(tmp_path / "retrain" / "registry", identity(tiny_checkpoint))


@pytest.fixture
def versions(registry: Registry, tiny_checkpoint: Path, tmp_path: Path) -> list[str]:
    """Two accepted versions and a refused one, each trained from the one before."""
    model = load_model(tiny_checkpoint)
    parent = FLOOR
    for seed, verdict in enumerate(("accepted", "accepted", "refused")):
        shape = DFlashConfig.for_target(model, registry.target, layers=1, block_size=4 + seed, mask_token_id=3)
        folder = tmp_path / f"drafter-{seed}"
        save(folder, shape, weights(shape, seed), card="")
        version = DrafterVersion("dflash", content_id(folder))
        record = VersionRecord(
            version=version,
            target=registry.target,
            origin="trained",
            why=f"drift {seed}",
            parent=parent,
            provenance=Provenance(
                command="train",
                commit=None,
                target=registry.target,
                data=f"data {seed}",
                samples=1,
                tokens=1,
                config={"steps": 10 * seed},
            ),
        )
        registry.add(folder, record, who="test")
        gate = GateResult(
            report=f"report-{seed}.json",
            accept_length=AcceptLength(20 + seed, 10),
            numbers={"goodput_gain": 0.1 * seed},
        )
        registry.decide(version, verdict, who="gate", why="measured", gate=gate)
        parent = version
    return [entered.version.id for entered in registry.all()[1:]]


def weights(shape: DFlashConfig, seed: int) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(size, generator=generator) for name, size in expected_shapes(shape).items()}


def test_ls_shows_version_zero_before_anything_was_trained(redraft: Redraft) -> None:
    code, out, _ = redraft("ls")
    assert code == 0
    assert "builtin" in out and "None was promoted yet; engine.drafter (dflash) decides who serves" in out


def test_ls_lists_versions_with_who_serves_and_what_the_gate_measured(redraft: Redraft, versions: list[str]) -> None:
    assert redraft("promote", versions[0])[0] == 0
    code, out, _ = redraft("ls")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0 and list(rows)[1:] == ["builtin", *versions, "Version"]
    assert re.match(rf"Version {versions[0]} serves since \d{{4}}-.*[+-]\d\d:\d\d, by .*: by hand$", rows["Version"])
    assert "retired" in rows["builtin"]
    assert "serving" in rows[versions[0]] and "2.00 (20/10)" in rows[versions[0]] and "drift 0" in rows[versions[0]]
    assert "refused" in rows[versions[2]] and versions[1] in rows[versions[2]]
    listed = json.loads(redraft("ls", "--json")[1])
    assert [(each["state"], each["committed"], each["verify_steps"]) for each in listed] == [
        ("retired", None, None),
        ("serving", 20, 10),
        ("accepted", 21, 10),
        ("refused", 22, 10),
    ]


def test_show_tells_everything_back_to_version_zero(redraft: Redraft, versions: list[str]) -> None:
    code, out, _ = redraft("show", versions[1][:10])
    assert code == 0
    for words in (" from ".join([versions[1], versions[0], "builtin"]), "report-1.json", "2.10 (21/10)", "data 1"):
        assert words in out
    shown = json.loads(redraft("show", versions[1], "--json")[1])
    assert shown["lineage"] == [versions[1], versions[0], "builtin"]
    assert (shown["state"], len(shown["history"])) == ("accepted", 2)


def test_diff_tells_only_what_differs(redraft: Redraft, versions: list[str]) -> None:
    code, out, _ = redraft("diff", versions[0], versions[1])
    rows = {line[:28].strip(): line for line in out.splitlines()[1:]}
    assert code == 0
    assert any("config block_size" in line and line.split()[-2:] == ["4", "5"] for line in rows.values())
    assert "hidden_size" not in out and "provenance data" in out and "goodput_gain" in out
    differing = json.loads(redraft("diff", versions[0], versions[1], "--json")[1])
    assert differing["provenance steps"] == [0, 10]
    assert differing["gate tau"] == ["2.00 (20/10)", "2.10 (21/10)"]
    assert json.loads(redraft("diff", versions[0], versions[0], "--json")[1]) == {}
    assert redraft("diff", versions[0], versions[0])[1] == "It is one version.\n"


def test_promote_and_rollback_change_who_serves(redraft: Redraft, versions: list[str], registry: Registry) -> None:
    code, out, _ = redraft("promote", versions[0], "--why", "looks good")
    assert code == 0
    assert out.startswith(f"Version {versions[0]} serves instead of builtin; no engine is running: ")
    assert registry.find(versions[0]).history[-1].why == "looks good"
    code, out, _ = redraft("promote", versions[1], "--json")
    assert code == 0 and json.loads(out)["pointer"]["token"] == 3
    assert redraft("rollback")[1].startswith(f"Version {versions[0]} serves again instead of {versions[1]}; ")
    assert redraft("rollback")[1].startswith(f"Version builtin serves again instead of {versions[0]}; ")
    code, _, error = redraft("rollback")
    assert (code, error) == (1, "error: nothing served before builtin; there is nothing to roll back to\n")


def test_a_refused_version_needs_force(redraft: Redraft, versions: list[str], registry: Registry) -> None:
    code, _, error = redraft("promote", versions[2])
    assert code == 1 and f"version {versions[2]} is refused, not accepted" in error and "--force" in error
    assert redraft("promote", versions[2], "--force")[0] == 0
    assert registry.find(versions[2]).history[-2].forced


@pytest.mark.parametrize("command", [["show"], ["promote"], ["rollback", "--to"], ["diff", "builtin"]])
def test_an_unknown_version_is_a_usage_error_that_names_near_ones(
    command: list[str], redraft: Redraft, versions: list[str]
) -> None:
    wrong = versions[0][:-1] + "x"
    code, out, error = redraft(*command, wrong)
    assert (code, out) == (2, "")
    assert f"no drafter version {wrong!r}" in error and f"did you mean {versions[0]}" in error


def test_who_configured_another_drafter_is_told_that_it_starts_with_that(
    redraft: Redraft, versions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REDRAFT_ENGINE__DRAFTER", "ngram")
    code, _, error = redraft("promote", versions[0])
    assert code == 0
    assert error == (
        "engine.drafter is ngram: an engine that starts here takes that; set it to one of dflash, eagle3, mtp to take "
        "versions\n"
    )


def test_a_checkpoint_made_elsewhere_is_added_as_a_candidate(
    redraft: Redraft, registry: Registry, tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = DFlashConfig.for_target(
        load_model(tiny_checkpoint), registry.target, layers=1, block_size=4, mask_token_id=3
    )
    save(tmp_path / "mine", shape, weights(shape, 0), card="")
    code, out, _ = redraft("add", tmp_path / "mine", "--why", "from a friend")
    assert (code, out.strip()) == (0, content_id(tmp_path / "mine"))
    with monkeypatch.context() as patch:
        patch.setattr(sys.stderr, "isatty", lambda: True)
        _, again, hint = redraft("add", tmp_path / "mine")
    assert again == out and f"redraft drafters promote {out.strip()} --force" in hint
    entered = registry.find(out.strip())
    assert (entered.state, entered.record.origin, entered.record.why) == ("candidate", "imported", "from a friend")
    save(tmp_path / "other", replace(shape, target="ab" * 32), weights(shape, 1), card="")
    code, _, error = redraft("add", tmp_path / "other")
    assert code == 1 and "was made for the target abababababab; this deployment's is" in error
    code, _, error = redraft("add", tmp_path)
    assert code == 1 and "config.json" in error and len(registry.all()) == 2


def test_a_damaged_pointer_is_told_in_words(redraft: Redraft, versions: list[str], registry: Registry) -> None:
    (registry.root / registry.target / "pointer.json").write_text("nonsense")
    code, out, error = redraft("ls")
    assert (code, out) == (1, "")
    assert "pointer.json is damaged" in error and "Traceback" not in error


def test_a_lost_record_is_listed_as_damaged_and_keeps_nobody_from_promoting(
    redraft: Redraft, versions: list[str], registry: Registry
) -> None:
    assert redraft("promote", versions[0])[0] == 0
    records = registry.root / registry.target / "records"
    (records / f"{versions[0]}.json").unlink()
    (records / f"{versions[2]}.json").write_text("{")
    code, out, _ = redraft("ls")
    rows = {line.split()[0]: line for line in out.splitlines()}
    assert code == 0
    assert "damaged" in rows[versions[0]] and f"{versions[0]}.json is missing; restore it" in out
    assert "damaged" in rows[versions[2]] and f"{versions[2]}.json is damaged" in out
    assert "does not say since when" in rows["Version"]
    listed = json.loads(redraft("ls", "--json")[1])
    assert {each["version"] for each in listed if each["state"] == "damaged"} == {versions[0], versions[2]}
    assert redraft("promote", versions[1])[0] == 0
    assert "serves again instead of" in redraft("rollback")[1]


def test_nothing_is_wrapped_where_nobody_reads_at_a_terminal(
    redraft: Redraft, versions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    why = "because " * 40 + "of [this]"
    assert redraft("promote", versions[0], "--why", why)[0] == 0
    for command in (["ls"], ["show", versions[0]]):
        assert any(line.rstrip().endswith(why) for line in redraft(*command)[1].splitlines())
