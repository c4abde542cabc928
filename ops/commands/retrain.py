"""The loop by hand: one run from captured traffic to a verdict."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from redraft.engine.checkpoints import resolve
from redraft.engine.embedded.client import EmbeddedEngine
from redraft.engine.policy.cost import CostTable
from redraft.engine.protocol import EngineUnavailable
from redraft.engine.types import FLOOR
from redraft.ops.commands.options import ConfigPath
from redraft.ops.commands.printing import console, moment
from redraft.ops.deployment import unapplied
from redraft.ops.errors import CliError, UsageError
from redraft.ops.feedback import open_contexts, open_log
from redraft.ops.progress import progress_bar
from redraft.ops.shelf import Shelf, open_shelf, out_of_step

if TYPE_CHECKING:
    from redraft.engine.types import DrafterVersion
    from redraft.retrain.loop import Loop
    from redraft.retrain.period import Period

app = typer.Typer(help="Train drafters on what was served, and let a gate decide.", no_args_is_help=True)

EXIT = {"accepted": 0, "refused": 10, "inconclusive": 11, "too little": 12}
"""How a run ended, as an exit status; 1 and 2 are faults and usage, as everywhere."""

HEALTH_SECONDS = 1.0
COSTS_SECONDS = 60.0


@app.callback()
def main() -> None:
    """Train drafters on what was served, and let a gate decide."""


@app.command()
def run(
    once: Annotated[bool, typer.Option("--once", help="One run, now; the only way there is so far.")] = False,
    config: ConfigPath = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="What is later is new traffic, e.g. 2026-11-30T18:00; else drift says it."),
    ] = None,
    why: Annotated[str | None, typer.Option(help="The reason, for the record; else the sign of drift.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON value alone on standard output.")] = False,
) -> None:
    """Train a candidate from the drafter that serves, judge it, and let it serve if it is shown to be better.

    The exit status tells how it ended: 0 it serves (or was accepted and waits, with retrain.auto_promote off), 1 it was
    accepted but could not be made to serve, 10 refused, 11 inconclusive, 12 too little traffic to learn from or judge
    by, 130 stopped. Training takes the CPU that serving leaves. A run that was stopped goes on where it was.
    """
    if not once:
        raise UsageError("say --once: runs that start by themselves do not exist yet")
    from redraft.retrain.background import be_background

    be_background()
    shelf = open_shelf(config)
    notes = console(stderr=True)
    if stale := unapplied(config):
        notes.print(
            f"the running deployment was started with another {', '.join(stale)}; its own holds until it is started "
            "again",
            markup=False,
        )
    for damage in shelf.damaged().values():
        notes.print(damage, markup=False)
    with progress_bar() as progress:
        loop, serving = _loop(shelf)

        def begins(period: Period, again: bool) -> None:
            if again:
                given = "; --since and --why are for one that begins" if since or why else ""
                notes.print(f"a run that was stopped goes on{given}", markup=False)
            new = f"what is later than {moment(period.since)}" if period.since else "all there is"
            notes.print(f"new traffic is {new}: {period.why}", markup=False)

        outcome = loop.run_once(serving, _period(shelf, serving, since, why), progress, begins)
    loop.registry.prune(shelf.config.retrain.keep_refused)
    if as_json:
        print(json.dumps(msgspec.to_builtins(outcome)))
    else:
        print(f"{outcome.result.capitalize()}: {outcome.reason}")
        if outcome.report:
            print(f"The report is {outcome.report}")
    if outcome.result == "accepted" and outcome.version:
        print(_conclude(shelf, outcome.version, outcome.reason, serving), file=sys.stderr if as_json else sys.stdout)
    raise typer.Exit(EXIT[outcome.result])


def _loop(shelf: Shelf) -> tuple[Loop, DrafterVersion]:
    """Everything a run works with, and the version that serves."""
    from redraft.engine.embedded.server import build_core
    from redraft.retrain.config import load_recipe
    from redraft.retrain.features_store import LocalStore
    from redraft.retrain.finetune import FINETUNE
    from redraft.retrain.frozen import load_target
    from redraft.retrain.loop import Loop
    from redraft.retrain.registry.registry import add_version_zero

    config = shelf.config
    serving = shelf.pointer.serving if shelf.pointer else add_version_zero(shelf.registry)
    if serving == FLOOR:
        raise CliError(
            "n-gram serves, which nothing can be trained from; train a first drafter with `redraft train dflash` and "
            "bring it in with `redraft drafters add`"
        )
    if shelf.engine is None:
        raise CliError("no deployment is running here, and what passes cost is measured by its engine; redraft up")
    if difference := out_of_step(config):
        raise CliError(f"nothing can be judged against the version that should serve: {difference}")
    log, contexts = open_log(config), open_contexts(config)
    recipe = load_recipe(config.retrain.recipe or FINETUNE)
    loop = Loop(
        folder=config.retrain.runs / shelf.registry.target[:12],
        events=log.events,
        contexts=contexts,
        registry=shelf.registry,
        target=load_target(resolve(config.engine.model), recipe),
        features=LocalStore(config.retrain.features, config.retrain.feature_bytes),
        recipe=recipe,
        traffic=config.traffic,
        gate=config.gate,
        costs=asyncio.run(_costs(shelf.engine)),
        engine=lambda folder: build_core(config.engine.model_copy(update={"drafter": str(folder)})),
        block_length=config.engine.block_size - 1,
        busy=_busy(shelf.engine),
    )
    return loop, serving


async def _costs(socket: Path) -> CostTable:
    engine = EmbeddedEngine(socket)
    try:
        async with asyncio.timeout(COSTS_SECONDS):
            return await engine.costs()
    except TimeoutError:
        raise CliError("the engine does not answer; look at: redraft status") from None
    finally:
        await engine.close()


def _busy(socket: Path) -> Callable[[], bool]:
    """Whether the engine runs or holds requests; one that is gone is not busy."""

    async def asked() -> bool:
        engine = EmbeddedEngine(socket)
        try:
            async with asyncio.timeout(HEALTH_SECONDS):
                health = await engine.health()
        finally:
            await engine.close()
        return bool(health.running or health.waiting)

    def busy() -> bool:
        try:
            return asyncio.run(asked())
        except TimeoutError:
            return True
        except EngineUnavailable:
            return False

    return busy


def _period(shelf: Shelf, serving: DrafterVersion, since: str | None, why: str | None) -> Period:
    from redraft.retrain.period import Period, latest_drop, latest_half

    if since is not None:
        try:
            moment = datetime.fromisoformat(since).timestamp()
        except ValueError:
            raise UsageError(f"--since {since} is no time such as 2026-11-30T18:00") from None
        return Period(moment, why or "asked for")
    log = open_log(shelf.config)
    references = [reference for entered in shelf.registry.all() for reference in entered.references]
    drop = latest_drop(log.events(), serving, shelf.config.drift, references)
    found = Period(drop.since, str(drop)) if drop else latest_half(log.events())
    return msgspec.structs.replace(found, why=why) if why else found


def _conclude(shelf: Shelf, version: DrafterVersion, why: str, replaced: DrafterVersion) -> str:
    """Let an accepted version serve instead of the one it was judged against, where that is wanted; what came of it."""
    if not shelf.config.retrain.auto_promote:
        return f"Version {version.id} waits for a person: redraft drafters promote {version.id}"
    published = asyncio.run(
        shelf.publishing(lambda publisher: publisher.promote(version, why, who="gate", instead_of=replaced))
    )
    if not published.in_force:
        raise CliError(published.detail)
    return f"{published.detail[0].upper()}{published.detail[1:]}"
