"""`python -m benchmarks [NAME …]`: measure, print a JSON line per figure, renew `figures.json` and its pages.

Without names the standing ones run: start, steps, kernels. The others run by name or with `--all`: `simulator`,
`process_faults`, `devices`, `memory` and `overlay_large` take minutes, `exchange_history` as well and up to 20 GB of
memory, `async_rule` half an hour. `partition`, `wan` and `time_to_loss` need network namespaces, and so root. `wan`
takes half an hour, `time_to_loss` two hours, with `--quick` a quarter of one. `on_gpu` needs a GPU, and runs by name
alone. A missed aim is said and shown in the table; it is no failure of the command.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import performance_page, record

#: Each is a module here with `measure(arguments) -> Outcome`. They are imported when asked for: one needs torch.
STANDING = ("start", "steps", "kernels")
BY_NAME = (
    "peers",
    "wan",
    "time_to_loss",
    "process_faults",
    "partition",
    "memory",
    "async_rule",
    "exchange_history",
    "overlay_large",
    "simulator",
    "parameter_server",
    "dispatch_store",
    "devices",
    "on_gpu",
)


def parser() -> argparse.ArgumentParser:
    """The command line; `make bench ARGS="…"` passes it on."""
    line = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    line.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join((*STANDING, *BY_NAME))}")
    line.add_argument("--all", action="store_true", help="those that run by name alone too")
    line.add_argument("--dry-run", action="store_true", help="measure and print, write nothing")
    line.add_argument("--repetitions", type=int, default=0, help="0: each benchmark's own number")
    line.add_argument(
        "--minutes",
        type=float,
        default=0.0,
        help="process_faults, overlay_large, wan: how long; 0: each one's own",
    )
    line.add_argument(
        "--nodes",
        type=int,
        default=0,
        help="overlay_large, exchange_history, time_to_loss: nodes in the swarm; 0: each one's own",
    )
    line.add_argument("--steps", type=int, default=0, help="exchange_history: of each node; 0: 50")
    line.add_argument(
        "--seed",
        type=int,
        default=0,
        help="process_faults: which faults; exchange_history: this one alone; time_to_loss: of weights and batches",
    )
    line.add_argument("--busy", type=int, default=0, help="process_faults: loops beside the nodes that use a core each")
    line.add_argument(
        "--keep", type=Path, default=None, help="process_faults, time_to_loss: a folder for the logs of the nodes"
    )
    line.add_argument(
        "--peers", type=int, action="append", default=[], help="peers, memory: group size; again for more"
    )
    line.add_argument(
        "--parameters",
        type=float,
        action="append",
        default=[],
        help="peers, memory, wan: in millions; async_rule: 0.1 for a small model",
    )
    line.add_argument(
        "--ways",
        action="append",
        default=[],
        help='wan: such as "codec=sparse, replicas=0"; devices: daemons, elastic, path; '
        'async_rule: such as "pssp 1/0 late=0.5"',
    )
    line.add_argument("--scenario", action="append", default=[], help="wan: A to G; again for more")
    line.add_argument(
        "--hivemind",
        type=Path,
        default=None,
        help="peers, time_to_loss: Python of an environment with hivemind 1.1.12",
    )
    line.add_argument("--data-dir", type=Path, default=None, help="devices: folder with the MNIST files")
    slow = line.add_argument_group("time_to_loss")
    slow.add_argument("--quick", action="store_true", help="three contestants over 5 Mbit/s for three minutes")
    slow.add_argument(
        "--only",
        action="append",
        default=[],
        help="joint, p2p, torchft, hivemind or alone; on_gpu: a section; again for more",
    )
    slow.add_argument("--rate", type=float, action="append", default=[], help="Mbit/s each way; again for more")
    slow.add_argument("--wall", type=float, default=0.0, help="seconds of a run; 0: 300")
    slow.add_argument("--slow", action="append", default=[], help="NODE:RATE, a node with another line")
    slow.add_argument("--kill", action="store_true", help="kill a node at a third, start it again at half of the run")
    slow.add_argument("--text", type=Path, default=None, help="a file to train on instead of Python's own reference")
    slow.add_argument("--set", action="append", default=[], help="KEY=VALUE, a setting of p2pnode; again for more")
    slow.add_argument("--picture", action="store_true", help="run nothing: renew pages and picture from the record")
    slow.add_argument("--torchft", type=Path, default=None, help="Python of an environment with torchft 0.2.0")
    gpu = line.add_argument_group("on_gpu")
    gpu.add_argument("--seconds", type=float, default=0.0, help="for all sections; 0: 420")
    gpu.add_argument("--out", type=Path, default=None, help="a folder for every line; none: .benchmarks/on_gpu")
    gpu.add_argument("--tiny", action="store_true", help="all of it in small on the processor, and no figure of it")
    return line


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code 0; 1 where something could not be measured; 2 for an unknown name."""
    # As Ctrl-C does, so that the daemons and trainers of a benchmark end with it.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    line = parser()
    arguments = line.parse_args(argv)
    everything = tuple(name for name in STANDING + BY_NAME if name != "on_gpu")
    names = arguments.names or (everything if arguments.all else STANDING)
    unknown = [name for name in names if name not in STANDING + BY_NAME]
    if unknown:
        line.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(STANDING + BY_NAME)}")
    # As on a user's machine, where a module is compiled at its first import and not at every start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        try:
            outcome: record.Outcome = importlib.import_module(f"benchmarks.{name}").measure(arguments)
        except record.NotMeasured as error:
            print(f"{name} could not be measured: {error}", file=sys.stderr)
            return 1
        figures = record.figures_of(outcome, command_of(name, arguments))
        lines = [record.json_line(figure, series) for figure, series in zip(figures, outcome.series, strict=True)]
        for figure, line_of_figure in zip(figures, lines, strict=True):
            print(line_of_figure, flush=True)
            if figure.met is False:
                print(f"{figure.name}: {figure.median:g} {figure.unit}, aim {figure.aim}: missed", file=sys.stderr)
        if not arguments.dry_run:
            record.write(record.merged(record.load(), figures))
            performance_page.keep(lines)
    return 0


def command_of(name: str, arguments: argparse.Namespace) -> str:
    """The command that measures this again, without paths of this machine."""
    parts = [name]
    if name in ("process_faults", "exchange_history") and arguments.seed:
        parts.append(f"--seed {arguments.seed}")
    if name == "process_faults" and arguments.busy:
        parts.append(f"--busy {arguments.busy}")
    if name in ("process_faults", "overlay_large", "wan") and arguments.minutes:
        parts.append(f"--minutes {arguments.minutes:g}")
    if arguments.nodes and name in ("overlay_large", "exchange_history"):
        parts.append(f"--nodes {arguments.nodes}")
    if arguments.steps and name == "exchange_history":
        parts.append(f"--steps {arguments.steps}")
    if name == "wan":
        parts += [f"--scenario {one}" for one in arguments.scenario]
    if name in ("peers", "memory", "wan", "async_rule", "devices"):
        parts += [f"--peers {peers}" for peers in arguments.peers]
        parts += [f"--parameters {millions:g}" for millions in arguments.parameters]
        parts += [f"--ways '{way}'" for way in arguments.ways]
    if name == "peers" and arguments.hivemind is not None:
        parts.append("--hivemind …/bin/python")
    if name == "time_to_loss":
        parts += _of_time_to_loss(arguments)
    if name == "on_gpu" and arguments.seconds:
        parts.append(f"--seconds {arguments.seconds:g}")
    if arguments.repetitions:
        parts.append(f"--repetitions {arguments.repetitions}")
    text = " ".join(parts)
    return f'make bench ARGS="{text}"' if " " in text else f"make bench ARGS={text}"


def _of_time_to_loss(arguments: argparse.Namespace) -> list[str]:
    parts = [f"--only {one}" for one in arguments.only] + [f"--rate {rate:g}" for rate in arguments.rate]
    parts += [f"--slow {one}" for one in arguments.slow] + [f"--set '{one}'" for one in arguments.set]
    parts += [f"--wall {arguments.wall:g}"] if arguments.wall else []
    parts += [f"--seed {arguments.seed}"] if arguments.seed else []
    parts += [f"--{flag}" for flag in ("quick", "kill") if getattr(arguments, flag)]
    return parts + ([f"--text {arguments.text.name}"] if arguments.text is not None else [])


if __name__ == "__main__":
    sys.exit(main())
