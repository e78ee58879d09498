"""From the words of a user to a suite with tasks."""

from __future__ import annotations

import pytest

from sim.libero.suite import LiberoConfig
from sim.suites import make_suite, select_tasks
from sim.tabletop.suite import TabletopConfig, TabletopSuite

CONFIG = TabletopConfig(image_size=32, horizon=17)


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("tabletop", CONFIG.tasks),
        ("tabletop/stack", ("stack",)),
        ("tabletop/pick_up_red_cube", ("pick_up_red_cube",)),
        ("tabletop/pick_up_red_cube, tabletop/stack", ("pick_up_red_cube", "stack")),
        ("tabletop/all", ("all",)),
    ],
)
def test_tasks_change_and_nothing_else(text: str, tasks: tuple[str, ...]) -> None:
    selected = select_tasks(CONFIG, text)
    assert selected.tasks == tasks
    assert selected.model_dump(exclude={"tasks"}) == CONFIG.model_dump(exclude={"tasks"})
    suite = make_suite(selected)
    assert isinstance(suite, TabletopSuite)
    assert suite.spec.image_size == (32, 32)


def test_another_suite_keeps_what_the_policy_sees() -> None:
    selected = select_tasks(CONFIG, "libero_spatial/5, libero_goal")
    assert isinstance(selected, LiberoConfig)
    assert selected == LiberoConfig(tasks=("libero_spatial/5", "libero_goal"), image_size=32)
    assert select_tasks(selected, "libero_10").tasks == ("libero_10",)
    assert select_tasks(selected, "robosuite/Lift, robosuite/Stack").tasks == ("Lift", "Stack")
    assert select_tasks(selected, "tabletop").tasks == TabletopConfig().tasks


def test_suites_of_different_kinds_are_not_mixed() -> None:
    with pytest.raises(ValueError, match=r"mixes suites of different kinds \(tabletop, libero\)"):
        select_tasks(CONFIG, "tabletop,libero_goal")


def test_a_family_stands_for_its_tasks() -> None:
    suite = make_suite(select_tasks(CONFIG, "tabletop/push_to"))
    assert len(suite.tasks) > 1
    assert all(task.startswith("tabletop/push_") for task in suite.tasks)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "tabeltop",
            r"^unknown suite 'tabeltop'\. Did you mean 'tabletop'\? Suites: libero_spatial, .*, robosuite, tabletop$",
        ),
        ("tabletop,tabletpo/stack", r"^unknown suite 'tabletpo'\. Did you mean 'tabletop'\?"),
        ("kitchen", r"^unknown suite 'kitchen'\. Suites: libero_spatial, \.\.\., robosuite, tabletop$"),
        ("", r"^unknown suite ''\. Suites: libero_spatial, \.\.\., robosuite, tabletop$"),
        ("tabletop/stak", r"^unknown task 'stak'; did you mean 'stack'\? Choices: all, pick_up, .*stack"),
        ("tabletop/pick_up_red_cub", r"^unknown task 'pick_up_red_cub'; did you mean 'pick_up_red_cube'\?"),
        ("tabletop/stack,tabletop/zzz", r"^unknown task 'zzz'; did you mean"),
    ],
)
def test_a_misspelt_name_is_answered_with_the_nearest(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_tasks(CONFIG, text)
