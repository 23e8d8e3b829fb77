"""The dialer: order, backoff, and the one case in which it gives up."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Sequence

import pytest

from p2pnode.overlay.addresses import Address
from p2pnode.overlay.bootstrap import dialer as module
from p2pnode.overlay.bootstrap.dialer import (
    ATTEMPT_DELAY_S,
    BOOTSTRAP_DELAY_S,
    HELLO_TIMEOUT_S,
    MAX_EXPLAINED,
    OTHERWISE,
    Dialer,
    NotThisSwarm,
    OnlyItself,
    advertised_address,
    explained,
    resolve,
    what_to_do,
)
from p2pnode.overlay.bootstrap.hello import HelloRejected, HelloResult, OwnAddress
from p2pnode.overlay.local_node import LocalNode
from p2pnode.overlay.peers import Contact
from p2pnode.overlay.sockets.connection_pool import CLOSED_WITHOUT_RESPONSE
from tests.harness.environment.simulated import ListLog, SeededEntropy, make_environment
from tests.harness.environment.virtual_loop import run
from tests.harness.project.repository import ROOT
from tests.harness.runner.stories import run_by

FOUNDER, OTHER, OLD = (Address(f"10.0.0.{number}", 8468) for number in (1, 2, 3))
GENESIS = b"genesis of tests"

Answers = dict[Address, HelloRejected | None]


def dialer(
    answers: Answers,
    monkeypatch: pytest.MonkeyPatch,
    *,
    bound: str = "10.0.0.9",
    log: ListLog | None = None,
    answer_s: float = 0.01,
    seed: int = 0,
) -> tuple[Dialer, list[Address]]:
    """A dialer, and the addresses it dials; None in `answers` is a node of its swarm, which answers after so long."""
    dialled: list[Address] = []

    async def say_hello(_transport: object, address: Address, **_: object) -> HelloResult:
        dialled.append(address)
        await asyncio.sleep(answer_s)
        rejected = answers[address]
        if rejected is not None:
            raise rejected
        return HelloResult(Contact(b"n" * 20, address), GENESIS, "10.0.0.9", [])

    async def resolver(label: str) -> Sequence[Address]:
        return [FOUNDER, OTHER] if label == "swarm:8468" else [Address.checked(label.partition(":")[0], 8468)]

    monkeypatch.setattr(module, "say_hello", say_hello)
    local = LocalNode(b"o" * 20, 1, 1, "tests", Address(bound, 8468))
    made = Dialer(
        local,
        None,  # type: ignore[arg-type]
        None,  # type: ignore[arg-type]
        make_environment(log=log, entropy=SeededEntropy(seed)),
        on_duplicate_identity=lambda *_: None,
        resolver=resolver,
    )
    return made, dialled


@run_by(run)
async def test_remembered_peers_are_dialled_before_bootstraps(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that answers at once makes the bootstraps unnecessary."""
    made, dialled = dialer({OLD: None, FOUNDER: None, OTHER: None}, monkeypatch)
    result = await made.dial(["swarm:8468"], lambda: [OLD], None)

    assert result.contact.address == OLD
    assert dialled == [OLD]


@run_by(run)
async def test_bootstraps_follow_when_remembered_peers_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All addresses of a name are tried; success clears the failures."""
    gone = HelloRejected("refused", final=False)
    made, dialled = dialer({OLD: gone, FOUNDER: gone, OTHER: None}, monkeypatch)
    began_s = asyncio.get_running_loop().time()
    result = await made.dial(["swarm:8468"], lambda: [OLD], None)

    assert result.contact.address == OTHER
    assert sorted(dialled) == sorted([OLD, FOUNDER, OTHER])
    assert asyncio.get_running_loop().time() - began_s < BOOTSTRAP_DELAY_S, "it waited though all had refused"
    assert made.failures == {}


@run_by(run)
async def test_bootstraps_follow_a_moment_after_remembered_peers_that_are_silent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Remembered peers have a short lead, and no more."""
    made, dialled = dialer({OLD: None, FOUNDER: None}, monkeypatch, answer_s=HELLO_TIMEOUT_S)
    answered, dialled_s = module.say_hello, dict[Address, float]()

    async def say_hello(transport: object, address: Address, **options: object) -> HelloResult:
        dialled_s[address] = asyncio.get_running_loop().time()
        return await answered(transport, address, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "say_hello", say_hello)
    result = await made.dial(["10.0.0.1:8468"], lambda: [OLD], None)

    assert dialled == [OLD, FOUNDER]
    assert result.contact.address == OLD
    assert dialled_s[FOUNDER] - dialled_s[OLD] == pytest.approx(BOOTSTRAP_DELAY_S, abs=0.01)


@run_by(run)
async def test_a_bootstrap_that_answers_is_the_only_one_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three bootstraps one is dialled, and by many nodes each of them about as often."""
    first = [0, 0, 0]
    for seed in range(60):
        made, dialled = dialer({FOUNDER: None, OTHER: None, OLD: None}, monkeypatch, seed=seed)
        await made.dial([str(address) for address in (FOUNDER, OTHER, OLD)], list, None)
        assert len(dialled) == 1, f"seed {seed}"
        first[(FOUNDER, OTHER, OLD).index(dialled[0])] += 1
    assert min(first) >= 10, first


@pytest.mark.parametrize("seed", range(6))
@run_by(run)
async def test_a_silent_bootstrap_costs_a_quarter_of_a_second(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next is dialled then, whichever of three are silent; nobody waits for the end of their time-outs."""
    made, dialled = dialer({FOUNDER: None, OTHER: None, OLD: None}, monkeypatch, seed=seed)
    answered = module.say_hello

    async def say_hello(transport: object, address: Address, **options: object) -> HelloResult:
        if address != OLD:
            dialled.append(address)
            await asyncio.sleep(HELLO_TIMEOUT_S)
            raise HelloRejected("did not answer", final=False)
        return await answered(transport, address, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "say_hello", say_hello)
    began_s = asyncio.get_running_loop().time()
    result = await made.dial([str(address) for address in (FOUNDER, OTHER, OLD)], list, None)

    took_s = asyncio.get_running_loop().time() - began_s
    assert result.contact.address == OLD
    assert took_s == pytest.approx((len(dialled) - 1) * ATTEMPT_DELAY_S + 0.01, abs=0.01), f"seed {seed}: {dialled}"


@run_by(run)
async def test_a_bootstrap_that_refuses_costs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next is dialled as soon as it has."""
    gone = HelloRejected("refused", final=False)
    made, _ = dialer({FOUNDER: gone, OTHER: gone, OLD: None}, monkeypatch)
    began_s = asyncio.get_running_loop().time()
    await made.dial([str(address) for address in (FOUNDER, OTHER, OLD)], list, None)

    assert asyncio.get_running_loop().time() - began_s < 0.05


@run_by(run)
async def test_an_address_of_the_other_family_is_not_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket bound to an IPv6 address cannot send to IPv4; bound to all of them it can."""
    for bound, expected in (("2001:db8::1", []), ("::", [FOUNDER])):
        made, dialled = dialer({FOUNDER: None}, monkeypatch, bound=bound)
        await made.try_once(FOUNDER, None)
        assert dialled == expected


@pytest.mark.parametrize(
    ("other", "ending"),
    [(OwnAddress(), OnlyItself), (HelloRejected("belongs to run 'x'", final=True), NotThisSwarm)],
    ids=["itself", "another run"],
)
@run_by(run)
async def test_bootstraps_that_are_all_this_node_itself_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, other: HelloRejected, ending: type[NotThisSwarm]
) -> None:
    """Every address of every bootstrap must be its own: one that is another swarm's is a mistake of the user's."""
    made, _ = dialer({FOUNDER: OwnAddress(), OTHER: other}, monkeypatch)
    with pytest.raises(NotThisSwarm) as caught:
        await made.dial(["swarm:8468", "10.0.0.1:8468"], list, None)

    assert type(caught.value) is ending


@run_by(run)
async def test_dialling_goes_on_while_one_bootstrap_may_still_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """With itself and a node that is not up yet it waits for that node, and does not found beside it."""
    answers: Answers = {FOUNDER: OwnAddress(), OTHER: HelloRejected("refused", final=False)}
    made, _ = dialer(answers, monkeypatch)
    dialling = asyncio.create_task(made.dial(["10.0.0.1:8468", "10.0.0.2:8468"], list, None))
    await asyncio.sleep(60.0)
    assert not dialling.done()
    answers[OTHER] = None
    assert (await dialling).contact.address == OTHER


@run_by(run)
async def test_a_node_on_the_loopback_is_told_why_it_reaches_no_other_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The address is not dialled; its reason names where this node listens and the setting to change."""
    made, dialled = dialer({FOUNDER: None}, monkeypatch, bound="127.0.0.1")
    dialling = asyncio.create_task(made.dial(["10.0.0.1:8468"], list, None))
    await asyncio.sleep(1.0)
    dialling.cancel()

    assert dialled == []
    assert "listens on 127.0.0.1" in made.failures[str(FOUNDER)]
    assert 'node.host = "0.0.0.0"' in made.failures[str(FOUNDER)]


@run_by(run)
async def test_while_nothing_answers_the_log_says_so_every_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """With how long, each address, why, and what to do; a changed reason is logged at once, its repeat not."""
    log = ListLog([])
    made, _ = dialer({FOUNDER: HelloRejected("did not answer", final=False)}, monkeypatch, log=log)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3 * (module.REMIND_S + 1.5 * module.MAX_RETRY_DELAY_S)):
            await made.dial(["10.0.0.1:8468"], list, None)

    reminders = [record.fields for record in log.of("still_not_joined")]
    assert len(log.of("bootstrap_failed")) == 1
    assert len(reminders) == 3
    assert [abs(fields["waited_s"] - 60 * (at + 1)) < 40 for at, fields in enumerate(reminders)] == [True] * 3
    (sentence,) = reminders[0]["tried"]
    assert sentence.startswith("10.0.0.1:8468 did not answer: see that the machine is up")


@run_by(run)
async def test_a_single_try_keeps_the_reason_of_its_failure_where_it_is_asked_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until the address answers."""
    answers: Answers = {FOUNDER: HelloRejected("refused", final=False)}
    made, _ = dialer(answers, monkeypatch)
    assert await made.try_once(FOUNDER, GENESIS) is None
    assert made.failures == {}
    assert await made.try_once(FOUNDER, GENESIS, is_noted=True) is None
    assert made.failures == {str(FOUNDER): "refused"}
    answers[FOUNDER] = None
    assert await made.try_once(FOUNDER, GENESIS, is_noted=True) is not None
    assert made.failures == {}


@run_by(run)
async def test_a_single_try_says_why_it_did_not_dial_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """A node on the loopback that meets nobody is told so, as one that joins is."""
    made, dialled = dialer({FOUNDER: None}, monkeypatch, bound="127.0.0.1")

    assert await made.try_once(FOUNDER, GENESIS, is_noted=True) is None
    assert dialled == []
    assert "listens on 127.0.0.1" in made.failures[str(FOUNDER)]


#: Modules that make reasons, and the calls that do.
MAKERS = {
    "overlay/bootstrap/hello.py": r"HelloRejected\(\s*f?\"([^\"]+)\"",
    "overlay/sockets/connection_pool.py": r"TransportError\(\"(?:foreign|refused|timeout|reset)\", to, f?\"([^\"]+)\"",
}


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (CLOSED_WITHOUT_RESPONSE, "p2pnode key show"),
        ("has no certificate of this swarm: it has another key or another run", "invitation"),
        ("presented no certificate of a node: its key is no Ed25519 key", "same version"),
        ("belongs to run 'digits', this node to 'mnist'", "--run"),
        ("belongs to another swarm named 'digits' (genesis ab, here cd)", "p2pnode forget"),
        ("refused the connection: no process listens there", "node.port"),
        ("did not answer for 2 s", "firewall"),
        ("cannot be resolved: [Errno -2] Name or service not known", "DNS"),
        ("is IPv6, and this node listens on IPv4 only", '"::"'),
        ("something new", OTHERWISE),
    ],
)
def test_each_cause_has_its_own_next_step(reason: str, words: str) -> None:
    """A wrong key, a wrong run and an unreachable address are told apart."""
    assert words in what_to_do(reason)


def test_every_reason_in_the_code_has_advice() -> None:
    """None of the reasons that `hello` and connecting give falls through to the general one."""
    found = [
        reason
        for path, pattern in MAKERS.items()
        for reason in re.findall(pattern, (ROOT / path).read_text(encoding="utf-8"))
    ]
    assert len(found) > 10
    # A peer that answers as somebody else is dialled again, and is no person's business.
    assert [reason for reason in found if what_to_do(reason) == OTHERWISE and "answers as" not in reason] == []


def test_a_reminder_names_some_addresses_with_cause_and_next_step() -> None:
    """Many remembered peers do not fill the log."""
    attempts = {f"10.0.0.{at}:1": "did not answer" for at in range(MAX_EXPLAINED + 5)}
    sentences = explained(attempts)
    assert len(sentences) == MAX_EXPLAINED
    assert sentences[0].startswith("10.0.0.0:1 did not answer: see that the machine is up")


def test_an_address_needs_no_resolver() -> None:
    """Both families, in their normal form."""
    assert asyncio.run(resolve("10.0.0.1:80")) == [Address("10.0.0.1", 80)]
    assert asyncio.run(resolve("[2001:DB8::1]:80")) == [Address("2001:db8::1", 80)]


def test_a_name_gives_each_of_its_addresses_once() -> None:
    """`localhost` is in every hosts file."""
    found = asyncio.run(resolve("localhost:80"))

    assert found
    assert len(set(found)) == len(found)
    assert {address.host for address in found} <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize("text", ["10.0.0.1", "10.0.0.1:0", "::1:80"])
def test_text_without_a_usable_port_is_an_error(text: str) -> None:
    """The setting is wrong, and no resolver is asked."""
    with pytest.raises(ValueError, match=text):
        asyncio.run(resolve(text))


@pytest.mark.parametrize(
    ("text", "advertised"),
    [
        ("", None),
        ("192.0.2.1", ("192.0.2.1", 0)),
        ("192.0.2.1:9000", ("192.0.2.1", 9000)),
        ("2001:db8::1", ("2001:db8::1", 0)),
        ("[2001:db8::1]:9000", ("2001:db8::1", 9000)),
    ],
)
def test_the_port_of_an_advertised_address_may_be_left_out(text: str, advertised: tuple[str, int] | None) -> None:
    """Then the bound port is meant, which 0 stands for."""
    assert asyncio.run(advertised_address(text)) == advertised
