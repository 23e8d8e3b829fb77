"""Numbers, ports and threads of several nodes on one machine, and the option that starts them."""

from __future__ import annotations

import pytest

from p2pnode.local_plan import OWN, PlannedNode, inherited, plan, with_count, with_servers


def test_nodes_share_the_cores_and_take_free_ports() -> None:
    """Numbers from 1, free ports, and an equal share of the cores, of which each node has at least one."""
    assert plan(3, (), 8) == [PlannedNode(number, 0, 0, 2) for number in (1, 2, 3)]
    assert {node.threads for node in plan(4, (), 2)} == {1}


def test_a_node_beside_others_takes_the_lowest_free_number_and_its_share() -> None:
    """Directories of nodes that have ended are used again; running ones count for the cores."""
    assert plan(1, {1, 3}, 12) == [PlannedNode(2, 0, 0, 4)]
    assert [node.number for node in plan(2, {1, 3}, 12)] == [2, 4]


def test_a_port_is_the_first_of_a_row() -> None:
    """Node N takes the N-th from it on; a row that leaves the range, or meets the other one, is an error."""
    nodes = plan(2, {1}, 4, port=20000, status_port=30000)
    assert [(node.port, node.status_port) for node in nodes] == [(20001, 30001), (20002, 30002)]
    with pytest.raises(ValueError, match="node 2 would need port 65536"):
        plan(2, (), 4, port=65535)
    with pytest.raises(ValueError, match="port 20001 would be used twice"):
        plan(2, (), 4, port=20000, status_port=20001)


def test_a_new_node_takes_over_the_settings_that_are_not_one_node_s_own() -> None:
    """The task is that of the node here; ports and threads are not, and what was chosen for this start is kept."""
    settings = {"training.task": "mnist", "training.local_steps": 20, "node.port": 9000, "training.threads": 4}

    assert inherited(settings, {"training.local_steps"}) == {"training.task": "mnist"}
    assert "node.state_dir" in OWN


def test_the_first_nodes_to_start_are_the_servers() -> None:
    """The others are workers, whatever role the settings name; without servers the settings decide. More servers than
    nodes are an error, and a node that is added to others takes no role over."""
    nodes = plan(3, {1}, 4)

    assert [(node.number, node.role) for node in with_servers(nodes[::-1], 1)] == [
        (4, "server"),
        (3, "peer"),
        (2, "peer"),
    ]
    assert with_servers(nodes, 0) == nodes
    with pytest.raises(ValueError, match="4 servers are more than the 3 nodes"):
        with_servers(nodes, 4)
    assert "node.role" in OWN


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--local"], ["--local", "1"]),
        (["--local", "3"], ["--local", "3"]),
        (["--local", "--task", "digits"], ["--local", "1", "--task", "digits"]),
        (["--run", "--local", "--local"], ["--run", "--local", "--local", "1"]),
        (["--local=3", "--debug"], ["--local=3", "--debug"]),
        (["--local", "--servers", "1", "train"], ["--local", "1", "--servers", "1", "train"]),
        (["--local", "-1"], ["--local", "-1"]),
        (["--local", "--", "train", "--local"], ["--local", "1", "--", "train", "--local"]),
        (["--local", "train", "--local"], ["--local", "1", "train", "--local"]),
        (["train", "--local"], ["train", "--local"]),
        (["--run"], ["--run"]),
        ([], []),
    ],
    ids=str,
)
def test_the_number_of_nodes_may_be_left_out(given: list[str], expected: list[str]) -> None:
    """Without a number one node is meant; values of other options and the arguments of a program stay as they are."""
    assert with_count(given, {"--run", "--task", "--servers"}, stops_at_program=True) == expected
