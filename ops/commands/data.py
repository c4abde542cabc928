"""Training data."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from redraft.engine.checkpoints import DEFAULT_MODEL, identity, resolve
from redraft.engine.config import EngineConfig
from redraft.ops.errors import CliError, UsageError
from redraft.retrain.data import store
from redraft.retrain.data.conversation import SOURCE_NAMES, Source
from redraft.retrain.data.generate import EngineResponder, SglangResponder, chat_hash, make_prompts, respond_to_all
from redraft.retrain.data.splits import SPLITS
from redraft.retrain.provenance import present_commit

app = typer.Typer(help="Make and look at training data.", no_args_is_help=True)

Out = Annotated[Path, typer.Argument(help="The folder to write; an unfinished one is gone on with.")]


@app.command()
def generate(
    out: Out,
    model: Annotated[str, typer.Option(help="The target: a pulled model's name, a Hugging Face id, or a folder.")] = (
        DEFAULT_MODEL
    ),
    source: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Only this source, of {', '.join(SOURCE_NAMES)}; repeatable. In a folder of more: answer only it."
        ),
    ] = None,
    sampled: Annotated[int, typer.Option(min=0, help="Sampled answers a prompt, beside the greedy one.")] = 3,
    sglang: Annotated[
        str | None, typer.Option(metavar="URL", help="Ask an SGLang server that serves the model; else an own engine.")
    ] = None,
    prompts_only: Annotated[bool, typer.Option(help="Write prompts, and ask nobody.")] = False,
) -> None:
    """Render every source's prompts and let the target answer them. Stop it at any time; run it again to go on."""
    sources = _sources(source)
    folder = resolve(model)
    if (out / "manifest.json").exists():
        manifest = store.load_manifest(out)
        if manifest.chat != chat_hash(folder):
            raise CliError(f"{out} was rendered for a model with another tokenizer or template; use a new folder")
    else:
        print("rendering prompts", file=sys.stderr)
        command = shlex.join(["redraft", *sys.argv[1:]])
        make_prompts(out, folder, model=model, sources=sources, command=command, commit=present_commit())
    if not prompts_only:
        _respond(out, model, identity(folder), sampled, sources, sglang)
    print(out)


@app.command()
def show(out: Annotated[Path, typer.Argument(help="A folder that `redraft data generate` wrote.")]) -> None:
    """Say what a folder of training data holds."""
    manifest = store.load_manifest(out)
    table = Table("source", *SPLITS, "all")
    for source, counts in manifest.counts.items():
        table.add_row(source, *(str(counts.get(split, 0)) for split in SPLITS), str(sum(counts.values())))
    totals = [sum(counts.get(split, 0) for counts in manifest.counts.values()) for split in SPLITS]
    table.add_row("all", *map(str, totals), str(sum(totals)))
    Console().print(table)
    print(f"prompts: {manifest.prompts}, {manifest.prompt_tokens} tokens, of {manifest.sessions} sessions")
    print(f"cut at a turn: {manifest.sessions_cut} sessions; asked once: {manifest.prompts_repeated} repeated prompts")
    print(f"answers: {manifest.responses}, {manifest.response_tokens} tokens")
    if manifest.looping_share is not None:
        print(f"looping: {manifest.looping_share:.1%} of answers")
    print(f"target: {manifest.target or '(nobody has answered yet)'}")
    print(f"size: {sum((out / name).stat().st_size for name in manifest.sha256)} bytes")


def _sources(names: list[str] | None) -> tuple[Source, ...]:
    unknown = [name for name in names or () if name not in SOURCE_NAMES]
    if unknown:
        raise UsageError(f"no source {unknown[0]}; there are: {', '.join(SOURCE_NAMES)}")
    return tuple(name for name in SOURCE_NAMES if not names or name in names)


def _respond(out: Path, model: str, target: str, sampled: int, sources: tuple[Source, ...], sglang: str | None) -> None:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("answers", total=None)

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if not console.is_terminal and done % 1000 == 0:
                print(f"{done} of {total} answers", file=sys.stderr)

        try:
            asyncio.run(_ask(out, model, target, sampled, sources, sglang, progress))
        except KeyboardInterrupt:
            raise CliError(f"stopped; what was answered is kept. To go on, run the command again on {out}") from None


async def _ask(
    out: Path,
    model: str,
    target: str,
    sampled: int,
    sources: tuple[Source, ...],
    sglang: str | None,
    progress: Callable[[int, int], None],
) -> None:
    if sglang is not None:
        server = SglangResponder(sglang)
        try:
            await respond_to_all(out, server, target=target, sampled=sampled, sources=sources, progress=progress)
        finally:
            await server.close()
    else:
        from redraft.ops.bench.deployment import running

        async with running(EngineConfig(model=model)) as (engine, _):
            await respond_to_all(
                out, EngineResponder(engine), target=target, sampled=sampled, sources=sources, progress=progress
            )
