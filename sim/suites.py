"""Which suite a config asks for: the one place where a suite's `type` tag becomes a class."""

from __future__ import annotations

import difflib
from typing import Annotated, assert_never

from pydantic import Field, ValidationError

from sim.adapters.gymnasium_suite import GymnasiumConfig, GymnasiumSuite
from sim.adapters.robosuite_suite import RobosuiteConfig, RobosuiteSuite
from sim.libero.suite import LiberoConfig, LiberoSuite
from sim.model import check_mujoco_version
from sim.rendering import ensure_gl_backend
from sim.tabletop.suite import TabletopConfig, TabletopSuite
from sim.world import Suite

SuiteConfig = Annotated[TabletopConfig | LiberoConfig | RobosuiteConfig | GymnasiumConfig, Field(discriminator="type")]
_BY_NAME: dict[str, type[TabletopConfig | LiberoConfig | RobosuiteConfig | GymnasiumConfig]] = {
    "tabletop": TabletopConfig,
    "libero": LiberoConfig,
    "robosuite": RobosuiteConfig,
}
"""Suites that a command may name; a Gymnasium environment needs an instruction, so it has to be configured."""


def make_suite(config: SuiteConfig) -> Suite:
    """The suite of a config.

    Raises:
        OSError: No off-screen OpenGL library; names the packages to install.
        ImportError: Another MuJoCo than the pinned one, or the package of the suite is not installed.
        ValueError: The suite does not have such tasks.
    """
    check_mujoco_version()
    ensure_gl_backend()  # here, where the user sees it, not later in a simulation thread
    match config:
        case TabletopConfig():
            return TabletopSuite(config)
        case LiberoConfig():
            return LiberoSuite(config)
        case RobosuiteConfig():
            return RobosuiteSuite(config)
        case GymnasiumConfig():
            return GymnasiumSuite(config)
        case _:
            assert_never(config)


def select_tasks(config: SuiteConfig, text: str) -> SuiteConfig:
    """The config with other tasks; of another suite, if the text names one.

    Args:
        config: Keeps everything else, and its tasks where the text names only the suite. For another suite it only
            keeps the cameras and the size of the images.
        text: "tabletop", "robosuite", a LIBERO suite, or "<suite>/<task>"; several of one kind with commas between.

    Raises:
        ValueError: Unknown suite or task, or suites of different kinds; tells the nearest name and what is there.
    """
    names = [name.strip() for name in text.split(",")]
    kinds = dict.fromkeys(_kind(name.partition("/")[0], config) for name in names)
    if len(kinds) > 1:
        raise ValueError(f"{text!r} mixes suites of different kinds ({', '.join(kinds)}); evaluate them one by one")
    (kind,) = kinds
    values = config.model_dump()
    if kind != config.type:
        values = {name: values[name] for name in ("cameras", "image_size")} | {"type": kind}
    make = _BY_NAME.get(kind, type(config))
    try:
        chosen = make(**values)
        tasks = [task for name in names for task in ([name] if kind == "libero" else _tasks_of(chosen, name))]
        return make(**{**chosen.model_dump(), "tasks": tuple(tasks)})
    except ValidationError as error:
        problems = [item["msg"].removeprefix("Value error, ") for item in error.errors()]
        raise ValueError("; ".join(problems)) from error


def _kind(suite: str, config: SuiteConfig) -> str:
    """The config type that a suite's name belongs to."""
    if suite.startswith("libero_"):  # which ones are installed is found out when the suite is made
        return "libero"
    choices = dict.fromkeys([config.type, *_BY_NAME])
    if suite not in choices or suite == "libero":
        listed = ["libero_spatial, ..." if name == "libero" else name for name in sorted(choices)]
        near = difflib.get_close_matches(suite, [name for name in choices if name != "libero"], n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown suite {suite!r}.{hint} Suites: {', '.join(listed)}")
    return suite


def _tasks_of(config: SuiteConfig, name: str) -> tuple[str, ...]:
    _, _, task = name.partition("/")
    return (task,) if task else config.tasks
