"""What an assistant says where ground truth has only calls: brief, plain, worded from the results themselves.

Wordings vary by a hash of the session and turn, so that the same session always reads the same.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from redraft.engine.chat.messages import Tool

_LONGEST_VALUE = 160
_MOST_FACTS = 4
_MOST_ITEMS = 6

_DONE = ("Done.", "That is done.", "All done.", "It is done.", "Done, as you asked.", "That worked.")
_FAILED = ("That did not work: {}.", "It failed: {}.", "I could not do that: {}.", "That was not possible: {}.")
_FOUND = ("", "", "Here is what I found. ", "Done. ", "Here you go. ")
_MISSING_TOOL = (
    "I do not have a function that can do that. If you can give me one, I will go on.",
    "None of the functions I have lets me do that.",
    "I cannot do that with the functions at hand; a suitable one is missing.",
    "The function I would need for this is not available to me.",
    "Sorry, I lack the function that this needs. Is there another one that I may use?",
)
_MISSING_PARAMETERS = (
    "Could you tell me the {}?",
    "What is the {}?",
    "I need the {} first. What should it be?",
    "Before I can do that, please give me the {}.",
    "Happy to. Which {} should I use?",
)
_MISSING_DETAILS = (
    "Could you give me a few more details first?",
    "I need a little more information for that. What exactly should I use?",
    "Some details are missing. Could you add them?",
    "Before I start, could you be more specific?",
)
_NO_TOOL_FITS = (
    "I cannot help with that using the functions I have. They cover only {}.",
    "None of my functions fits this request; what I have is {}.",
    "That is outside what my functions can do. I have {}.",
    "Sorry, I have no function for that. Available are {}.",
    "I do not have a suitable function here, only {}.",
    "This needs a function that I was not given. Mine are {}.",
)


def choose(wordings: Sequence[str], key: str) -> str:
    """One of the wordings, always the same for a key."""
    return wordings[int.from_bytes(hashlib.sha256(key.encode()).digest()[:4]) % len(wordings)]


def tell(results: Sequence[tuple[str, str]], key: str) -> str:
    """What came of some calls, given as pairs of a function's name and its answer (JSON or text)."""
    facts: list[str] = []
    failures: list[str] = []
    for _, result in results:
        value = _read(result)
        error = _error(value)
        if error is None:
            facts += _facts(value)[: _MOST_FACTS if len(results) == 1 else _MOST_FACTS // 2]
        else:
            failures.append(choose(_FAILED, key).format(error.rstrip(". ")))
    if not facts and not failures:
        return choose(_DONE, key)
    opening = choose(_FOUND, key) if facts and not failures else ""
    return opening + " ".join(dict.fromkeys([*facts[-_MOST_FACTS:], *failures]))


def missing_tool(key: str) -> str:
    return choose(_MISSING_TOOL, key)


def missing_parameters(names: Sequence[str], key: str) -> str:
    """A question for arguments, by their names."""
    if not names:
        return choose(_MISSING_DETAILS, key)
    return choose(_MISSING_PARAMETERS, key).format(_listed([_words(name) for name in names[:3]]))


def no_tool_fits(tools: Sequence[Tool], key: str) -> str:
    """A refusal that says what the tools are for."""
    return choose(_NO_TOOL_FITS, key).format(_listed([_purpose(tool) for tool in tools[:3]]))


def _purpose(tool: Tool) -> str:
    sentence = re.split(r"(?<=\w)[.!?](?:\s|$)|\n", (tool.description or "").strip(), maxsplit=1)[0].strip().rstrip(".")
    return f"{tool.name} ({sentence[0].lower() + sentence[1:]})" if 0 < len(sentence) <= _LONGEST_VALUE else tool.name


def _read(result: str) -> Any:
    try:
        return json.loads(result)
    except ValueError:
        return None if result in ("", "None") else result


def _error(value: Any) -> str | None:
    if isinstance(value, dict) and isinstance(value.get("error"), str):
        return str(value["error"])
    if isinstance(value, str) and value.lower().startswith("error"):
        return value.partition(":")[2].strip() or value
    return None


def _facts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [fact for name, item in value.items() if (fact := _fact(name, item))]
    if isinstance(value, list):
        return [f"The results are {_listed(list(map(str, value)))}."] if _are_plain(value) else []
    return [f"The result is {_short(value)}."] if value not in (None, "") else []


def _fact(name: str, value: Any) -> str | None:
    words = _words(name)
    if isinstance(value, bool):
        return f"{words.capitalize()}: {'yes' if value else 'no'}."
    if isinstance(value, str) and name in ("message", "result", "status") and len(value.split()) > 3:
        return value if value.endswith((".", "!", "?")) else f"{value}."
    if isinstance(value, str | int | float):
        return f"The {words} is {_short(value)}." if value != "" else None
    if isinstance(value, list):
        if not value:
            return f"There are no {words}."
        if not _are_plain(value):
            return f"{words.capitalize()}: {len(value)} {'entry' if len(value) == 1 else 'entries'}."
        return f"The {words} {'is' if len(value) == 1 else 'are'} {_listed(list(map(str, value)))}."
    if isinstance(value, Mapping):
        inner = [f"{_words(key)} {_short(item)}" for key, item in value.items() if isinstance(item, str | int | float)]
        return f"{words.capitalize()}: {_listed(inner)}." if inner else None
    return None


def _are_plain(values: Sequence[Any]) -> bool:
    return bool(values) and all(isinstance(value, str | int | float) for value in values)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE].rsplit(" ", 1)[0] + " …"


def _listed(items: Sequence[str]) -> str:
    items = [_short(item) for item in items]
    if len(items) > _MOST_ITEMS:
        items = [*items[:_MOST_ITEMS], f"{len(items) - _MOST_ITEMS} more"]
    return ", ".join(items[:-1]) + f" and {items[-1]}" if len(items) > 1 else "".join(items)


def _words(name: str) -> str:
    """A key as words.

    >>> _words("current_working_directory"), _words("fuelLevel")
    ('current working directory', 'fuel level')
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").lower().strip()
