"""Which suite a config asks for: the one place where a suite's `type` tag becomes a class."""

from __future__ import annotations

from typing import assert_never

from sim.tabletop.suite import TabletopConfig, TabletopSuite

SuiteConfig = TabletopConfig


def make_suite(config: SuiteConfig) -> TabletopSuite:
    """The suite of a config."""
    match config:
        case TabletopConfig():
            return TabletopSuite(config)
        case _:
            assert_never(config)
