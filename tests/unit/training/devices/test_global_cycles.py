"""The global server: how the local steps of a cycle are divided among the trainers of all nodes."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from p2pnode.training.devices.global_cycles import CYCLES_KEPT, GlobalCycles, LeaseSteps, StepsLeased


class Client:
    """One node as it asks: it knows what it was told, and takes what it is allowed one step at a time."""

    def __init__(self, name: bytes, trainers: int, period: int) -> None:
        self.name, self.trainers, self.period = name, trainers, period
        self.cycle, self.allowed, self.total, self.used, self.is_closed = 0, 0, 0, 0, True

    def begin(self) -> None:
        self.cycle += 1
        self.allowed = self.total = self.used = 0
        self.is_closed = False

    def ask(
        self,
        server: GlobalCycles,
        *,
        wants: int = 1,
        now: float = 0.0,
        loss: float | None = None,
        is_lost: bool = False,
    ) -> StepsLeased:
        ask = LeaseSteps(b"", self.cycle, self.trainers, self.period, self.allowed, self.total, wants, loss)
        lease = server.lease(self.name, ask, now)
        if not is_lost:
            self.allowed, self.is_closed, self.total = lease.allowed, lease.is_closed, lease.total
        return lease

    def step(self, server: GlobalCycles, *, is_lost: bool = False) -> bool:
        """Take a local step, or ask for one; False: this cycle is over here."""
        if self.used == self.allowed:
            if self.is_closed:
                return False
            self.ask(server, is_lost=is_lost)
        if self.used < self.allowed:
            self.used += 1
        return True


def members(*sizes: int, period: int) -> tuple[GlobalCycles, list[Client]]:
    """A server that knows these nodes already, from a cycle before."""
    server = GlobalCycles()
    clients = [Client(b"%d" % number, trainers, period) for number, trainers in enumerate(sizes)]
    for client in clients:
        client.begin()
        client.ask(server, wants=0)
    return server, clients


@settings(derandomize=True, database=None, deadline=None, max_examples=80)
@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(1, 6), st.integers(0, 1 << 32))
def test_a_cycle_has_its_local_steps_whoever_asks_when(sizes: list[int], period: int, seed: int) -> None:
    """Every cycle gives exactly W · period local steps, at least one for each trainer, and nobody waits for another
    node: every request is answered with a step or with the end of the cycle. Answers may be lost."""
    generator = random.Random(seed)
    server, clients = members(*sizes, period=period)
    used: dict[int, dict[bytes, int]] = {}
    for client in clients:
        client.begin()
    while any(client.cycle < 6 for client in clients):
        client = generator.choice([one for one in clients if one.cycle < 6])
        if not client.step(server, is_lost=generator.random() < 0.2):
            used.setdefault(client.cycle, {})[client.name] = client.used
            client.begin()
    for cycle in range(2, 6):
        assert sum(used[cycle].values()) == sum(sizes) * period
        for client in clients:
            assert used[cycle][client.name] >= client.trainers
            if period == 1:
                assert used[cycle][client.name] == client.trainers


def test_a_fast_node_takes_more_of_a_cycle() -> None:
    """At speeds 1 : 4 the local steps of a cycle divide about as the speeds do."""
    server, (slow, fast) = members(1, 1, period=50)
    slow.begin()
    fast.begin()
    going = True
    while going:
        going = slow.step(server)
        for _ in range(4):
            going = fast.step(server) or going
    assert slow.used + fast.used == 100
    assert 70 <= fast.used <= 85


def test_leases_are_few() -> None:
    """A node asks about as often as the logarithm of its steps, not for each of them."""
    server, (one, other) = members(4, 4, period=64)
    one.begin()
    other.begin()
    asked = 0
    while not one.is_closed:
        one.used = one.allowed
        other.used = other.allowed
        one.ask(server, wants=4)
        other.ask(server, wants=4)
        asked += 1
    assert one.allowed + other.allowed == 512
    assert asked <= 12


def test_a_node_that_dies_leaves_its_share_to_nobody() -> None:
    """Without it a cycle has the steps of the others, and what it had taken is gone."""
    server, (one, other) = members(2, 2, period=4)
    one.begin()
    other.begin()
    other.ask(server, wants=3)
    server.lost(other.name)
    assert server.trainers == 2
    while one.step(server):
        pass
    assert one.used == 8


def test_a_silent_node_is_counted_no_more() -> None:
    """After the time of silence the others get their own shares, without a step kept for it."""
    server, (one, _) = members(1, 3, period=4)
    one.begin()
    while not one.is_closed:
        one.used = one.allowed
        one.ask(server, now=31.0)
    assert one.allowed == 4


def test_another_server_goes_on_from_what_the_nodes_say() -> None:
    """After a takeover in the middle of a cycle no step is given twice: the new server knows the total of the old."""
    old, (one, other) = members(1, 1, period=20)
    new = GlobalCycles()
    one.ask(new, wants=0)
    other.ask(new, wants=0)
    one.begin()
    other.begin()
    for _ in range(3):
        one.used, other.used = one.allowed, other.allowed
        one.ask(old)
        other.ask(old)
    one.ask(old, wants=0)
    assert one.total == one.allowed + other.allowed
    before = one.total
    while one.step(new):
        pass
    assert one.total >= before
    while other.step(new):
        pass
    assert one.used + other.used == 40


def test_an_old_cycle_is_not_kept_for_ever() -> None:
    """A node that asks for a cycle from long ago gets its own share, and the memory stays bounded."""
    server, (one, late) = members(1, 2, period=3)
    for _ in range(CYCLES_KEPT + 10):
        one.begin()
        one.ask(server)
    late.begin()
    lease = late.ask(server)
    assert (lease.allowed, lease.is_closed) == (6, True)
    assert len(server._cycles) <= CYCLES_KEPT


def test_the_lowest_loss_of_all_nodes_leads() -> None:
    """Of equal losses the node with the lower id does, and one that is not finite never."""
    server, (one, other) = members(1, 1, period=1)
    assert server.leader is None
    assert one.ask(server, loss=float("nan")).leader is None
    assert other.ask(server, loss=0.5).leader == other.name
    assert one.ask(server, loss=0.5).leader == one.name
    server.lost(one.name)
    assert server.leader == other.name
