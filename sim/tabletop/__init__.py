"""A light language-conditioned manipulation suite: one Panda, a table, coloured objects, five families of tasks."""

from sim.tabletop.suite import TabletopConfig, TabletopSuite
from sim.tabletop.task_scene import TabletopScene

__all__ = ["TabletopConfig", "TabletopScene", "TabletopSuite"]
