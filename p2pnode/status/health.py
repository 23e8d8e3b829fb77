"""How a node is, in one sentence, and what needs attention, each with what to do: `summary` and `health` of `/status`.

The summary says whether the node is connected, whether it learns, which peer it waits for, and what its user should do.
A finding is made from what is so now, so it goes when its cause has gone.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pnode import __version__
from p2pnode.config.rules import warnings_for
from p2pnode.lifecycle.entry import WAITING_HINT
from p2pnode.lifecycle.node import Node
from p2pnode.overlay.bootstrap.dialer import what_to_do
from p2pnode.overlay.ids import short
from p2pnode.overlay.report import OverlayReport
from p2pnode.status.findings import (
    device_findings,
    dispatch_findings,
    error,
    gpu_findings,
    line_findings,
    refusal_findings,
    version_findings,
    warning,
)
from p2pnode.status.schema import DispatchStatus, Finding, FinishingStatus, LineStatus, LostPeer, WaitingStatus
from p2pnode.status.sections import awaits_script, device_status, gpu_status
from p2pnode.training.exchange.exchange import Exchange
from p2pnode.training.exchange.timeouts import Obstacles
from p2pnode.training.findings.duplicate_data import ADVICE

#: A barrier that waits longer than this, and a delta that no owner has taken for longer, is a finding.
LONG_WAIT_S = 10.0
#: Phases of a node that wants no peers any more.
ENDING = ("finished", "leaving")
#: Lost peers that a sentence names, and owners that shards wait for.
NAMED_LOSSES, NAMED_OWNERS = 3, 3
#: What to do where no owner is in reach.
OWNER_LOST = (
    "start a node that others can reach again, with its state directory: it is dialled every few seconds, and what was "
    "trained meanwhile is merged. If it is lost for good, copy the state directory of this node to a machine that "
    "others can reach, remove identity.key and incarnation from the copy, and run `p2pnode start --reopen` there"
)
#: What a member says of an address at which its own swarm was, and what to do.
OTHER = "belongs to another swarm"
NEW_SWARM = (
    "the node at that address has begun a new swarm, without the model of this one: stop it, and give it its old state "
    "directory, or a copy of this node's without identity.key and incarnation, to be started with --reopen"
)


def findings(
    node: Node,
    overlay: OverlayReport,
    line: LineStatus | None,
    dispatch: DispatchStatus | None,
    lost: Sequence[LostPeer],
) -> list[Finding]:
    """What needs attention now."""
    found = [warning(advice.what, advice.do) for advice in warnings_for(node.config)]
    found += _joining(node)
    found += _apart(node, lost) or _alone(node, lost)
    found += _unreached(overlay, node.overlay.address.port, meant=node.config.node.client_only)
    if node.progress.stalled:
        what = "the trainer makes no progress: it is silent, or failing"
        do = "see trainer.log in the state directory; in a long pass call swarm.alive() or use swarm.busy()"
        found.append(error(what, do))
    if (failure := node.progress.trainer_failure) is not None:
        found.append(error(f"the trainer has failed: {failure[0]}", failure[1]))
    found += [warning(what, do) for what, do in [*node.trainer.findings, *node.data.warnings()]]
    found += dispatch_findings(dispatch, *node.dispatch.facts())
    found += device_findings(device_status(node.trainer)) + gpu_findings(gpu_status(node.gpus))
    found += _exchange(node, line)
    if node.loop is not None and (missing := node.loop.missing_evaluations()):
        found.append(warning(missing, "call swarm.evaluate with that metric, or leave training.until empty"))
    found += [warning(what, do) for what, do in refusal_findings(node.progress.refusals)]
    found += _same_data(node)
    found += _few_changes(node)
    found += version_findings(__version__, (peer.version for peer in node.overlay.members() if peer.version))
    waiting = node.gate.waiting
    if waiting is not None and node.environment.clock.monotonic() - waiting.since > LONG_WAIT_S:
        found.append(warning(f"waiting for {short(waiting.slowest)}", "see /peers"))
    return found


def summary(
    node: Node,
    lost: Sequence[LostPeer],
    waiting: WaitingStatus | None,
    finishing: FinishingStatus | None,
    dispatch: DispatchStatus | None,
) -> str:
    """One sentence."""
    population = node.overlay.population()
    others = max(0, round(population.estimate) - 1)
    about = "" if population.exact else "about "
    company = f"{about}{others} peer{'' if others == 1 else 's'}"
    if lost and not node.overlay.peers:
        company = f"0 peers ({last_loss(lost)})"
    step = node.progress.step
    match node.state:
        case "joining":
            return _join(node)
        case "waiting_for_nodes":
            need = node.config.training.min_nodes
            return f"waiting for nodes: have {node.nodes_ready()}, need {need}"
        case "waiting" if waiting is not None:
            return (
                f"at step {step} with {company}; waiting for {waiting.slowest[:8]} "
                f"at step {waiting.its_step} since {waiting.since_seconds:.1f} s"
            )
        case "training" | "waiting":
            return f"training at step {step} with {company}; waiting for no peer"
        case "stalled":
            return f"stalled at step {step}: the trainer makes no progress; the node continues to own its shards"
        case "finished" | "leaving" if finishing is not None:
            left = f"{finishing.deadline_seconds:.0f} s left"
            return f"finished at step {step} ({finishing.what}); waiting for the script to end by itself, {left}"
        case "serving":
            return f"master of the records, with {company}; {_serving(dispatch)}"
        case state:
            return f"{state} at step {step} with {company}"


def _join(node: Node) -> str:
    failures = "; ".join(f"{address}: {reason}" for address, reason in node.overlay.failures.items())
    if failures:
        return f"joining; {failures}"
    if node.overlay.genesis is not None and awaits_script(node):
        return "joining: the script runs, and has not called p2pnode.attach (or p2pnode.engine) yet"
    if node.exchange is None or (download := node.exchange.pull_client.download) is None:
        return "joining: starting the trainer and looking for peers"
    done, total, _ = download
    waits = waits_for(node.exchange.pull_client.obstacles, node.environment.clock.monotonic())
    share = f"joining: {100 * done // max(1, total)} % of the model is here"
    return f"{share}; shards wait: {waits}" if waits else share


def _serving(status: DispatchStatus | None) -> str:
    if status is None or not status.serves:
        return f"it does not serve: {'' if status is None else status.last_error}"
    if status.tasks is None:
        return "no data set is registered yet"
    return f"pass {status.pass_number}: {status.done} of {status.tasks} tasks done, {status.leased} leased"


def last_loss(lost: Sequence[LostPeer]) -> str:
    """ "lost 7f3a7f3a 12 s ago and 19ab19ab 40 s ago"."""
    named = [
        f"{one.id[:8]} {'left' if one.how == 'left' else 'was lost'} {_ago(one.seconds_ago)} ago"
        for one in lost[:NAMED_LOSSES]
    ]
    more = f" and {len(lost) - NAMED_LOSSES} more" if len(lost) > NAMED_LOSSES else ""
    return ", ".join(named) + more


def _ago(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _joining(node: Node) -> list[Finding]:
    """Addresses that did not lead into the swarm, as long as this node wants to be in it and knows no owner there."""
    found, is_member = [], node.exchange is not None
    if node.phase == "joining" or _is_apart(node) or not (node.overlay.peers or node.phase in ENDING):
        found = [
            warning(
                f"bootstrap {address}: {reason}", NEW_SWARM if is_member and OTHER in reason else what_to_do(reason)
            )
            for address, reason in node.overlay.failures.items()
        ]
    if node.entry.waits_for_swarm:
        found.append(warning(f"no member of run {node.config.swarm.run} answers; this node waits", WAITING_HINT))
    return found


def _is_apart(node: Node) -> bool:
    return node.exchange is not None and node.phase == "training" and node.exchange.directory.is_apart()


def _apart(node: Node, lost: Sequence[LostPeer]) -> list[Finding]:
    """No node that may own shards is in reach, and this one may not."""
    if node.exchange is None or not _is_apart(node):
        return []
    client, now = node.exchange.push_client, node.environment.clock.monotonic()
    since_s = node.exchange.outbox.oldest_s if client.apart_since is None else now - client.apart_since[0]
    dead = [one for one in lost if one.how == "dead"]
    named = f": {last_loss(dead)} ({dead[0].reason or 'no answer'})" if dead else ""
    waits = node.exchange.synchronous
    meanwhile = (
        "waits" if waits or client.apart_since is None else f"trains by itself since step {client.apart_since[1]}"
    )
    return [
        warning(
            f"no node that can own shards is in reach for {_ago(since_s)}{named}; this node {meanwhile}", OWNER_LOST
        )
    ]


def _alone(node: Node, lost: Sequence[LostPeer]) -> list[Finding]:
    """All peers are gone, and at least one did not say good-bye."""
    dead = [one for one in lost if one.how == "dead"]
    if node.overlay.peers or not dead or node.phase in ENDING:
        return []
    return [
        warning(
            f"no peer is left: {last_loss(dead)} ({dead[0].reason or 'no answer'})",
            "this node trains on and dials them every few seconds; see that they run, and this machine's network",
        )
    ]


def _exchange(node: Node, line: LineStatus | None) -> list[Finding]:
    exchange = node.exchange
    if exchange is None:
        return []
    found = _unserved(node)
    if line is not None:
        found += line_findings(line, exchange.codec)
    outbox = exchange.outbox
    if outbox.oldest_s > LONG_WAIT_S and not _is_apart(node):
        count, longest_s = len(outbox.steps), outbox.oldest_s
        waits = waits_for(outbox.obstacles, node.environment.clock.monotonic())
        why = waits and f": {waits}"
        what = f"deltas of {count} steps wait for their owners, one for {longest_s:.0f} s{why}"
        found.append(warning(what, "they are sent again by themselves; see whether /peers lists a suspect"))
    found += _counts(node, exchange)
    if resigned := exchange.counters.shards_resigned:
        what = f"{resigned} shards of this node had values that no training makes, and were left to their backups"
        found.append(error(what, "look at this machine's memory and disk"))
    return found


def waits_for(obstacles: Obstacles, now_s: float) -> str:
    """Whom shards have waited for `LONG_WAIT_S` or longer, where it is, and why."""
    named = []
    for one, count in obstacles.since(now_s - LONG_WAIT_S).items():
        owner = "an unknown owner" if one.owner is None else f"{short(one.owner.node_id)} at {one.owner.address}"
        named.append(f"{count} of {owner} for {now_s - one.since_s:.0f} s ({one.reason})")
    more = f", and {len(named) - NAMED_OWNERS} more" if len(named) > NAMED_OWNERS else ""
    return ", ".join(named[:NAMED_OWNERS]) + more


def _unserved(node: Node) -> list[Finding]:
    """Shards that do not come, and owners that this node reaches only by way of others."""
    exchange, now_s = node.exchange, node.environment.clock.monotonic()
    assert exchange is not None
    found = []
    if waits := waits_for(exchange.pull_client.obstacles, now_s):
        what = f"shards do not come: {waits}"
        do = "other members are asked too; see that the owner runs, and both firewalls, networks and clocks"
        found.append(warning(what, do))
    owners = {known.owner.node_id for known in exchange.store.ownership.known_owners.values()}
    for member, route in exchange.view.score.unreached().items():
        if member in owners and route.relay and now_s - route.since_s >= LONG_WAIT_S:
            what = f"{short(member)} at {route.address} is reached only by way of {short(route.relay)}: {route.reason}"
            do = "training goes on; see both firewalls, networks and clocks, for the detour costs a line twice as much"
            found.append(warning(what, do))
    return found


def _counts(node: Node, exchange: Exchange) -> list[Finding]:
    """A live member that has counted other nodes than this one for long."""
    lasting = exchange.view.counts.lasting()
    differing = [(other, theirs) for other, theirs in lasting if node.overlay.is_alive(other)]
    if not differing:
        return []
    other, theirs = differing[0]
    more = f", and {len(differing) - 1} more differ" if len(differing) > 1 else ""
    what = f"{short(other)} counts {theirs:.3g} nodes that train, this one {exchange.view.worker_count():.3g}{more}"
    do = (
        "owners weigh deltas by the larger count; what scripts divide by swarm.workers is wrong where it is smaller: "
        "see in /peers of both whom one does not know, and let it reach a member that does"
    )
    return [warning(what, do)]


def _same_data(node: Node) -> list[Finding]:
    """Live nodes that train on the very same samples."""
    if node.beside.duplicates is None:
        return []
    same = [other for other in node.beside.duplicates.nodes if node.overlay.is_alive(other)]
    if not same:
        return []
    others = f" and {len(same) - 1} more" if len(same) > 1 else ""
    return [warning(f"this node and {short(same[0])}{others} train on exactly the same data", ADVICE)]


def _few_changes(node: Node) -> list[Finding]:
    """Weights in half precision whose changes are rounded away."""
    changes = node.beside.changes
    if changes is None or changes.share is None:
        return []
    rate = node.progress.training_metrics.get("learning_rate")
    named = "" if rate is None else f" at a learning rate of {rate:.3g}"
    what = f"about {changes.share:.0%} of the {changes.dtype} weights change in a step{named}: the rest is rounded away"
    do = 'keep the weights in float32 and train under autocast (bf16=True, precision="bf16-mixed"); or raise the rate'
    return [warning(what, do)]


def _unreached(overlay: OverlayReport, port: int, *, meant: bool) -> list[Finding]:
    """The port that no peer reaches, unless that is `meant`; and the router that does not open it."""
    reachable, mapping = overlay.reachable, overlay.mapping
    if meant or reachable.reached:
        return []
    if not reachable.reason:  # not known yet
        if mapping is None or not mapping.reason:
            return []
        return [warning(f"no port was opened in the router: {mapping.reason}", "see the log")]
    what = f"your port {port} cannot be reached from outside: {reachable.reason}."
    if mapping is None:
        second = 'set node.nat = "auto", if your router supports UPnP'
    else:
        second = f"allow UPnP in your router ({mapping.reason or 'it has opened ' + mapping.address})"
    return [
        warning(
            f"{what} This node trains and receives updates, but owns no shards",
            f"one of three things: (1) forward UDP and TCP {port} to this machine in your router and its firewall; "
            f"(2) {second}; (3) leave it so, and set node.client_only = true",
        )
    ]
