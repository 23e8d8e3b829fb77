"""Each command and each block of Python of the README and of docs/ is run, or stands in a table with the reason.

The rules for commands are in `tests.process.harness.document_rules`, the programs around blocks of Python in
`tests.process.harness.snippet_scripts`. (The tutorial: `test_tutorial`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from tests.harness.project import documents
from tests.harness.project.documents import Shown
from tests.process.harness.document_rules import RULES, SMALL, World, founding, rule_of
from tests.process.harness.snippet_scripts import SCRIPTS, script_of

NETWORK = "it downloads packages; tests/process/test_wheel.py and CI install them"
BENCHMARK = "a benchmark: some minutes to hours, most of them as root"
EXAMPLE = "tests/process/test_examples.py runs it"
#: What is shown and not run, with the reason.
NOT_RUN = {
    "make demo": "tests/process/test_wheel.py runs the demo",
    "make test": "it runs this test",
    "p2pnode start --set training.device=cuda:0,cuda:1": "it needs two GPUs",
    "p2pnode start --set training.device=all": "it needs a GPU; tests/unit/training/devices has the rule",
    'pip install -c constraints.txt ".[transformers]"': NETWORK,
    'pip install -c constraints.txt ".[lightning]"': NETWORK,
    "p2pnode start --set training.tracker=trackio": "its package is no part of the tests' environment",
    "python3.11 -m venv /tmp/hivemind": NETWORK,
    '/tmp/hivemind/bin/pip install torch==2.13.0 "numpy<2.4" hivemind==1.1.12': NETWORK,
    "python -m benchmarks peers --hivemind /tmp/hivemind/bin/python": BENCHMARK,
    "make bench ARGS=wan": BENCHMARK,
    "make bench ARGS=time_to_loss": BENCHMARK,
    'make bench ARGS="time_to_loss --quick"': BENCHMARK,
    'make bench ARGS="time_to_loss --only p2p --rate 5 --wall 300 --seed 1"': BENCHMARK,
    'python -m benchmarks.time_to_loss.lockstep "steps=10 delta=256 change=256 age=7"': "tests/unit/project/"
    "test_time_to_loss.py plays a small one",
    'make bench ARGS="time_to_loss --picture"': "tests/unit/project/test_time_to_loss.py renders what it writes",
    'make bench ARGS="wan --scenario C --minutes 2 --ways codec=sparse --dry-run"': BENCHMARK,
    "make bench ARGS=\"async_rule --parameters 0.1 --ways pssp --ways 'pssp late=1' --repetitions 5\"": BENCHMARK,
    "python -m tools.psp all --out figures --data-dir mnist": "nine minutes and a data set from the network",
    "ssh -L 8080:127.0.0.1:8080 user@192.0.2.10": "it needs a second machine",
    "p2pnode run --local 3 -- python examples/linear_regression.py": EXAMPLE,
    'python examples/word_count.py --processes 2 "texts/*.txt"': EXAMPLE,
    "p2pnode run --set training.max_steps=40 -- python examples/kmeans.py": EXAMPLE,
    "p2pnode run --set training.max_steps=60 -- torchrun --nproc-per-node 2 examples/fsdp.py": EXAMPLE,
}
FRAMEWORK = "its packages are no part of the tests' environment; `make test-frameworks` runs one like it"
#: Blocks of Python, by a line of theirs.
SNIPPETS_NOT_RUN = {
    "from p2pnode.training.engines.server.program import UpdatesLost": "in tests/process/test_engines_process.py",
    "def decode(self, record: bytes):  # → a sample": "the signature of a method, without a body",
    "from p2pnode.integrations.transformers import SwarmCallback": FRAMEWORK,
    "from p2pnode.integrations.lightning import SwarmCallback": FRAMEWORK,
    "swarm = p2pnode.attach(model, optimizer, scheduler)": FRAMEWORK,
    "swarm = p2pnode.attach(model, optimizer, on_load=apex)": "it needs Apex, Megatron or DeepSpeed",
}


def in_order() -> list[Shown]:
    """What is run, in the order of the documents; what ends nodes comes last."""
    known = [(rule.phase, shown) for shown in documents.commands() if (rule := rule_of(shown.text)) is not None]
    return [shown for _, shown in sorted(known, key=lambda one: one[0]) if shown.text not in NOT_RUN]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("documented"))
    yield made
    made.end()


def test_every_command_is_run_or_has_a_reason_why_not() -> None:
    """No command is in neither place, and the table has only what the documents show."""
    shown = documents.commands()

    assert [str(one) for one in shown if one.text not in NOT_RUN and rule_of(one.text) is None] == []
    assert NOT_RUN.keys() - {one.text for one in shown} == set()
    assert [rule.begins for rule in RULES if not any(rule_of(one.text) is rule for one in shown)] == []
    assert len(founding()) == 4


def test_every_snippet_is_run_or_has_a_reason_why_not() -> None:
    """The same for blocks of Python."""
    shown = documents.snippets()
    lines = {line for one in shown for line in one.text.splitlines()}
    unknown = [one for one in shown if script_of(one) is None]

    assert [str(one) for one in unknown if not SNIPPETS_NOT_RUN.keys() & set(one.text.splitlines())] == []
    assert SNIPPETS_NOT_RUN.keys() - lines == set()
    assert [one.has for one in SCRIPTS if not any(script_of(block) is one for block in shown)] == []


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shown", in_order(), ids=str)
def test_a_shown_command_works(world: World, shown: Shown) -> None:
    """It ends as the document says, and prints what it is said to print."""
    world.run(shown.text)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("shown", [one for one in documents.snippets() if script_of(one) is not None], ids=str)
def test_a_shown_snippet_works(world: World, shown: Shown) -> None:
    """It runs to its end within the smallest program that has the names which it uses, and does what is said."""
    one = script_of(shown)
    assert one is not None
    home = world.home(f"snippet-{SCRIPTS.index(one)}")
    (home.folder / "train.py").write_text(one.whole(shown.text))
    one.prepare(home.folder)
    printed = home.do(one.command, SMALL | one.environment)
    assert re.search(one.says, printed, re.MULTILINE), printed
