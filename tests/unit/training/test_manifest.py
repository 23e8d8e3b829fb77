"""The manifest: every field is compared, and a mismatch has both values."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pnode.training.layout import Layout, LayoutEntry
from p2pnode.training.manifest import PROTOCOL, Manifest, Mismatch, compare, explain, propose
from p2pnode.training.settings import BarrierSettings, ExchangeSettings, TrainingSettings
from p2pnode.training.shards.outer_rule import Rule
from p2pnode.training.trainer_link.interface import TrainerHello

WEIGHT = LayoutEntry("0.weight", (4, 3), "float32", "parameter", 0, 12)
BIAS = LayoutEntry("1.bias", (4,), "float32", "parameter", 12, 4)
MEAN = LayoutEntry("2.mean", (4,), "float32", "buffer", 16, 4)
LAYOUT = Layout((WEIGHT, BIAS, MEAN))

HELLO = TrainerHello(
    layout=LAYOUT,
    task="digits",
    task_version="1",
    frozen_digest="f0",
    device="cpu",
    pid=1,
    frozen={"0.base": "float32 [2] aa", "0.scale": "float32 [1] bb"},
)

#: For every field another value than `proposal()` has, and what must be read in the message.
OTHERS: dict[str, tuple[Any, str, str]] = {
    "protocol": (PROTOCOL + 1, str(PROTOCOL), str(PROTOCOL + 1)),
    "run": ("other-run", "my-run", "other-run"),
    "genesis": ("ee" * 16, "0b" * 16, "ee" * 16),
    "task": ("mnist", "digits", "mnist"),
    "task_version": ("1.0.1", "1", "1.0.1"),
    "layout": (Layout((WEIGHT, MEAN)), "1.bias", "2.mean"),
    "frozen_digest": ("f1", "f0", "f1"),
    "shards": (128, "16", "128"),
    "rule": (Rule(0.7, 0.9), "outer_momentum=0.5", "outer_momentum=0.9"),
    "weight": ("samples", "population", "samples"),
    "replicas": (0, "1", "0"),
    "local_steps": (11, "10", "11"),
    "barrier_family": ("bsp", "relaxed", "bsp"),
    "max_steps": (500, "0", "500"),
    "until": ("loss<=0.1", "accuracy>=0.95", "loss<=0.1"),
    "frozen": (HELLO.frozen | {"0.scale": "float32 [1] cc"}, "0.scale float32 [1] bb", "0.scale float32 [1] cc"),
}


def proposal(method: str = "pssp", hello: TrainerHello = HELLO) -> Manifest:
    return propose(
        run="my-run",
        genesis=b"\x0b" * 16,
        hello=hello,
        training=TrainingSettings(until="accuracy>=0.95"),
        barrier=BarrierSettings(method=method),
        exchange=ExchangeSettings(),
    )


def test_equal_manifests_have_no_mismatch() -> None:
    """Two nodes with the same model and settings match, also after encoding and decoding."""
    mine = proposal()
    theirs = msgspec.msgpack.decode(msgspec.msgpack.encode(mine), type=Manifest)

    assert theirs == mine
    assert compare(mine, theirs) == []


@pytest.mark.parametrize("field", Manifest.__struct_fields__)
def test_a_difference_in_any_field_names_both_values(field: str) -> None:
    """One differing field gives one mismatch, with the own value and the swarm's."""
    value, mine_shows, theirs_shows = OTHERS[field]
    mine = proposal()
    theirs = msgspec.structs.replace(mine, **{field: value})

    (found,) = compare(mine, theirs)
    (mirrored,) = compare(theirs, mine)

    assert found.field == field
    assert mine_shows in found.mine
    assert theirs_shows in found.theirs
    assert (mirrored.mine, mirrored.theirs) == (found.theirs, found.mine)


def test_the_most_telling_difference_comes_first() -> None:
    """If everything differs, everything is listed: the swarm first, then the model, then the settings."""
    mine = proposal()
    theirs = msgspec.structs.replace(mine, **{field: value for field, (value, _, _) in OTHERS.items()})

    fields = [item.field for item in compare(mine, theirs)]

    # Where the frozen tensors are named, the digest of them all says nothing more.
    assert sorted(fields) == sorted(OTHERS.keys() - {"frozen_digest"})
    assert fields[:6] == ["protocol", "run", "genesis", "task", "task_version", "layout"]


@pytest.mark.parametrize(
    ("theirs", "mine_shows", "theirs_shows"),
    [
        ({"0.base": "float32 [2] aa"}, "0.scale float32 [1] bb", "0.scale is not frozen"),
        ({"0.base": "x", "0.scale": "y"}, "0.base float32 [2] aa, and 1 more", "0.base x, and 1 more"),
        ({}, "0.base float32 [2] aa, and 1 more", "0.base is not frozen, and 1 more"),
    ],
    ids=["trained there", "two", "nothing frozen there"],
)
def test_a_frozen_tensor_that_differs_is_named(theirs: dict[str, str], mine_shows: str, theirs_shows: str) -> None:
    """The first one, and how many others."""
    mine = proposal()

    (found,) = compare(mine, msgspec.structs.replace(mine, frozen=theirs, frozen_digest="f1"))

    assert (found.mine, found.theirs) == (mine_shows, theirs_shows)


def test_the_sentence_names_the_peer_and_all_values() -> None:
    """The sentence for the user names the peer, the fields and both values."""
    text = explain([Mismatch("shards", "64", "128"), Mismatch("weight", "sum", "population")], peer="ab12")

    assert "ab12" in text
    assert "shards: mine 64, theirs 128" in text
    assert "weight: mine sum, theirs population" in text


@pytest.mark.parametrize(
    ("change", "mine_shows", "theirs_shows"),
    [
        ({"shape": (3, 4)}, "[4, 3]", "[3, 4]"),
        ({"name": "0.kernel"}, "0.weight", "0.kernel"),
        ({"dtype": "bfloat16"}, "float32", "bfloat16"),
        ({"kind": "buffer"}, "parameter", "buffer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_first_differing_tensor_is_named(change: dict[str, Any], mine_shows: str, theirs_shows: str) -> None:
    """Of two models that differ in several tensors the first difference is named."""
    other = msgspec.structs.replace(WEIGHT, **change)
    later = msgspec.structs.replace(BIAS, name="1.other")
    theirs = msgspec.structs.replace(proposal(), layout=Layout((other, later, MEAN)))

    (found,) = compare(proposal(), theirs)

    assert mine_shows in found.mine
    assert theirs_shows in found.theirs
    assert "1.other" not in found.theirs


@pytest.mark.parametrize("shorter", [Layout((WEIGHT, BIAS)), Layout(())])
def test_a_model_with_more_tensors_gives_the_counts(shorter: Layout) -> None:
    """If one model has additional tensors at the end, the numbers of tensors and values are named."""
    theirs = msgspec.structs.replace(proposal(), layout=shorter)

    (found,) = compare(proposal(), theirs)

    assert found.mine == "3 tensors of 20 values"
    assert found.theirs == f"{len(shorter.entries)} tensors of {shorter.total} values"


@pytest.mark.parametrize("method", ["asp", "bsp", "ssp", "pbsp", "pssp", "a.b:c"])
def test_only_bsp_is_another_family(method: str) -> None:
    """Nodes may differ in their barriers, except for bsp, under which deltas become visible at another time."""
    mismatches = compare(proposal("pssp"), proposal(method))

    assert [item.field for item in mismatches] == (["barrier_family"] if method == "bsp" else [])


def test_what_is_a_nodes_own_is_not_in_the_manifest() -> None:
    """Device and process may differ between the machines of a swarm."""
    hello = msgspec.structs.replace(HELLO, device="cuda:1", pid=99)

    assert compare(proposal(), proposal(hello=hello)) == []


def test_the_rule_is_that_of_the_settings() -> None:
    """Outer learning rate, momentum and robust rule belong to the swarm, not to each node."""
    made = propose(
        run="r",
        genesis=b"\x01\xff",
        hello=HELLO,
        training=TrainingSettings(local_steps=3, max_steps=7),
        barrier=BarrierSettings(),
        exchange=ExchangeSettings(
            outer_lr=0.25, outer_momentum=0.125, shards=8, replicas=0, weight="sum", robust="clip"
        ),
    )

    assert proposal().shards == 16
    assert (made.rule, made.shards, made.replicas, made.weight) == (Rule(0.25, 0.125, "clip"), 8, 0, "sum")
    assert (made.genesis, made.local_steps, made.max_steps, made.until) == ("01ff", 3, 7, "")
