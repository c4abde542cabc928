"""Arithmetic in words: GSM-Symbolic's templates as `reasoning-gym` generates them (PyPI, Apache-2.0)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from random import Random
from typing import Any

from redraft.engine.chat.messages import Message
from redraft.retrain.data.conversation import Conversation
from redraft.retrain.data.sources.packages import bare_package, package_folder, stand_ins

_REQUIREMENT = "reasoning-gym==0.1.25"
_QUESTIONS = 40
_BROKEN = {32, 35, 37, 61, 63, 65, 74, 76, 77, 79, 86, 87, 90, 97, 98}
"""Templates that the package itself lists as in need of repair."""


def conversations() -> Iterator[Conversation]:
    """Forty questions of every sound template; a template is a family."""
    for template, generate in _generators().items():
        random = Random(template)
        questions = dict.fromkeys(generate(random, 1.0)["question"] for _ in range(_QUESTIONS))
        for number, question in enumerate(questions):
            name = f"gsm-{template:02d}"
            yield Conversation(f"{name}-{number}", "math", name, (), (Message(role="user", content=question),))


def _generators() -> dict[int, Callable[[Random, float], dict[str, Any]]]:
    """The templates' generators, without the package's other data sets and what those need."""
    folder = package_folder("reasoning_gym", _REQUIREMENT)
    name = "reasoning_gym"
    packages = [bare_package(name, folder)]
    for part in ("arithmetic", "gsm_symbolic"):
        name, folder = f"{name}.{part}", folder / part
        packages.append(bare_package(name, folder))
    with stand_ins(*packages):
        modules = [import_module(f"{name}.{module}") for module in ("generators_00_49", "generators_50_99")]
    found = {
        int(key.removeprefix("generate_")): value
        for module in modules
        for key, value in vars(module).items()
        if key.startswith("generate_")
    }
    return {template: found[template] for template in sorted(found.keys() - _BROKEN)}
