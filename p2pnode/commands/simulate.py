"""`p2pnode simulate`: simulates a swarm on a virtual clock.

Imports stay light: NumPy, numba and matplotlib are imported when a command needs them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from p2pnode import screen
from p2pnode.commands.options import JsonOption
from p2pnode.commands.output import print_answer
from p2pnode.errors import ExitCode, UserError

if TYPE_CHECKING:
    from p2pnode.training.simulation.plan import Plan

#: Points in time of a run that `--plot` shows.
MOMENTS = 100

simulate_app = typer.Typer(
    help="Simulate a swarm's barrier on a virtual clock, before you start it.", rich_markup_mode=None
)


@simulate_app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    nodes: Annotated[int, typer.Option("--nodes", "-n", min=1, help="Nodes of the swarm.")] = 1000,
    barrier: Annotated[
        str, typer.Option("--barrier", help="asp, bsp, ssp, pbsp, pssp or package.module:function.")
    ] = "pssp",
    sample: Annotated[int, typer.Option("--sample", min=0, help="β; 0: √population, from 1 to 10.")] = 0,
    staleness: Annotated[int, typer.Option("--staleness", min=0, help="s of ssp and pssp.")] = 4,
    quantile: Annotated[float, typer.Option("--quantile", help="Share of the sample that must be far enough.")] = 1.0,
    duration: Annotated[float, typer.Option("--duration", help="Virtual seconds.")] = 400.0,
    steps: Annotated[
        str,
        typer.Option("--steps", help="exp:1, 1+exp:1, gamma:4:0.25, lognormal:0:0.3, constant:1 or trace:FILE."),
    ] = "exp:1",
    stragglers: Annotated[str, typer.Option("--stragglers", help="Slow nodes: 5%x4, or 5%x4,transient.")] = "",
    discipline: Annotated[
        str, typer.Option("--discipline", help="When a blocked node tests again: event, repoll, hold, pool.")
    ] = "pool",
    repoll: Annotated[
        float, typer.Option("--repoll", min=0.0, help="Seconds between tests; 0: a twentieth of the mean step.")
    ] = 0.0,
    pool_size: Annotated[int, typer.Option("--pool-size", min=1, help="Peers a node knows, with pool.")] = 100,
    pool_renewal: Annotated[float, typer.Option("--pool-renewal", help="Seconds to renew the pool.")] = 60.0,
    sampler: Annotated[
        str, typer.Option("--sampler", help="uniform, or biased: the owner of a random id.")
    ] = "uniform",
    population_error: Annotated[
        float, typer.Option("--population-error", min=0.0, help="Relative standard deviation of the estimate N̂.")
    ] = 0.0,
    delay: Annotated[float, typer.Option("--delay", min=0.0, help="Seconds a message takes one way.")] = 0.0,
    churn: Annotated[
        float, typer.Option("--churn", min=0.0, help="Crashes per node and second; each node is replaced.")
    ] = 0.0,
    detection: Annotated[
        float, typer.Option("--detection", min=0.0, help="Seconds crashed nodes stay in samples.")
    ] = 10.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed.")] = 1,
    engine: Annotated[str, typer.Option("--engine", help="auto, compiled or reference.")] = "auto",
    compare: Annotated[str, typer.Option("--compare", help="Several barriers: asp,bsp,ssp,pbsp,pssp.")] = "",
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the steps into this PNG file.")] = None,
    as_json: JsonOption = False,
) -> int:
    """Simulate one swarm, or one per barrier of --compare, with the daemon's own barriers.

    Example: p2pnode simulate --nodes 1000 --barrier pbsp --sample 10 --duration 400 --steps exp:1 --stragglers 5%x4
    """
    if context.invoked_subcommand is not None:
        return 0
    from p2pnode.training.barriers.predicates import BarrierNotFound
    from p2pnode.training.simulation.run import NotCompiled
    from p2pnode.training.simulation.step_times import BadModel

    if plot is not None:
        _need_matplotlib()
    names = [name.strip() for name in compare.split(",") if name.strip()] or [barrier]
    try:
        plans = [(name, _plan(dict(context.params) | {"barrier": name})) for name in names]
        moments = [duration * number / MOMENTS for number in range(1, MOMENTS + 1)] if plot is not None else []
        outcomes = [(name, _run(plan, engine, moments, name)) for name, plan in plans]
    except (BadModel, BarrierNotFound, NotCompiled, ValueError) as error:
        raise UserError(str(error), "p2pnode simulate --help shows what each option takes", ExitCode.USAGE) from error
    from p2pnode.training.simulation.outcome import summary

    runs = [{"barrier": name, **summary(outcome)} for name, outcome in outcomes]
    if plot is not None:
        from p2pnode.training.simulation.plots import draw, progress_panel, step_panel

        with _writing(plot):
            draw([step_panel(outcomes), progress_panel(outcomes)], plot, _title(plans[0][1]))
    text = run_table(runs) if plot is None else f"{run_table(runs)}\nwrote {plot}"
    answer = {"seed": seed, "nodes": nodes, "duration_s": duration, "runs": runs}
    return print_answer(text, answer, as_json=as_json)


def run_table(runs: list[dict[str, Any]]) -> str:
    """One line per run."""
    from p2pnode.terminal.lines import columns

    rows = [
        (
            run["barrier"],
            f"{run['mean_steps']:.1f}",
            f"{run['sd_steps']:.1f}",
            f"{run['least_steps']}…{run['most_steps']}",
            f"{100 * run['progress']:.0f} %",
            f"{run['waited_s_per_step']:.3f} s",
            f"{run['queries_per_step']:.1f}",
            f"{run['progress_inconsistency_sd']:.2f}",
            run["engine"],
        )
        for run in runs
    ]
    heads = ("barrier", "steps", "sd", "range", "of asp", "waits/step", "queries/step", "inconsistency", "engine")
    return columns(heads, rows)


def _plan(options: dict[str, Any]) -> Plan:
    """The plan of the command line's options. Raises `BadModel` and `ValueError`."""
    import msgspec

    from p2pnode.training.barriers.predicates import resample_after
    from p2pnode.training.settings import BarrierMethod, BarrierSettings
    from p2pnode.training.simulation.plan import DISCIPLINES, SAMPLERS, Churn, Plan
    from p2pnode.training.simulation.step_times import parse_step_times, parse_stragglers

    known_words = {"barrier": get_args(BarrierMethod), "discipline": DISCIPLINES, "sampler": SAMPLERS}
    if ":" in options["barrier"]:
        del known_words["barrier"]
    for option, known in known_words.items():
        if options[option] not in known:
            raise ValueError(f'--{option} "{options[option]}" is none of {", ".join(known)}')
    raw = {
        "method": options["barrier"],
        "sample": options["sample"],
        "staleness": options["staleness"],
        "quantile": options["quantile"],
    }
    try:
        barrier = msgspec.convert(raw, BarrierSettings)
    except msgspec.ValidationError as error:
        raise ValueError(f"the barrier {options['barrier']}: {error}") from None
    times = parse_step_times(options["steps"])
    return Plan(
        nodes=options["nodes"],
        barrier=barrier,
        duration_s=options["duration"],
        steps=times,
        stragglers=parse_stragglers(options["stragglers"]),
        discipline=options["discipline"],
        repoll_s=options["repoll"] or resample_after(times.mean_s),
        pool_size=options["pool_size"],
        pool_renewal_s=options["pool_renewal"],
        sampler=options["sampler"],
        population_error=options["population_error"],
        delay_s=options["delay"],
        churn=Churn(options["churn"], options["detection"]),
        seed=options["seed"],
    )


def _run(plan: Plan, engine: str, moments: list[float], name: str) -> Any:
    from p2pnode.training.simulation.run import EngineName, simulate

    if engine not in get_args(EngineName):
        raise ValueError(f'--engine "{engine}" is none of {", ".join(get_args(EngineName))}')
    with screen.progress_bar(f"{name}, {plan.nodes} nodes") as bar:
        return simulate(plan, engine=engine, moments_s=moments, progress=bar.show)  # type: ignore[arg-type]


def _title(plan: Plan) -> str:
    return f"{plan.nodes} nodes, {plan.duration_s:g} s, {plan.discipline}"


def _need_matplotlib() -> None:
    """Check this before minutes of work, not after."""
    from p2pnode.training.simulation.plots import NoMatplotlib, require_matplotlib

    try:
        require_matplotlib()
    except NoMatplotlib as error:
        raise UserError(str(error), 'install it with: pip install "p2pnode[simulate]"', ExitCode.USAGE) from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn a file that cannot be written into a `UserError`."""
    try:
        yield
    except OSError as error:
        hint = "name a file in an existing, writable folder"
        message = f"cannot write {path}: {error.strerror or error}"
        raise UserError(message, hint, ExitCode.STATE_DIRECTORY) from error
    except ValueError as error:
        raise UserError(f"cannot draw {path}: {error}", "end the name in .png", ExitCode.USAGE) from error
