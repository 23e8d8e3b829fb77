"""`p2pnode simulate advise`: read what a running swarm measures, and recommend it a barrier. Changes nothing there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from p2pnode.commands.options import JsonOption
from p2pnode.commands.output import say
from p2pnode.commands.simulate import progress_bar
from p2pnode.errors import ExitCode, UserError

if TYPE_CHECKING:
    from training.settings import BarrierSettings
    from training.simulation.advice import Advice, Measured, Prediction


def advise(
    address: Annotated[
        str, typer.Option("--from", metavar="URL", help="HTTP API of a node of the swarm, as http://127.0.0.1:8080.")
    ],
    keep: Annotated[
        float, typer.Option("--keep", min=0.0, max=1.0, help="Share of asp's progress the barrier must keep.")
    ] = 0.85,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the simulations.")] = 1,
    as_json: JsonOption = False,
) -> int:
    """Recommend barrier, sample and staleness for a running swarm, from the step times it measures.

    Reads /status, /steps and /peers of one node and simulates every candidate on them; changes nothing.

    Example: p2pnode simulate advise --from http://127.0.0.1:8080
    """
    from p2pnode.client import NodeClient
    from training.simulation import advice
    from training.simulation.steptimes import BadModel

    bare = address.removeprefix("http://").split("/")[0]
    try:
        client = NodeClient(bare)
    except ValueError as error:
        raise UserError(f"--from: {error}", "write --from http://127.0.0.1:8080", ExitCode.USAGE) from None
    status, steps, peers = client.status(), client.steps(1000), client.peers()
    try:
        measured = _measured(status, steps, peers, bare)
        with progress_bar("simulating the candidates") as shown:
            found = advice.advise(measured, seed=seed, keep=keep, present=_present(status), progress=shown)
    except (BadModel, ValueError) as error:
        raise UserError(str(error), "ask again when the swarm has trained for some steps", ExitCode.USAGE) from None
    if as_json:
        say(json.dumps({"schema": 1, **asdict_advice(found)}, indent=2))
    else:
        say(advice_text(found, keep))
    return 0


def _measured(status: dict[str, Any], steps: list[Any], peers: list[dict[str, Any]], source: str) -> Measured:
    """Raises `BadModel` where no step has been made."""
    from training.simulation.advice import Measured
    from training.simulation.steptimes import seconds_of

    trace_s = seconds_of(steps, f"{source}/steps")
    own = float(status["training"]["step_seconds"] or 0.0)
    medians = [own, *(float(peer.get("step_seconds", 0.0)) for peer in peers if peer["state"] == "training")]
    workers = float(status["population"].get("workers", status["population"]["estimate"]))
    return Measured(trace_s, tuple(medians), workers)


def _present(status: dict[str, Any]) -> BarrierSettings | None:
    """The swarm's barrier as it is; None for a custom one."""
    from training.settings import BarrierSettings

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
    """As plain data; the barriers as keys of `[barrier]`."""

    def plain(prediction: Prediction) -> dict[str, Any]:
        barrier = prediction.barrier
        keys = {"method": barrier.method, "sample": barrier.sample, "staleness": barrier.staleness}
        return {
            "name": prediction.name,
            "barrier": keys,
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
        "recommended": plain(found.choice),
        "present": None if found.present is None else plain(found.present),
        "candidates": [plain(prediction) for prediction in found.predictions],
    }


def advice_text(found: Advice, keep: float) -> str:
    """A table of the candidates and the lines for node.toml."""
    from p2pnode.tables import columns

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
    about = f"{found.nodes} nodes, " + (
        f"{100 * slow.share:.0f} % of them {slow.factor:.1f} times slower" if slow.share else "none of them slow"
    )
    barrier = found.choice.barrier
    return "\n".join(
        [
            f"simulated on the step times measured: {about}",
            columns(heads, rows),
            f"recommended: {found.choice.name}, the closest together of those that keep {100 * keep:.0f} % of asp",
            "[barrier]",
            f'method = "{barrier.method}"',
            f"sample = {barrier.sample}",
            f"staleness = {barrier.staleness}",
        ]
    )
