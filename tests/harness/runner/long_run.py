"""Further cases of a test that prove the same as its first ones: the long run has them (`pytest -m long`)."""

from __future__ import annotations

from typing import Any

import pytest


def more(*cases: Any) -> list[Any]:
    """Cases for `pytest.mark.parametrize` behind those that `make test` runs. A tuple is the arguments of one case."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.long) for case in cases]
