"""Fenced code blocks and links of the project's Markdown files."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]

_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")


def blocks(path: Path, language: str) -> list[str]:
    """The bodies of the file's fenced blocks in one language, in order."""
    return [body for found, body in _BLOCK.findall(path.read_text()) if found == language]


def links(path: Path) -> list[str]:
    """Targets of the file's links, without their fragments."""
    return _LINK.findall(path.read_text())
