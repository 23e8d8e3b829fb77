"""The pure rules of the overlay: identity, peers, population, sampling, placement, time-outs, table, lookup, wire."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from overlay.addresses import Address
from overlay.discovery.placement import rank
from overlay.discovery.population import Estimator
from overlay.discovery.sampling import SamplePool, ball_radius, inside_ball, pick_slot
from overlay.identity import UnreadableIdentity, load_identity, next_incarnation
from overlay.ids import ID_SPACE, distance, key_id, node_id_of, random_id, random_id_with_prefix, shared_bits, short
from overlay.kademlia import messages
from overlay.kademlia.broadcast_queue import GOSSIP_PER_DATAGRAM, BroadcastQueue
from overlay.kademlia.lookup import Lookup
from overlay.kademlia.round_trips import RttEstimator
from overlay.kademlia.routing_table import ContactTable
from overlay.membership.negative_cache import NegativeCache
from overlay.peers import Activity, Contact, Heartbeat, PeerTable
from overlay.transport import MAX_DATAGRAM_BYTES
from tests.harness.environment import MemoryDisk, SeededEntropy


def ids(count: int, seed: int = 1) -> list[bytes]:
    rng = random.Random(seed)
    return [random_id(rng) for _ in range(count)]


def contact(node_id: bytes, port: int = 8468) -> Contact:
    return Contact(node_id, Address("10.0.0.1", port))


def beat(node_id: bytes = b"n" * 20, **changes: object) -> Heartbeat:
    values: dict[str, object] = {"incarnation": 1, "boot": 7, "port": 8468, **changes}
    return Heartbeat(node_id, **values)  # type: ignore[arg-type]


# -- ids and identity


def test_ids_are_prefixes_of_hashes() -> None:
    """A node id is the first 160 bits of SHA-256 of the key; a key id is SHA-1; both 20 bytes."""
    assert node_id_of(b"").hex() == "e3b0c44298fc1c149afbf4c8996fb92427ae41e4"
    assert key_id(b"").hex() == "da39a3ee5e6b4b0d3255bfef95601890afd80709"
    assert short(key_id(b"")) == "da39a3ee"


def test_prefixes_and_distances_agree() -> None:
    """Ids that share n bits lie closer than 2^(160 - n)."""
    rng = random.Random(3)
    for bits in (0, 1, 7, 64, 159, 160):
        prefix = rng.getrandbits(bits) if bits else 0
        one, other = (random_id_with_prefix(prefix, bits, rng) for _ in range(2))
        assert shared_bits(one, other) >= bits
        assert distance(one, other) < 1 << (160 - bits)


def test_an_identity_is_made_once_and_kept_private() -> None:
    """The second start on a directory has the same id; the key is written as private; it signs."""
    disk = MemoryDisk()
    first = load_identity(disk, SeededEntropy(1))
    second = load_identity(disk, SeededEntropy(2))

    assert first.node_id == second.node_id == node_id_of(first.public_key)
    assert disk.private["identity.key"]
    assert len(first.sign(b"data")) == 64


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_a_damaged_identity_is_an_error_with_a_way_out(content: bytes) -> None:
    """Junk in place of the key is never replaced by a new key."""
    disk = MemoryDisk()
    disk.write("identity.key", content)

    with pytest.raises(UnreadableIdentity, match=r"identity\.key"):
        load_identity(disk, SeededEntropy(1))
    assert disk.files["identity.key"] == content


def test_an_unreadable_identity_is_an_error() -> None:
    """No permission to read is said, not worked around."""
    disk = MemoryDisk()
    disk.unreadable.add("identity.key")

    with pytest.raises(UnreadableIdentity, match="Permission denied"):
        load_identity(disk, SeededEntropy(1))


def test_incarnations_count_starts() -> None:
    """1, 2, 3 …, each on disk before it is used; junk is an error."""
    disk = MemoryDisk()
    assert [next_incarnation(disk) for _ in range(3)] == [1, 2, 3]
    assert disk.files["incarnation"] == b"3"

    disk.write("incarnation", b"three")
    with pytest.raises(UnreadableIdentity, match="number"):
        next_incarnation(disk)


# -- peers


def test_steps_only_rise_within_an_incarnation() -> None:
    """A beat that was overtaken on its way changes nothing; a newer incarnation starts again."""
    table = PeerTable()
    changes = [
        table.observe(beat(step=5, activity=2), "10.0.0.1", 1.0),
        table.observe(beat(step=3, activity=3), "10.0.0.1", 2.0),
        table.observe(beat(step=2, incarnation=2, activity=2), "10.0.0.1", 3.0),
        table.observe(beat(step=9, activity=2), "10.0.0.1", 4.0),
    ]
    peer = table.get(b"n" * 20)

    assert [change and change.kind for change in changes] == ["up", None, "restarted", None]
    assert peer is not None
    assert (peer.step, peer.incarnation, peer.activity) == (2, 2, Activity.TRAINING)


def test_progress_is_a_rising_step_or_the_beginning_of_training() -> None:
    """`last_progress` moves with the step, with the incarnation, READY and TRAINING; nothing else moves it."""
    table = PeerTable()
    progress = []
    for now, change in enumerate(
        [
            {},
            {},
            {"activity": 1},
            {"activity": 2},
            {"activity": 2},
            {"activity": 2, "step": 1},
            {"activity": 3, "step": 1},
        ]
    ):
        table.observe(beat(**change), "10.0.0.1", float(now))
        peer = table.get(b"n" * 20)
        assert peer is not None
        progress.append(peer.last_progress)

    assert progress == [0.0, 0.0, 2.0, 3.0, 3.0, 5.0, 5.0]


def test_a_worker_is_skipped_when_it_is_heard_without_progress() -> None:
    """Silence alone is no stall; life signs without a step for more than 10 s or four steps are."""
    table = PeerTable()
    table.observe(beat(activity=2), "10.0.0.1", 0.0)
    peer = table.get(b"n" * 20)
    assert peer is not None

    assert peer.is_worker(50.0), "not heard since"
    table.observe(beat(activity=2, step_seconds=5.0), "10.0.0.1", 19.0)
    assert peer.is_worker(19.0), "four steps of 5 s"
    table.observe(beat(activity=2, step_seconds=5.0), "10.0.0.1", 21.0)
    assert not peer.is_worker(21.0)
    table.observe(beat(activity=2, step_seconds=5.0, step=1), "10.0.0.1", 22.0)
    assert peer.is_worker(22.0)


def test_changes_of_address_and_eligibility_and_clones_are_told() -> None:
    """`moved`, `eligible` and `clone`; a clone changes nothing."""
    table = PeerTable()
    table.observe(beat(), "10.0.0.1", 0.0)
    kinds = [
        table.observe(beat(), "10.0.0.2", 1.0),
        table.observe(beat(eligible=True), "10.0.0.2", 2.0),
        table.observe(beat(boot=8, step=50), "10.0.0.3", 3.0),
    ]
    peer = table.get(b"n" * 20)

    assert [change and change.kind for change in kinds] == ["moved", "eligible", "clone"]
    assert peer is not None
    assert (peer.address.host, peer.step) == ("10.0.0.2", 0)
    assert table.at(Address("10.0.0.2", 8468)) == peer.node_id
    assert table.at(Address("10.0.0.1", 8468)) is None


# -- population


def simulate_lookups(n: int, k: int, lookups: int, rng: random.Random) -> Estimator:
    """Lookups over n uniform ids, fresh ones each time (the model of the golden figures)."""
    estimator = Estimator(k)
    for _ in range(lookups):
        estimator.observe(sorted(rng.random() for _ in range(n))[:k], 0.0)
    return estimator


@pytest.mark.parametrize(("n", "lookups", "expected_sd"), [(1000, 20, 0.050), (64, 16, 0.050), (1000, 4, 0.110)])
def test_the_pooled_estimate_has_the_golden_error(n: int, lookups: int, expected_sd: float) -> None:
    """Bias below 1.2 %, relative deviation as in population-and-sampling.md section 2, interval right 9 times of 10."""
    rng = random.Random(5)
    found = []
    for _ in range(250):
        population = simulate_lookups(n, 20, lookups, rng).estimate(0.0)
        assert population is not None
        found.append(population)
    estimates = [population.estimate for population in found]
    covered = sum(population.low <= n <= population.high for population in found) / len(found)

    assert abs(statistics.mean(estimates) / n - 1) < 0.02
    assert statistics.stdev(estimates) / n == pytest.approx(expected_sd, rel=0.2)
    assert 0.90 <= covered <= 1.0


def test_the_interval_holds_the_truth_for_fixed_ids() -> None:
    """Many lookups over one set of ids: the interval keeps the spread of the ids themselves."""
    rng = random.Random(6)
    covered = 0
    for _ in range(60):
        nodes = [rng.getrandbits(160) for _ in range(200)]
        estimator = Estimator(20)
        for _ in range(20):
            target = rng.getrandbits(160)
            estimator.observe(sorted((node ^ target) / ID_SPACE for node in nodes)[:20], 0.0)
        population = estimator.estimate(0.0)
        assert population is not None
        covered += population.low <= 200 <= population.high

    assert covered >= 51


def test_fewer_than_k_answers_are_an_exact_count() -> None:
    """A lookup that found 7 found everybody; older, fuller lookups no longer count, nor do older counts later."""
    estimator = Estimator(20)
    estimator.observe([i / 100 for i in range(1, 21)], 0.0)
    estimator.observe([0.1] * 7, 1.0)
    seven = estimator.estimate(1.0)
    estimator.observe([i / 50 for i in range(1, 21)], 2.0)
    many = estimator.estimate(2.0)

    assert seven is not None
    assert (seven.estimate, seven.exact) == (7.0, True)
    assert many is not None
    assert (many.exact, many.observations) == (False, 1)
    assert many.estimate == pytest.approx(19 / 0.4)


def test_old_lookups_age_out() -> None:
    """Two minutes later an estimator knows nothing."""
    estimator = Estimator(20)
    estimator.observe([i / 100 for i in range(1, 21)], 0.0)

    assert estimator.estimate(119.0) is not None
    assert estimator.estimate(121.0) is None


def test_the_zone_count_is_close_to_the_estimate() -> None:
    """Nodes under a prefix times 2^z: unbiased within 3 % over many lookups."""
    rng = random.Random(8)
    zones = []
    for _ in range(40):
        population = simulate_lookups(1000, 20, 20, rng).estimate(0.0)
        assert population is not None
        assert population.zone_estimate is not None
        zones.append(population.zone_estimate)

    assert statistics.mean(zones) == pytest.approx(1000, rel=0.03)


# -- sampling


def test_ball_rejection_is_uniform_and_the_closest_node_is_not() -> None:
    """Chi-square over 60 nodes: slots in XOR balls pass, "closest to a random id" fails; so the test has power."""
    rng = random.Random(9)
    nodes = ids(60, seed=10)
    radius = ball_radius(60)
    uniform, naive = dict.fromkeys(nodes, 0), dict.fromkeys(nodes, 0)
    draws = tries = 0
    while draws < 6000:
        target = random_id(rng)
        tries += 1
        inside = sorted(inside_ball(target, nodes, radius), key=lambda n: distance(n, target))[:20]
        drawn = pick_slot(inside, 20, rng)
        naive[min(nodes, key=lambda n: distance(n, target))] += 1
        if drawn is not None:
            uniform[drawn] += 1
            draws += 1

    def chi_square(counts: dict[bytes, int]) -> float:
        mean = sum(counts.values()) / len(counts)
        return sum((count - mean) ** 2 / mean for count in counts.values())

    # 59 degrees of freedom: 98.3 is the 0.999 quantile.
    assert chi_square(uniform) < 98.3
    assert chi_square(naive) > 1000
    assert draws / tries == pytest.approx(0.5, abs=0.02)


def test_a_pool_forgets_and_draws_without_replacement() -> None:
    """Balls age out after two minutes; a draw holds nobody twice and only those allowed."""
    pool = SamplePool()
    nodes = ids(12)
    pool.add(nodes[:8], 0.0, 12)
    pool.add(nodes[4:], 60.0, 12)
    drawn = pool.draw(20, lambda node_id: node_id != nodes[5], random.Random(1))

    assert sorted(drawn) == sorted(set(nodes) - {nodes[5]})
    pool.expire(121.0)
    assert pool.ids() == nodes[4:]


# -- placement


def test_a_leave_moves_only_its_own_share() -> None:
    """Without a node its keys go elsewhere and all others stay; shares are balanced."""
    nodes = ids(10)
    keys = [key_id(bytes([number // 256, number % 256])) for number in range(2000)]
    before = {key: rank(key, nodes)[0] for key in keys}
    after = {key: rank(key, nodes[1:])[0] for key in keys}
    shares = [sum(owner == node for owner in before.values()) for node in nodes]

    assert all(after[key] == before[key] for key in keys if before[key] != nodes[0])
    assert min(shares) > 140
    assert max(shares) < 260
    assert rank(keys[0], reversed(nodes)) == rank(keys[0], nodes)


# -- time-outs


def test_waits_follow_the_measured_round_trips() -> None:
    """Unmeasured 0.25 s; then mean + 4 deviations between 0.1 s and the ceiling, retry included."""
    trips = RttEstimator(0.5)
    assert trips.waits(None) == (0.25, 0.25)
    for _ in range(50):
        trips.observe(0.002)
    assert trips.waits(None) == (0.1, 0.1)
    for _ in range(50):
        trips.observe(0.4)
    first, second = trips.waits(None, stretch=2.0)
    assert first + second == pytest.approx(1.0)


def test_silent_addresses_are_left_alone_and_forgiven() -> None:
    """Keyed by id and address, longer each time, ended by an answer."""
    cache = NegativeCache()
    one = contact(b"a" * 20)
    cache.silent(one, 0.0)
    assert cache.is_silent(one, 4.9)
    assert not cache.is_silent(one, 5.1)
    assert not cache.is_silent(contact(b"a" * 20, port=1), 1.0)
    cache.silent(one, 6.0)
    assert cache.is_silent(one, 15.9)
    cache.answered(one)
    assert not cache.is_silent(one, 7.0)


# -- table and lookup


def test_the_table_gives_the_exact_closest_and_the_target_itself() -> None:
    """Among what it holds: sorted by distance, the target included, suspects left out."""
    own, *others = ids(400, seed=3)
    table = ContactTable(20, _node(own))
    for number, node_id in enumerate(others):
        table.add(contact(node_id, number + 1))
    held = [c.node_id for c in table]
    target = held[17]
    expected = sorted(held, key=lambda node_id: distance(node_id, target))[:20]

    assert [entry.id for entry in table.closest(target, 20)] == expected
    assert expected[0] == target
    table.list_to_others(target, False)
    assert target not in [entry.id for entry in table.closest(target, 20)]
    for node_id in held:
        table.remove(node_id)
    assert not set(held) & {c.node_id for c in table}
    assert all(len(bucket) <= 20 for bucket in table.buckets)


def test_the_table_holds_all_of_the_own_neighbourhood() -> None:
    """The 20 nodes closest to ourselves always find a place, and we never do."""
    own, *others = ids(2000, seed=4)
    table = ContactTable(20, _node(own))
    for node_id in others:
        table.add(contact(node_id))
    nearest = sorted(others, key=lambda node_id: distance(node_id, own))[:20]

    assert set(nearest) <= {c.node_id for c in table}
    assert not table.add(contact(own))
    assert own not in table


def _node(node_id: bytes) -> object:
    from kademlia.node import Node

    return Node(node_id)


def test_a_lookup_ends_with_the_k_closest_that_answered() -> None:
    """Dead candidates fall out, slow ones give up their place in the window, ourselves take part."""
    own, *others = ids(30, seed=5)
    target = others[0]
    ranked = sorted([own, *others], key=lambda node_id: distance(node_id, target))
    dead = {ranked[1], ranked[4]}
    lookup = Lookup(target, contact(own), 5, 3, [contact(ranked[-1])])
    while not lookup.done:
        asked = lookup.next_queries()
        assert asked
        for peer in asked:
            if peer.node_id in dead:
                lookup.slow(peer.node_id)
                lookup.failed(peer.node_id)
            else:
                lookup.answered(peer.node_id, [contact(other) for other in others])

    assert [c.node_id for c in lookup.result()] == [n for n in ranked if n not in dead][:5]


def test_a_slow_peer_frees_its_place() -> None:
    """With a window of 3 and three silent peers, three more are asked."""
    own, *others = ids(10, seed=6)
    lookup = Lookup(own, contact(own), 8, 3, [contact(node_id) for node_id in others])
    first = lookup.next_queries()
    assert len(first) == 3
    assert lookup.next_queries() == []
    for peer in first:
        lookup.slow(peer.node_id)
    assert len(lookup.next_queries()) == 3
    assert not lookup.done


def test_a_lookup_asks_all_the_closest_at_once_when_nobody_closer_turns_up() -> None:
    """While answers bring closer nodes the window is 3; after one that brings none, the 8 closest are asked."""
    own, *others = ids(30, seed=7)
    target = random_id(random.Random(7))
    ranked = sorted(others, key=lambda node_id: distance(node_id, target))
    lookup = Lookup(target, contact(own), 8, 3, [contact(node_id) for node_id in ranked[10:14]])
    first = lookup.next_queries()
    assert len(first) == 3
    lookup.answered(first[0].node_id, [contact(node_id) for node_id in ranked[:10]])
    assert len(lookup.next_queries()) == 1, "it brought closer ones: the window stays"
    lookup.answered(first[1].node_id, [contact(node_id) for node_id in ranked[:10]])
    assert len(lookup.next_queries()) >= 6, "nothing new: the rest is asked at once"
    assert lookup.rounds == 2


def test_whoever_would_replace_a_slow_peer_is_asked_before_it_has_failed() -> None:
    """All of the 5 closest are silent: the next 5 are asked while the lookup still waits for those."""
    own, *others = ids(20, seed=8)
    target = random_id(random.Random(8))
    ranked = sorted(others, key=lambda node_id: distance(node_id, target))
    lookup = Lookup(target, contact(own), 5, 5, [contact(node_id) for node_id in others])
    for peer in lookup.next_queries():
        lookup.slow(peer.node_id)
    assert {peer.node_id for peer in lookup.next_queries()} <= set(ranked[4:10])
    assert not lookup.done


# -- wire and gossip


def test_datagrams_are_what_the_specification_says() -> None:
    """Golden bytes: kind, message id, then [tag, beat, body, news] in MessagePack."""
    head = messages.encode_head(b"swarmtag", beat(step=3, eligible=True))
    datagram = messages.encode(
        messages.REQUEST, b"m" * 20, head, messages.Ping(), [messages.Gossip(1, b"s" * 20, 2, 0)]
    )

    assert datagram.hex() == (
        "00" + "6d" * 20 + "94" + "c408" + b"swarmtag".hex() + "9a" + "c414" + "6e" * 20 + "0107cd2114a00003"
        "cb000000000000000000c3" + "91a470696e67" + "9194" + "01c414" + "73" * 20 + "0200"
    )
    message_id, message = messages.decode(datagram)
    assert message_id == b"m" * 20
    assert message.beat == beat(step=3, eligible=True)


def test_twenty_contacts_fit_one_datagram_and_come_back() -> None:
    """IPv4 and IPv6 mixed, largest beat, most news: at most 1400 bytes; the own id and bad entries are left out."""
    nodes = ids(40, seed=7)
    v4 = [Contact(node_id, Address("10.1.2.3", 9)) for node_id in nodes[:10]]
    v6 = [Contact(node_id, Address("2001:db8::1", 65535)) for node_id in nodes[10:20]]
    packed = messages.pack_nodes([messages.pack_contact(c) for c in (*v4, *v6)])
    largest = beat(
        incarnation=2**63 - 1,
        boot=2**64 - 1,
        port=65535,
        host="f" * 0 + "2001:db8:1111:2222:3333:4444:5555:6666",
        step=2**63 - 1,
        step_seconds=math.pi,
        samples=2**63 - 1,
    )
    news = [messages.Gossip(3, node_id, 2**63 - 1, 2**63 - 1) for node_id in nodes[: messages.MAX_GOSSIP]]
    datagram = messages.encode(messages.RESPONSE, b"m" * 20, messages.encode_head(b"swarmtag", largest), packed, news)
    contacts, malformed = messages.unpack_nodes(packed, nodes[0])

    assert len(datagram) <= MAX_DATAGRAM_BYTES
    assert malformed == 0
    assert contacts == [*v4[1:], *v6]
    only_v4, _ = messages.unpack_nodes(packed, b"o" * 20, ipv6=False)
    assert only_v4 == v4


@pytest.mark.parametrize(
    "entry",
    [
        b"i" * 20 + bytes([10, 0, 0, 1]) + b"\x00\x00",  # port 0
        b"i" * 20 + bytes([0, 0, 0, 0]) + b"\x00\x01",  # unspecified
        b"i" * 20 + bytes([224, 0, 0, 1]) + b"\x00\x01",  # multicast
        b"i" * 20 + bytes([255, 255, 255, 255]) + b"\x00\x01",  # broadcast
        b"i" * 25,  # cut off
    ],
)
def test_contacts_that_cannot_be_sent_to_are_counted_and_dropped(entry: bytes) -> None:
    """None of them becomes a contact."""
    assert messages.unpack_nodes(messages.Nodes(entry, b""), b"o" * 20) == ([], 1)


@pytest.mark.parametrize(
    ("datagram", "reason"),
    [
        (b"", "short"),
        (b"\x00" * 21, "short"),
        (b"\x02" + b"\x00" * 40, "kind"),
        (b"\x00" + b"\x00" * 2000, "long"),
        (b"\x00" * 21 + b"\x94" * 1300, "content"),
        (b"\x00" * 21 + b"\x91" * 1300, "content"),
    ],
)
def test_what_is_no_datagram_says_why(datagram: bytes, reason: str) -> None:
    """`Malformed` with a constant reason, whatever the bytes, nested ones included."""
    with pytest.raises(messages.Malformed, match=reason):
        messages.decode(datagram)


@pytest.mark.parametrize("change", [{"port": 0}, {"step": -1}, {"step_seconds": math.nan}, {"activity": 9}])
def test_impossible_beats_do_not_decode(change: dict[str, object]) -> None:
    """Ranges are checked by the decoder."""
    head = messages.encode_head(b"swarmtag", beat(**change))

    with pytest.raises(messages.Malformed, match="content"):
        messages.decode(messages.encode(messages.REQUEST, b"m" * 20, head, messages.Ping()))


def test_a_host_that_is_no_address_does_not_pass() -> None:
    """A name in a beat could block on a resolver."""
    head = messages.encode_head(b"swarmtag", beat(host="example.org"))

    with pytest.raises(messages.Malformed, match="host"):
        messages.decode(messages.encode(messages.REQUEST, b"m" * 20, head, messages.Ping()))


def test_news_are_told_a_bounded_number_of_times() -> None:
    """4 · ceil(log10(n + 1)) datagrams each, four at a time, newest about a node only."""
    queue = BroadcastQueue()
    nodes = ids(6)
    for node_id in nodes:
        queue.put(messages.Gossip(1, node_id, 1, 0), members=99)
    queue.put(messages.Gossip(2, nodes[0], 1, 0), members=99)
    told: list[messages.Gossip] = []
    while taken := queue.take():
        assert len(taken) <= GOSSIP_PER_DATAGRAM
        told += taken

    assert len(told) == 6 * 8
    assert messages.Gossip(1, nodes[0], 1, 0) not in told
