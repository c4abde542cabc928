"""Drafter versions: looking at them, putting one into service, taking it back."""

from __future__ import annotations

import asyncio
import getpass
import json
import os
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer
from rich.table import Table

from redraft.engine.types import AcceptLength
from redraft.ops.commands.options import ConfigPath
from redraft.ops.commands.printing import console, moment
from redraft.ops.errors import CliError, UsageError
from redraft.ops.shelf import TRAINED, Shelf, open_shelf, out_of_step
from redraft.retrain.registry.errors import UnknownVersion
from redraft.retrain.registry.record import Entered, VersionRecord
from redraft.retrain.registry.registry import Registry

if TYPE_CHECKING:
    from redraft.retrain.publisher import Published, Publisher

app = typer.Typer(help="Look at drafter versions, and choose which serves.", no_args_is_help=True)

AsJson = Annotated[bool, typer.Option("--json", help="One JSON value alone on standard output.")]
Version = Annotated[str, typer.Argument(help="A version's id, or a beginning of it that no other has.")]
Why = Annotated[str, typer.Option(help="The reason, for the record.")]


@app.command("ls")
def list_versions(config: ConfigPath = None, as_json: AsJson = False) -> None:
    """List the versions of the target that is served, oldest first, and say since when and why one serves."""
    shelf = open_shelf(config)
    versions = shelf.registry.all()
    damaged = shelf.damaged()
    difference = out_of_step(shelf.config) if shelf.engine else ""
    if as_json:
        listed = [_summary(shelf, entered) for entered in versions]
        print(json.dumps([*listed, *({"version": name, "state": "damaged", "why": damaged[name]} for name in damaged)]))
        if difference:
            console(stderr=True).print(difference, markup=False)
        return
    table = _table("version", "kind", "state", "created", "parent", "accept length", "why")
    for entered in versions:
        record = entered.record
        table.add_row(
            record.version.id,
            record.version.kind,
            shelf.state(entered),
            moment(record.created),
            record.parent.id if record.parent else "-",
            _tau(entered.gate.accept_length if entered.gate else None),
            record.why,
        )
    for name in damaged:
        table.add_row(name, "-", "damaged", "-", "-", "-", "see below")
    console().print(table, markup=False)
    for damage in damaged.values():
        print(damage)
    print(_serving(shelf, "should serve" if difference else "serves"))
    if difference:
        print(f"{difference[0].upper()}{difference[1:]}")


@app.command()
def show(version: Version, config: ConfigPath = None, as_json: AsJson = False) -> None:
    """Print all that is known of a version."""
    shelf = open_shelf(config)
    with _known():
        entered = shelf.registry.find(version)
    lineage = [each.version.id for each in shelf.registry.lineage(entered.version)]
    if as_json:
        print(json.dumps({**msgspec.to_builtins(entered), "state": shelf.state(entered), "lineage": lineage}))
        return
    record, gate = entered.record, entered.gate
    rows = {
        "version": record.version.id,
        "kind": record.version.kind,
        "state": shelf.state(entered),
        "target": record.target,
        "origin": record.origin,
        "created": moment(record.created),
        "why": record.why,
        "lineage": " from ".join(lineage),
        **({f"provenance {key}": value for key, value in _provenance(entered).items()}),
        **({"gate report": gate.report, **_numbers(entered)} if gate else {}),
    }
    table = _table("", "")
    table.show_header = False
    for key, value in rows.items():
        table.add_row(key, _shown(value))
    console().print(table, markup=False)
    history = _table("since", "state", "by", "why")
    for entry in entered.history:
        history.add_row(moment(entry.time), f"{entry.state}{' (forced)' if entry.forced else ''}", entry.who, entry.why)
    print()
    console().print(history, markup=False)


@app.command()
def diff(first: Version, second: Version, config: ConfigPath = None, as_json: AsJson = False) -> None:
    """Print in what two versions differ: configuration, provenance, and what their gates measured."""
    registry = open_shelf(config).registry
    with _known():
        sides = registry.find(first), registry.find(second)
    left, right = (
        {
            **{f"config {key}": value for key, value in _config(registry, side).items()},
            **{f"provenance {key}": value for key, value in _provenance(side).items()},
            **_numbers(side),
        }
        for side in sides
    )
    names = [name for name in {**left, **right} if left.get(name) != right.get(name)]
    if as_json:
        print(json.dumps({name: [left.get(name), right.get(name)] for name in names}))
        return
    if not names:
        same = sides[0].version == sides[1].version
        print("It is one version." if same else "Only the weights differ, as far as the registry knows.")
        return
    table = _table("", *(side.version.id for side in sides))
    for name in names:
        table.add_row(name, *(_shown(side.get(name, "-")) for side in (left, right)))
    console().print(table, markup=False)


@app.command()
def add(
    folder: Annotated[Path, typer.Argument(help="A drafter checkpoint made elsewhere; it is copied.")],
    why: Why = "by hand",
    config: ConfigPath = None,
) -> None:
    """Add a checkpoint as a candidate, and print its version. It serves once a person promotes it with --force."""
    from redraft.engine.drafters.loading import load, version_of

    shelf = open_shelf(config)
    registry = shelf.registry
    version = version_of(folder)
    made_for = load(folder)[0].target
    if made_for not in ("", registry.target):
        raise CliError(f"{folder} was made for the target {made_for[:12]}; this deployment's is {registry.target[:12]}")
    record = VersionRecord(version=version, target=registry.target, origin="imported", why=why)
    entered = registry.get(registry.add(folder, record, who=_person()))
    print(version.id)
    if sys.stderr.isatty():
        console(stderr=True).print(_next(shelf, entered), markup=False)


@app.command()
def promote(
    version: Version,
    why: Why = "by hand",
    force: Annotated[bool, typer.Option(help="Also one that the gate did not accept; it is recorded so.")] = False,
    config: ConfigPath = None,
    as_json: AsJson = False,
) -> None:
    """Let a version serve: new answers take it, running ones end with the drafter they began with.

    Where no engine runs, it takes the version when it starts. Promoting the one that serves tells the engine again.
    """
    shelf = open_shelf(config)
    with _known():
        chosen = shelf.registry.find(version).version
    _publish(shelf, lambda publisher: publisher.promote(chosen, why, who=_person(), force=force), as_json)


@app.command()
def rollback(
    to: Annotated[str | None, typer.Option(help="To this version instead of the one that served before.")] = None,
    why: Why = "by hand",
    config: ConfigPath = None,
    as_json: AsJson = False,
) -> None:
    """Let the version serve again that served before. Doing it twice goes one further back, not forth."""
    shelf = open_shelf(config)
    with _known():
        chosen = shelf.registry.find(to).version if to is not None else None
    _publish(shelf, lambda publisher: publisher.rollback(why, who=_person(), to=chosen), as_json)


def _publish(shelf: Shelf, change: Callable[[Publisher], Awaitable[Published]], as_json: bool) -> None:
    published = asyncio.run(shelf.publishing(change))
    if as_json:
        print(json.dumps(msgspec.to_builtins(published)))
    else:
        print(f"{published.detail[0].upper()}{published.detail[1:]}")
    drafter = shelf.config.engine.drafter
    if drafter not in TRAINED:
        console(stderr=True).print(
            f"engine.drafter is {drafter}: an engine that starts here takes that; set it to one of "
            f"{', '.join(TRAINED)} to take versions",
            markup=False,
        )
    if shelf.engine and not published.in_force:
        raise typer.Exit(1)


@contextmanager
def _known() -> Iterator[None]:
    try:
        yield
    except UnknownVersion as error:
        raise UsageError(str(error)) from None


def _serving(shelf: Shelf, serves: str) -> str:
    """Which version serves by the pointer, since when and why; ``serves`` says whether the engine agrees."""
    if shelf.pointer is None:
        return f"None was promoted yet; engine.drafter ({shelf.config.engine.drafter}) decides who serves"
    serving = shelf.pointer.serving
    entered = shelf.registry.known(serving)
    last = entered.history[-1] if entered else None
    if last is None or last.state != "serving":
        return f"Version {serving.id} {serves} by the pointer; its history does not say since when"
    return f"Version {serving.id} {serves} since {moment(last.time)}, by {last.who}: {last.why}"


def _next(shelf: Shelf, entered: Entered) -> str:
    """What can be done with a version that was added."""
    name, state = entered.version.id, shelf.state(entered)
    if state == "serving":
        return f"It serves by the pointer; have the engine load it again: redraft drafters promote {name}"
    if state in ("accepted", "retired"):
        return f"It was here already, and is {state}; have it serve: redraft drafters promote {name}"
    return (
        f"It is {state}. The gate judges only what `redraft retrain run` trains, so a person decides on this one; have "
        f"it serve: redraft drafters promote {name} --force"
    )


def _person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _summary(shelf: Shelf, entered: Entered) -> dict[str, Any]:
    record = entered.record
    length = entered.gate.accept_length if entered.gate else None
    return {
        "version": record.version.id,
        "kind": record.version.kind,
        "state": shelf.state(entered),
        "since": entered.history[-1].time,
        "because": entered.history[-1].why,
        "origin": record.origin,
        "created": record.created,
        "parent": record.parent.id if record.parent else None,
        "tau": length.tau if length else None,
        "committed": length.committed if length else None,
        "verify_steps": length.verify_steps if length else None,
        "why": record.why,
    }


def _config(registry: Registry, entered: Entered) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((registry.path(entered.version) / "config.json").read_bytes())
    return content


def _provenance(entered: Entered) -> dict[str, Any]:
    if entered.record.provenance is None:
        return {}
    facts = msgspec.to_builtins(entered.record.provenance)
    return {**facts, **facts.pop("config")}


def _numbers(entered: Entered) -> dict[str, Any]:
    gate = entered.gate
    return {"gate tau": _tau(gate.accept_length), **{f"gate {k}": v for k, v in gate.numbers.items()}} if gate else {}


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _tau(length: AcceptLength | None) -> str:
    return f"{length.tau:.2f} ({length.committed}/{length.verify_steps})" if length and length.tau else "-"


def _table(*columns: str) -> Table:
    """A table whose last column alone may take several lines."""
    table = Table(box=None, pad_edge=False)
    for column in columns[:-1]:
        table.add_column(column, no_wrap=True)
    table.add_column(columns[-1], overflow="fold")
    return table
