"""The measurable rules of the house: short files, short functions, ASCII, nothing that ties it to one machine."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (".ci", "configs", "docs", "plugins", "robots", "scripts", "sim", "tests", "vla_rl")
TEXT_SUFFIXES = {"", ".py", ".sh", ".md", ".toml", ".txt", ".yaml", ".yml"}

MAX_FILE_LINES, MAX_TEST_FILE_LINES, MAX_FUNCTION_LINES = 400, 500, 60
MACHINE_PATH = re.compile(r"(?<![\w.~*-])/(?:home|root|work|tmp|mnt|media|opt|Users)/\w")
"""Absolute paths that exist on somebody's machine only."""


def text_files() -> Iterator[Path]:
    """Every text file of the project, except what tools generate."""
    top_level = (path for path in ROOT.iterdir() if path.is_file() and path.name != ".git")  # a file in git worktrees
    yield from (path for path in top_level if path.suffix in TEXT_SUFFIXES)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*"):
            is_generated = "__pycache__" in path.parts or any(part.endswith(".egg-info") for part in path.parts)
            if path.is_file() and path.suffix in TEXT_SUFFIXES and not is_generated:
                yield path


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


TEXTS = sorted(text_files())
MODULES = [path for path in TEXTS if path.suffix == ".py"]


@pytest.mark.parametrize("folder", ["home", "tmp", "Users"])
def test_paths_of_one_machine_are_recognised(folder: str) -> None:
    assert MACHINE_PATH.search(f'folder = "/{folder}/me/runs"')
    assert not MACHINE_PATH.search(f"runs/{folder}/me, ~/{folder}/me, https://example.org/{folder}/me, /{folder}")


def test_the_rules_see_the_project() -> None:
    names = {name_of(path) for path in TEXTS}
    assert {"pyproject.toml", ".ci/run", "vla_rl/types.py", "sim/world.py", name_of(Path(__file__))} <= names


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_files_and_functions_are_short(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    limit = MAX_TEST_FILE_LINES if path.is_relative_to(ROOT / "tests") else MAX_FILE_LINES
    assert len(source.splitlines()) <= limit, f"more than {limit} lines; split the file by what it is about"
    too_long = {
        node.name: node.end_lineno - node.lineno + 1
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    }
    assert not too_long, f"functions of more than {MAX_FUNCTION_LINES} lines: {too_long}"


@pytest.mark.parametrize("path", TEXTS, ids=name_of)
def test_text_is_ascii_and_ties_to_no_machine(path: Path) -> None:
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        assert line.isascii(), f"line {number} is not ASCII: {line!r}"
        found = MACHINE_PATH.search(line.decode("ascii"))
        assert not found, f"line {number} names a path of one machine: {line!r}; make it relative or an argument"
