"""What the robot is told: for each family a canonical sentence and paraphrases of it. All lower case, no full stop."""

from __future__ import annotations

import numpy as np

from sim.tabletop.tasks import Family, Task

TEMPLATES: dict[Family, tuple[str, ...]] = {
    "pick_up": (
        "pick up the {item}",
        "lift the {item}",
        "grab the {item} and raise it",
        "take the {item} off the table",
    ),
    "put_on": (
        "put the {item} on the {place}",
        "place the {item} on the {place}",
        "set the {item} down on the {place}",
        "pick up the {item} and leave it on the {place}",
    ),
    "put_in": (
        "put the {item} in the {place}",
        "place the {item} inside the {place}",
        "drop the {item} into the {place}",
        "pick up the {item} and leave it in the {place}",
    ),
    "push_to": (
        "push the {item} to the {place}",
        "slide the {item} onto the {place}",
        "move the {item} over the table to the {place}",
        "shove the {item} to the {place}",
    ),
    "stack": (
        "stack the {item} on the {place}",
        "put the {item} on top of the {place}",
        "place the {item} on the {place}",
        "build a tower with the {item} on the {place}",
    ),
}
"""Per family; the first one is canonical. `{item}` is the object to move, `{place}` where it goes."""


def instruction(task: Task, rng: np.random.Generator | None) -> str:
    """The sentence for a task: canonical without a generator, else a template drawn uniformly."""
    templates = TEMPLATES[task.family]
    template = templates[0] if rng is None else templates[rng.integers(len(templates))]
    return template.format(item=_spoken(task.item), place=_spoken(task.place))


def _spoken(name: str) -> str:
    return name.replace("_", " ")
