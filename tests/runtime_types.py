"""The type checker that jaxtyping applies to every function of the project while the tests run."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from beartype import BeartypeConf, beartype

# As mypy: an int is accepted where a float is asked for.
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def typechecker(function: Callable[..., Any]) -> Callable[..., Any]:
    """Check arguments and results at each call.

    `Self` is left to mypy: jaxtyping hands over single methods, and beartype knows `Self` in whole classes only. So is
    `World`: checking for a protocol reads its properties (until Python 3.12); a world has no start before its first.
    """
    function.__annotations__ = {
        name: Any if re.search(r"\b(Self|World)\b", str(hint)) else hint
        for name, hint in function.__annotations__.items()
    }
    return _check(function)
