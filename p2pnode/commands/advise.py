"""`p2pnode simulate advise`: recommends a barrier for a running swarm from the step times it measures."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2pnode.commands.options import JsonOption
from p2pnode.commands.output import print_answer
from p2pnode.errors import ExitCode, UserError
from p2pnode.screen import progress_bar

if TYPE_CHECKING:
    from p2pnode.training.settings import BarrierSettings
    from p2pnode.training.simulation.advice import Advice, Measured, Prediction


#: Between one worker and two, because the number of workers is an estimate. One worker has no peer to wait for.
MIN_WORKERS = 1.5
#: Fewer measured steps than this hardly include slow ones, so the advice then says that they are few.
MIN_STEPS = 30


def advise(
    address: Annotated[
        str, typer.Option("--from", metavar="URL", help="HTTP API of a node of the swarm, as http://127.0.0.1:8080.")
    ],
    keep: Annotated[
        float,
        typer.Option("--keep", min=0.0, max=1.0, help="Least progress, as a share of that of asp, which never waits."),
    ] = 0.85,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the simulations.")] = 1,
    as_json: JsonOption = False,
) -> int:
    """Recommend barrier, sample and staleness for a running swarm, from the step times it measures.

    Reads /status, /steps and /peers of one node and simulates every candidate on them; changes nothing.

    Example: p2pnode simulate advise --from http://127.0.0.1:8080
    """
    from p2pnode.client import NodeClient
    from p2pnode.training.simulation import advice
    from p2pnode.training.simulation.step_times import BadModel

    host_and_port = address.removeprefix("http://").split("/")[0]
    try:
        client = NodeClient(host_and_port)
    except ValueError as error:
        raise UserError(f"--from: {error}", "write --from http://127.0.0.1:8080", ExitCode.USAGE) from None
    status, steps, peers = client.status(), client.steps(1000), client.peers()
    _require_steps_and_peers(status, steps, host_and_port)
    try:
        measured = _measured(status, steps, peers, host_and_port)
        with progress_bar("simulating the candidates") as bar:
            found = advice.advise(measured, seed=seed, keep=keep, present=_present_barrier(status), progress=bar.show)
    except (BadModel, ValueError) as error:
        raise UserError(str(error), "ask again after the swarm has trained for some steps", ExitCode.USAGE) from None
    return print_answer(advice_text(found, keep, len(measured.trace_s)), asdict_advice(found), as_json=as_json)


def _require_steps_and_peers(status: dict[str, Any], steps: list[Any], address: str) -> None:
    """Raise `UserError` if the node has measured no step yet, or has no peer to wait for."""
    if not any(isinstance(row, dict) and row.get("train_seconds") for row in steps):
        state = str(status.get("state", "")).replace("_", " ")
        message = f"the node at {address} has made no step yet" + (f": it is {state}" if state else "")
        hint = "ask again when it has trained for some dozens of steps, or ask a node that trains"
        raise UserError(message, hint, ExitCode.USAGE)
    if _workers(status) < MIN_WORKERS:
        message = f"the node at {address} trains alone: a barrier waits for other nodes, and there are none"
        hint = (
            "ask again when a second node has joined; to compare barriers before that, "
            "run p2pnode simulate --nodes N --steps trace:FILE"
        )
        raise UserError(message, hint, ExitCode.USAGE)


def _workers(status: dict[str, Any]) -> float:
    """The estimated number of nodes that train; all nodes of the swarm if /status has no number of workers."""
    population = status["population"]
    return float(population.get("workers", population["estimate"]))


def _measured(status: dict[str, Any], steps: list[Any], peers: list[dict[str, Any]], source: str) -> Measured:
    """The measurements that the simulations use. Raises `BadModel` if there is no step."""
    from p2pnode.training.simulation.advice import Measured
    from p2pnode.training.simulation.step_times import seconds_of

    trace_s = seconds_of(steps, f"{source}/steps")
    own_median_s = float(status["training"]["step_seconds"] or 0.0)
    peers_medians_s = [float(peer.get("step_seconds", 0.0)) for peer in peers if peer["state"] == "training"]
    return Measured(trace_s, (own_median_s, *peers_medians_s), _workers(status))


def _present_barrier(status: dict[str, Any]) -> BarrierSettings | None:
    """The barrier that the node runs now; None for a custom one, which cannot be simulated."""
    from p2pnode.training.settings import BarrierSettings

    barrier = status["barrier"]
    if barrier["method"] == "custom":
        return None
    return BarrierSettings(
        method=barrier["method"],
        sample=barrier["sample"] if barrier["method"] in ("pbsp", "pssp") else 0,
        staleness=barrier["staleness"] or 0,
        quantile=barrier["quantile"],
    )


def asdict_advice(found: Advice) -> dict[str, Any]:
    """The advice as data for JSON. Each barrier has the keys of the section `[barrier]` of node.toml."""

    def asdict_prediction(prediction: Prediction) -> dict[str, Any]:
        barrier = prediction.barrier
        return {
            "name": prediction.name,
            "barrier": {"method": barrier.method, "sample": barrier.sample, "staleness": barrier.staleness},
            "progress": prediction.progress,
            "steps_per_second": prediction.steps_per_s,
            "spread_steps": prediction.spread_steps,
            "progress_inconsistency_sd": prediction.inconsistency,
            "queries_per_step": prediction.queries_per_step,
            "waited_seconds_per_step": prediction.waited_s_per_step,
        }

    return {
        "nodes": found.nodes,
        "stragglers": {"share": found.stragglers.share, "factor": found.stragglers.factor},
        "recommended": asdict_prediction(found.choice),
        "present": None if found.present is None else asdict_prediction(found.present),
        "candidates": [asdict_prediction(prediction) for prediction in found.predictions],
    }


def advice_text(found: Advice, keep: float, steps: int) -> str:
    """The advice for a person: a table of the candidates, the recommendation, and the lines for node.toml.

    `keep` is the value of `--keep`, `steps` the number of measured steps.
    """
    from p2pnode.terminal.lines import columns

    rows = [
        (
            ("→ " if prediction is found.choice else "  ") + prediction.name,
            f"{100 * prediction.progress:.0f} %",
            f"{prediction.steps_per_s:.3g}",
            f"{prediction.spread_steps:.2f}",
            f"{prediction.inconsistency:.2f}",
            f"{prediction.queries_per_step:.1f}",
        )
        for prediction in found.predictions
    ]
    heads = ("  barrier", "of asp", "steps/s", "spread", "inconsistency", "queries/step")
    slow = found.stragglers
    slow_nodes = (
        f"{100 * slow.share:.0f} % of them {slow.factor:.1f} times slower" if slow.share else "none of them slow"
    )
    few = "" if steps >= MIN_STEPS else f" (few: ask again after {MIN_STEPS} steps)"
    barrier = found.choice.barrier
    return "\n".join(
        [
            f"simulated on {steps} measured steps of this node{few}: {found.nodes} nodes, {slow_nodes}",
            columns(heads, rows),
            f"recommended: {_described(found.choice)}.",
            f"Of the barriers with at least {100 * keep:.0f} % of asp's progress, it keeps the nodes closest together.",
            *_compared_with_present(found),
            "Write this to node.toml of every node, then restart them:",
            "[barrier]",
            f'method = "{barrier.method}"',
            f"sample = {barrier.sample}",
            f"staleness = {barrier.staleness}",
        ]
    )


def _described(prediction: Prediction) -> str:
    """The figures of one barrier in words."""
    return (
        f"{prediction.name}, {prediction.steps_per_s:.3g} steps a second per node "
        f"({100 * prediction.progress:.0f} % of asp), "
        f"nodes {prediction.spread_steps:.1f} steps apart (standard deviation)"
    )


def _compared_with_present(found: Advice) -> list[str]:
    """A line that compares the recommended barrier with the present one; no line if that one was not simulated."""
    present = found.present
    if present is None:
        return []
    if present.barrier == found.choice.barrier:
        return ["This is the swarm's present barrier: nothing to change."]
    gain = found.choice.steps_per_s / present.steps_per_s - 1
    return [
        f"At present ({present.barrier.method}): {present.steps_per_s:.3g} steps a second, nodes "
        f"{present.spread_steps:.1f} steps apart; the recommended barrier makes training {abs(100 * gain):.0f} % "
        f"{'faster' if gain >= 0 else 'slower'}."
    ]
