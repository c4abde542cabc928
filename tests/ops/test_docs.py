"""What the documents say is what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from redraft.ops.config import reference

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "ops" / "docs").glob("*.md")]


def test_the_configuration_reference_is_current() -> None:
    current = (ROOT / "ops" / "docs" / "configuration.md").read_text()
    assert current == reference(), "write it again: redraft config reference > ops/docs/configuration.md"


def test_the_readme_is_short_enough_to_read() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) < 150


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_to_a_file_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []


def test_every_make_target_that_a_document_names_is_there() -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in DOCUMENTS:
        assert set(re.findall(r"(?:`|^)make (\w+)", document.read_text(), re.MULTILINE)) <= targets
