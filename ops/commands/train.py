"""Training drafters, and what they would have accepted."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from redraft.engine.checkpoints import DEFAULT_MODEL, CheckpointError, resolve
from redraft.ops.errors import UsageError
from redraft.ops.progress import progress_bar
from redraft.retrain.data.errors import DataError
from redraft.retrain.data.splits import Split
from redraft.retrain.errors import TrainingError

app = typer.Typer(help="Train drafters and evaluate them on recorded answers.", no_args_is_help=True)

Model = Annotated[str, typer.Option(help="The target: a known name, a Hugging Face id, or a local folder.")]
Data = Annotated[Path, typer.Option(help="Folder of training data, as `redraft data generate` makes it.")]


Out = Annotated[Path, typer.Option(help="The run's folder: log, state to resume from, and drafter/.")]
Recipe = Annotated[Path | None, typer.Option("--config", "-c", help="A recipe, e.g. configs/dflash.yaml.")]
Steps = Annotated[int | None, typer.Option(min=1, help="Instead of the recipe's.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Instead of the recipe's.")]
Resume = Annotated[bool, typer.Option(help="Go on from the last saved state.")]
Commit = Annotated[str | None, typer.Option(help="Which commit this is, for the record; else git is asked.")]


def _add_command(kind: str, what: str) -> None:
    @app.command(
        kind, help=f"Train {what}; progress goes to standard error, the checkpoint's folder to standard output."
    )
    def command(
        data: Data,
        out: Out,
        model: Model = DEFAULT_MODEL,
        config: Recipe = None,
        steps: Steps = None,
        seed: Seed = None,
        resume: Resume = False,
        commit: Commit = None,
    ) -> None:
        from redraft.retrain.config import load_recipe
        from redraft.retrain.run import train
        from redraft.retrain.trainer import DRAFTER

        with progress_bar() as progress:
            recipe = load_recipe(config, steps=steps, seed=seed)
            train(kind, data, out, recipe, model=model, resume=resume, commit=commit, progress=progress)
        print(out / DRAFTER)


_add_command("dflash", "a DFlash drafter")
_add_command("eagle3", "an EAGLE-3 drafter")
_add_command("mtp", "parallel heads, a baseline")


@app.command("eval")
def evaluate_run(
    run: Annotated[Path, typer.Argument(help="A run's folder, or a checkpoint's.")],
    data: Data,
    split: Annotated[Split, typer.Option(help="Which split.")] = "calibrate",
    model: Model = DEFAULT_MODEL,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON array alone on standard output.")] = False,
) -> None:
    """Replay recorded greedy answers through a drafter and the n-gram floor; looping ones are counted apart."""
    from redraft.retrain.evaluate import evaluate

    with progress_bar() as progress:
        rows = evaluate(run, data, model=model, split=split, progress=progress)
    if as_json:
        print(json.dumps(rows))
    else:
        Console().print(_table(rows))


@app.command()
def export(
    checkpoint: Annotated[Path, typer.Argument(help="An EAGLE-3 drafter's folder.")],
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    model: Model = DEFAULT_MODEL,
) -> None:
    """Write an EAGLE-3 checkpoint with its head, which SGLang wants; others it loads as they are, or not at all."""
    from redraft.engine.drafters import eagle3_checkpoint
    from redraft.engine.drafters.loading import check, kind_of
    from redraft.retrain.config import TrainConfig
    from redraft.retrain.frozen import load_target

    if (kind := kind_of(checkpoint)) != "eagle3":
        others = "SGLang loads it as it is" if kind == "dflash" else "no other engine loads it"
        raise UsageError(f"{checkpoint} holds a drafter of kind {kind}; {others}")
    target = load_target(resolve(model), TrainConfig(device="cpu"))
    check(checkpoint, target.target.config, target.identity)
    eagle3_checkpoint.export(checkpoint, out, target.head)
    print(out)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table("drafter", "source", "block length", "accept length", "committed", "verify steps", "hazard")
    for row in rows:
        hazard = " ".join("-" if value is None else f"{value:.2f}" for value in row["hazard"])
        tau = "-" if row["tau"] is None else f"{row['tau']:.3f}"
        names = (row["drafter"], row["source"], str(row["block_length"]))
        table.add_row(*names, tau, str(row["committed"]), str(row["verify_steps"]), hazard)
    return table


if __name__ == "__main__":
    try:
        app()
    except (CheckpointError, DataError, OSError, TrainingError) as error:
        sys.exit(f"error: {error}")
