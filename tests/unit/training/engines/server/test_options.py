"""The options of a parameter server."""

import pytest

from p2pnode.training.engines.server.acceptance import EachAtOnce, Quota, WholeStep
from p2pnode.training.engines.server.options import ServerOptions


def test_the_barrier_and_the_quota_choose_the_policy():
    """bsp keeps a step together, a quota makes it synchronous SGD, all others count updates at once."""
    kinds = {name: type(ServerOptions(barrier=name).make_policy()) for name in ("bsp", "ssp", "asp", "pbsp", "pssp")}
    assert kinds == dict.fromkeys(("ssp", "asp", "pbsp", "pssp"), EachAtOnce) | {"bsp": WholeStep}
    assert isinstance(ServerOptions(barrier="asp", grads_to_wait=2).make_policy(), Quota)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"barrier": "psp"}, "no barrier 'psp'"),
        ({"staleness": -1}, "staleness"),
        ({"min_workers": 0}, "min_workers"),
        ({"barrier": "asp", "version_tolerance": 1}, "needs grads_to_wait"),
        ({"barrier": "bsp", "grads_to_wait": 2}, "asp"),
    ],
)
def test_impossible_options_are_refused(options, said):
    """The error names the option and why."""
    with pytest.raises(ValueError, match=said):
        ServerOptions(**options)


def test_equal_options_have_equal_texts():
    """Servers and workers compare them."""
    assert ServerOptions().text() == ServerOptions(barrier="bsp").text()
    assert ServerOptions().text() != ServerOptions(staleness=3).text()
