"""Instructions without tools: a small grammar of topics and tasks, written for Redraft."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

import msgspec
from msgspec import Struct

from redraft.engine.chat.messages import Message
from redraft.retrain.data.closings import choose
from redraft.retrain.data.conversation import Conversation


class Topic(Struct, frozen=True):
    """Something to talk about, what to compare it with, and a short text about it."""

    name: str
    other: str
    text: str


def conversations() -> Iterator[Conversation]:
    """Every task of every topic; the topic is the family."""
    for topic in _topics():
        family = topic.name.replace(" ", "-")
        for number, wordings in enumerate(TASKS):
            name = f"plain-{family}-{number}"
            wording = choose(wordings, name)
            audience, tone = choose(AUDIENCES, f"{name} audience"), choose(TONES, f"{name} tone")
            count = choose(COUNTS, f"{name} count")
            text = wording.format(
                topic=topic.name, other=topic.other, text=topic.text, audience=audience, tone=tone, count=count
            )
            yield Conversation(name, "plain", family, (), (Message(role="user", content=text),))


def _topics() -> list[Topic]:
    file = resources.files("redraft.retrain.data.sources").joinpath("plain_topics.json")
    return msgspec.json.decode(file.read_bytes(), type=list[Topic])


AUDIENCES = (
    "a ten-year-old",
    "a new colleague",
    "my grandmother",
    "a high-school class",
    "a busy manager",
    "a curious beginner",
    "an exchange student",
    "someone who has never heard of it",
)
TONES = ("friendly", "formal", "cheerful", "matter-of-fact", "apologetic", "enthusiastic", "polite", "concise")
COUNTS = ("three", "four", "five", "six", "seven")

TASKS = (
    ("Explain {topic} to {audience}.", "How would you explain {topic} to {audience}?"),
    ("Compare {topic} with {other}.", "What are the main differences between {topic} and {other}?"),
    (
        "Make a plan for getting started with {topic} in one weekend.",
        "Plan a weekend in which I learn the basics of {topic}.",
    ),
    (
        "Write a {tone} e-mail to a friend about {topic}.",
        "Draft a {tone} e-mail that invites my neighbours to an evening about {topic}.",
    ),
    ("Summarise this paragraph in one sentence:\n\n{text}", "Give me the gist of the following:\n\n{text}"),
    ("Rewrite the following in a {tone} tone:\n\n{text}", "Put this in simpler words:\n\n{text}"),
    ("List {count} facts about {topic}.", "Name {count} things worth knowing about {topic}."),
    (
        "Read the text and say in one sentence what it is about.\n\nText: {text}",
        "{text}\n\nWhat is the most important point here?",
    ),
    ("What are common mistakes people make with {topic}?", "Which misunderstandings about {topic} are common?"),
    ("Write a short poem about {topic}.", "Write a haiku about {topic}, then explain it."),
    ("Give me {count} questions for a quiz about {topic}.", "Write {count} quiz questions on {topic}, with answers."),
    ("What is the history of {topic}, in a few sentences?", "How did {topic} develop over time?"),
    ("Turn this into a bulleted list:\n\n{text}", "Pull the key points out of this text as bullets:\n\n{text}"),
    ("What do I need to buy to begin with {topic}?", "What would a checklist for {topic} contain?"),
    (
        "Write a headline and a first paragraph for an article on {topic}.",
        "Suggest {count} titles for a talk on {topic}.",
    ),
    ("Argue for and against {topic}.", "What are the advantages and drawbacks of {topic}?"),
    ("Tell a very short story in which {topic} matters.", "Write the opening of a story about {topic}."),
    ("Describe {topic} without using technical terms.", "Describe {topic} in exactly two sentences."),
    ("Translate this into French:\n\n{text}", "Translate the following text into Spanish:\n\n{text}"),
    (
        "Is the following text factual or an opinion, and why?\n\n{text}",
        "What questions does this text leave open?\n\n{text}",
    ),
    ("What should I know about {topic} before I talk to an expert?", "What would an expert on {topic} do all day?"),
    (
        "Write a dialogue between two people who disagree about {topic}.",
        "Write an interview with someone who loves {topic}.",
    ),
    ("Recommend a way to teach {topic} to {audience}.", "Outline a 20-minute lesson on {topic} for {audience}."),
    ("Which is better for a beginner, {topic} or {other}?", "When would you choose {other} over {topic}?"),
    ("Make a table of the pros and cons of {topic}.", "Put the key terms of {topic} and their meanings in a table."),
)
