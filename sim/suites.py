"""Which suite a config asks for: the one place where a suite's `type` tag becomes a class."""

from __future__ import annotations

import difflib
from typing import assert_never

from pydantic import ValidationError

from sim.model import check_mujoco_version
from sim.rendering import ensure_gl_backend
from sim.tabletop.suite import TabletopConfig, TabletopSuite

SuiteConfig = TabletopConfig
SUITES = ("tabletop",)


def make_suite(config: SuiteConfig) -> TabletopSuite:
    """The suite of a config.

    Raises:
        OSError: No off-screen OpenGL library; names the packages to install.
        ImportError: Another MuJoCo than the pinned one.
    """
    check_mujoco_version()
    ensure_gl_backend()  # here, where the user sees it, not later in a simulation thread
    match config:
        case TabletopConfig():
            return TabletopSuite(config)
        case _:
            assert_never(config)


def select_tasks(config: SuiteConfig, text: str) -> SuiteConfig:
    """The config with other tasks.

    Args:
        config: Keeps everything else, and its tasks where the text names only the suite.
        text: "<suite>", "<suite>/<task or family>", or several of these with commas between.

    Raises:
        ValueError: Unknown suite or task; tells the nearest name and what is there.
    """
    tasks: list[str] = []
    for name in (part.strip() for part in text.split(",")):
        suite, _, task = name.partition("/")
        if suite not in SUITES:
            near = difflib.get_close_matches(suite, SUITES, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"unknown suite {suite!r}.{hint} Suites: {', '.join(SUITES)}")
        tasks += [task] if task else config.tasks
    try:
        return type(config)(**{**config.model_dump(), "tasks": tuple(tasks)})
    except ValidationError as error:
        problems = [item["msg"].removeprefix("Value error, ") for item in error.errors()]
        raise ValueError("; ".join(problems)) from error
