"""The built-in reducers."""

import numpy as np
import pytest

from p2pnode.training.values.reducers import BUILT_IN, reduced


def test_replace_takes_the_update():
    """The former value does not matter."""
    assert reduced("replace", [1], "new") == "new"


@pytest.mark.parametrize(("value", "update", "result"), [(None, 3, 3), (2, 3, 5), (2, 0.5, 2.5)])
def test_add_sums_numbers(value, update, result):
    """A key without a value begins with its first update."""
    assert reduced("add", value, update) == result


def test_add_sums_arrays_and_leaves_both_as_they_were():
    """The sum is a new array."""
    value, update = np.ones(3), np.arange(3.0)
    np.testing.assert_array_equal(reduced("add", value, update), [1, 2, 3])
    np.testing.assert_array_equal(value, 1)


@pytest.mark.parametrize(("value", "update"), [("a", "b"), ([1], [2]), (None, "a"), (True, 1), (1, {"a": 1})])
def test_add_refuses_what_is_no_number(value, update):
    """Text, lists and booleans are not added, not even to nothing."""
    with pytest.raises(TypeError, match="numbers and arrays"):
        reduced("add", value, update)


def test_add_refuses_arrays_of_different_shapes():
    """No silent broadcasting: (3,) and (3, 1) would make (3, 3)."""
    with pytest.raises(ValueError, match="shapes"):
        reduced("add", np.ones(3), np.ones((3, 1)))


def test_pull_is_not_built_in():
    """The user's function is never run in the daemon."""
    assert "pull" not in BUILT_IN
    with pytest.raises(ValueError, match="pull"):
        reduced("pull", 1, 2)
