"""``python -m redraft.retrain.agent_target``: prepare the data here, train and score where the GPU is."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import msgspec

from redraft.engine.checkpoints import CheckpointError, merge, resolve
from redraft.retrain.agent_target import prepared as files
from redraft.retrain.agent_target.recipe import BASE, NAME, Recipe, with_settings
from redraft.retrain.data.errors import DataError
from redraft.retrain.errors import TrainingError


def main() -> None:
    arguments = _parser().parse_args()
    try:
        arguments.command(arguments)
    except (CheckpointError, DataError, OSError, TrainingError) as error:
        sys.exit(f"error: {error}")


def _prepare(arguments: argparse.Namespace) -> None:
    from redraft.retrain.agent_target.data import prepare

    recipe = with_settings(Recipe(), arguments.set)
    prepared = prepare(arguments.base or resolve(BASE), arguments.plain, recipe)
    prepared.write(arguments.out)
    _print(
        {"examples": prepared.counts, "tokens": sum(len(e.ids) for e in prepared.train), "cases": len(prepared.cases)}
    )


def _train(arguments: argparse.Namespace) -> None:
    from redraft.retrain.agent_target.train import card, train

    prepared = files.read(arguments.prepared)
    prepared = msgspec.structs.replace(prepared, recipe=with_settings(prepared.recipe, arguments.set))
    run = train(prepared, arguments.base, arguments.out, _print)
    command = shlex.join(["python", "-m", "redraft.retrain.agent_target", *sys.argv[1:]])
    (arguments.out / "README.md").write_text(card(prepared, run, NAME, command), encoding="utf-8")
    _print({"event": "end", **run})


def _merge(arguments: argparse.Namespace) -> None:
    print(merge(arguments.base, arguments.adapter, arguments.out))


def _score(arguments: argparse.Namespace) -> None:
    from redraft.retrain.agent_target.responses import score

    _print(score(arguments.folder, files.read(arguments.prepared), arguments.model or resolve(BASE)))


def _print(entry: dict[str, Any]) -> None:
    print(json.dumps(entry), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m redraft.retrain.agent_target")
    commands = parser.add_subparsers(required=True)
    settings = argparse.ArgumentParser(add_help=False)
    settings.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="change one of the recipe's")

    prepare = commands.add_parser(
        "prepare", parents=[settings], help="write everything that training and scoring need into one file"
    )
    prepare.add_argument("out", type=Path)
    prepare.add_argument("--plain", type=Path, required=True, help="training data with responses of the base")
    prepare.add_argument("--base", type=Path, help="the base's folder, if not the pulled one")
    prepare.set_defaults(command=_prepare)

    train = commands.add_parser(
        "train", parents=[settings], help="train the adapter; the log is one JSON object a line"
    )
    train.add_argument("prepared", type=Path)
    train.add_argument("out", type=Path, help="the adapter's folder")
    train.add_argument("--base", type=Path, required=True)
    train.set_defaults(command=_train)

    merging = commands.add_parser("merge", help="write base and adapter as one checkpoint and print its identity")
    merging.add_argument("base", type=Path)
    merging.add_argument("adapter", type=Path)
    merging.add_argument("out", type=Path)
    merging.set_defaults(command=_merge)

    score = commands.add_parser("score", help="score the greedy responses to test prompts in a data folder")
    score.add_argument("folder", type=Path)
    score.add_argument("prepared", type=Path)
    score.add_argument("--model", type=Path, help="a folder with the tokenizer, if not the pulled base's")
    score.set_defaults(command=_score)
    return parser


if __name__ == "__main__":
    main()
