"""Attacks by one member of five: how long the others are held up, what is left of it, and how they start again.

Each attack runs against four honest nodes (`tests.harness.swarms.swarm`) for a minute, then its node is gone. The table
says

* `harmless`: seconds until the others make at least 80 % of their former steps again, and go on doing so;
* `rate`: their steps from the sixteenth second of the attack on, as a share of those before it;
* `lasting`: what is wrong twenty seconds after the node has gone, if anything is;
* `left out`: deltas of the others, by shard, that one shard lacks and another has, twenty seconds after it has gone;
* `found`: seconds until a first honest node, and a last one, had left the member out for an audit;
* `restart`: their steps after all of them were killed and started again, as that share, or what is wrong then.
What takes the node's processor or its line does not show here, because time is virtual:
`tests/process/test_member_limits.py` has those with real sockets.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from tests.harness.attacks import answered, asked, drawn_out, membership_lies, owned, sent
from tests.harness.attacks.attacker import ATTACK_S, HONEST, LIAR, SHARDS, SIZE, Attack, Attacker
from tests.harness.environment.virtual_loop import START_S, VirtualLoop
from tests.harness.swarms.swarm import Swarm
from tests.harness.trainers.stub_trainer import StubTrainer
from training.exchange.store.repair_log import identities_of, to_mend
from training.exchange.swarm_view import PASSABLE_STEPS
from training.shards.applied import DeltaId

#: Every attack by name: those by what a member sends, by what it answers, and by what it owns.
ATTACKS: dict[str, Attack] = (
    sent.ATTACKS | answered.ATTACKS | owned.ATTACKS | drawn_out.ATTACKS | asked.ATTACKS | membership_lies.ATTACKS
)
BEFORE_S, AFTER_S, RESTART_S = 30.0, 20.0, 30.0
#: From this second on the rate of the others counts; a window of so many seconds is looked at.
HARMLESS_AFTER_S, WINDOW_S = 15.0, 10.0
ENOUGH = 0.8


@dataclass
class Row:
    """What an attack did to the others."""

    name: str
    harmless_s: float | None = None
    rate: float = 0.0
    lasting: str = ""
    after: float = 0.0
    left_out: int = 0
    restart: str = ""
    distrusted: int = 0
    #: Seconds until a first honest node, and a last one, left the member out for an audit; none has: 0.
    found_s: tuple[float, float] = (0.0, 0.0)
    #: Shards of deltas that were sent again to its successors.
    sent_again: int = 0
    #: Steps of the honest nodes, by second.
    log: list[float] = field(default_factory=list)

    def markdown(self) -> str:
        harmless = "not within a minute" if self.harmless_s is None else f"{self.harmless_s:.0f} s"
        lasting = self.lasting or "nothing"
        return f"| {self.name} | {harmless} | {self.rate:.0%} | {lasting} | {self.left_out} | {self.restart} |"


def wrong(swarm: Swarm) -> str:
    """What is not as it should be with the honest nodes; empty if nothing is."""
    stores = [swarm.hosts[name].living.exchange.store for name in HONEST]
    for shard in range(SHARDS):
        owners = [store.owned[shard] for store in stores if shard in store.owned]
        if len(owners) != 1:
            return f"shard {shard} has {len(owners)} owners"
        if owners[0].backup is None:
            return f"shard {shard} has no backup"
        newest = max(swarm.hosts[name].living.progress.step for name in HONEST)
        if owners[0].state.folded_step > newest + PASSABLE_STEPS:
            return f"the barrier of step {owners[0].state.folded_step} has passed at the owner of shard {shard}"
        if not owners[0].state.is_in_range():
            return f"the values of shard {shard} are out of range"
    honest = [swarm.hosts[name].living.overlay.node_id.hex()[:8] for name in HONEST]
    for record in swarm.of("member_unreliable"):
        if record.fields["reason"] == "audit" and record.fields["source"] in honest:
            return f"{record.node} has left out an honest node for an audit"
    for name in HONEST:
        exchange = swarm.hosts[name].living.exchange
        others = [swarm.hosts[one].living.exchange.context.swarm.node_id for one in HONEST]
        if any(node not in exchange.view.trust for node in others):
            return f"{name} leaves out honest nodes"
        if unsettled := to_mend(exchange.store.superseded):
            return f"copies of shards {unsettled} to be settled"
        if len(exchange.push_client.outstanding_steps) > 2:
            return f"{len(exchange.push_client.outstanding_steps)} steps wait for their owners"
        if not np.isfinite(exchange.context.replica.vector).all():
            return "a replica has values that are not finite"
    return ""


def left_out(swarm: Swarm) -> int:
    """How many deltas of the honest nodes the owners of some shards have, and those of others have not, by shard. Those
    that travelled with a later delta are there under that one's identity."""
    stores = [swarm.hosts[name].living.exchange.store for name in HONEST]
    states = [store.owned[shard].state for store in stores for shard in store.owned]
    known = [identities_of(state) for state in states]
    # What a replica had is not known by identity.
    first = max(state.era_step for state in states) + 1
    count = 0
    for name in HONEST:
        living = swarm.hosts[name].living
        on_its_way = living.exchange.push_client.outstanding_steps
        for step in range(first, living.progress.step - 3):
            has = sum(DeltaId(living.overlay.node_id, living.incarnation, step) in one for one in known)
            count += (len(known) - has) if has and step not in on_its_way else 0
    taken_back = sum(one.fields["shards"] for one in swarm.of("deltas_taken_back") if one.node in HONEST)
    return max(0, count - taken_back)


def _made(swarm: Swarm) -> float:
    """Steps of an honest node, on average."""
    return sum(swarm.hosts[name].living.progress.step for name in HONEST) / len(HONEST)


async def _begin(swarm: Swarm) -> float:
    """Train undisturbed; returns the steps of an honest node in a second. The same for every attack."""
    swarm.start_many(len(HONEST) + 1, training__checkpoint_s=5.0)
    await swarm.until(
        lambda: len(swarm.running()) == 5 and min(host.living.progress.step for host in swarm.running()) >= 3,
        within_s=100,
        what="three steps of all",
    )
    await asyncio.sleep(10.0)
    before = _made(swarm)
    await asyncio.sleep(BEFORE_S)
    return (_made(swarm) - before) / BEFORE_S


async def _play(swarm: Swarm, row: Row, run: Attack, usual: float) -> None:
    clock = swarm.clock
    made = partial(_made, swarm)
    first, began_s = made(), clock.monotonic()
    liar = swarm.hosts[LIAR].living.overlay.node_id.hex()[:8]
    assault = asyncio.create_task(run(Attacker(swarm, random.Random(f"{row.name}"))), name=row.name)  # type: ignore[arg-type]
    while clock.monotonic() - began_s < ATTACK_S:
        await asyncio.sleep(1.0)
        row.log.append(made())
        assert max(swarm.hosts[name].living.progress.step for name in HONEST) < 10_000, "the others were taken along"
    assault.cancel()
    await asyncio.gather(assault, return_exceptions=True)
    row.rate = (row.log[-1] - row.log[int(HARMLESS_AFTER_S)]) / (ATTACK_S - HARMLESS_AFTER_S - 1.0) / usual
    row.harmless_s = _harmless_s([first, *row.log], usual)
    row.distrusted = sum(len(swarm.hosts[name].living.exchange.view.trust.distrusted()) for name in HONEST)
    if swarm.hosts[LIAR].task is not None:
        await swarm.kill(LIAR)
    await asyncio.sleep(AFTER_S)
    row.lasting, row.left_out = wrong(swarm), left_out(swarm)
    found = [
        one.t
        for one in swarm.of("member_unreliable")
        if one.fields == {**one.fields, "source": liar, "reason": "audit"}
    ]
    if found:
        row.found_s = found[0] - began_s + START_S, found[-1] - began_s + START_S
    row.sent_again = sum(one.fields["count"] for one in swarm.of("deltas_sent_again"))
    before = made()
    await asyncio.sleep(AFTER_S)
    row.after = (made() - before) / AFTER_S / usual
    if not row.lasting and row.after < ENOUGH:
        row.lasting = f"{row.after:.0%} of the steps"
    most = max(swarm.hosts[name].living.progress.step for name in HONEST)
    for name in HONEST:
        await swarm.kill(name)
    for name in HONEST:
        swarm.start(name, bootstrap=None if name == "n0" else "n0", training__checkpoint_s=5.0)
    await asyncio.sleep(RESTART_S)
    running = [host.name for host in swarm.running()]
    if sorted(running) != sorted(HONEST) or any(swarm.hosts[name].living.exchange is None for name in HONEST):
        row.restart = f"{len(running)} of {len(HONEST)} run"
        return
    before = made()
    await asyncio.sleep(AFTER_S)
    share = (made() - before) / AFTER_S / usual
    row.restart = wrong(swarm) or f"{share:.0%}"
    if max(swarm.hosts[name].living.progress.step for name in HONEST) > 3 * most + 100:
        row.restart = "steps that were never trained"


def _harmless_s(log: list[float], usual: float) -> float | None:
    """The first second from which on every window has enough steps; None if there is none."""
    window = int(WINDOW_S)
    good = [log[at + window] - log[at] >= ENOUGH * usual * WINDOW_S for at in range(len(log) - window)]
    bad = [at for at, is_good in enumerate(good) if not is_good]
    if not bad:
        return 0.0
    return None if bad[-1] == len(good) - 1 else float(bad[-1] + 1)


def _step_s(generator: random.Random, _step: int) -> float:
    """Nearly equal steps, so that few of them show a rate."""
    return generator.uniform(0.8, 1.2)


def play(name: str, *, seed: int = 1, method: str = "pbsp") -> Row:
    """Play one attack."""
    return history(seed, asked.METHODS.get(name, method), lambda: name)


def history(seed: int, method: str, choose: Callable[[], str]) -> Row:
    """Train, and play the attack that is chosen only then."""
    rows: list[Row] = []

    async def main() -> None:
        swarm = Swarm(
            seed=seed,
            settings={"exchange.shards": SHARDS, "barrier.method": method},
            make_trainer=lambda host: StubTrainer(host, SIZE, step_s=_step_s, start_s=0.3),
        )
        try:
            usual = await _begin(swarm)
            row = Row(choose())
            await _play(swarm, row, ATTACKS[row.name], usual)
            rows.append(row)
        finally:
            await swarm.stop()

    VirtualLoop().run(main(), limit_s=3600)
    return rows[0]
