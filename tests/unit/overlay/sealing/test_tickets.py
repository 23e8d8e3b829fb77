"""Tickets of streams, and certificates: who may begin TLS, and whose certificate it is."""

from __future__ import annotations

import contextlib
import datetime
import random
import ssl
import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from overlay.identity import identity_from_seed
from overlay.sealing.certificate_maker import authority, make_bundle, node_certificate
from overlay.sealing.certificate_request import CertificateRequest
from overlay.sealing.client_hello import MAX_HELLO_BYTES, server_name
from overlay.sealing.init_filter import CLOCK_BOUND_S
from overlay.sealing.refusal import Refused
from overlay.sealing.swarm_key import KeyRing, SwarmKey
from overlay.sealing.tickets import TicketVerdict, TicketVerifier
from overlay.sealing.tls import Credentials, NotANodeCertificate, id_of_certificate

KEY, NEXT_KEY = SwarmKey(b"\1" * 32), SwarmKey(b"\2" * 32)
RING = KeyRing((KEY,))
NODE, OTHER = b"n" * 20, b"o" * 20
WALL = 1_767_225_600.0
NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def admission(
    own_id: bytes = NODE, keys: KeyRing = RING, run: str = "tests", started: float = WALL - 10
) -> TicketVerifier:
    token = random.Random(f"{own_id.hex()}/{started}/{keys.fingerprints}").randbytes
    return TicketVerifier(keys, run, own_id, token, started_wall=started)


def hello(name: str) -> bytes:
    """The first bytes that `ssl` sends to a server of this name."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with pytest.raises(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname=name).do_handshake()
    return outgoing.read()


def refusal(judge: TicketVerifier, beginning: bytes, wall: float = WALL) -> str:
    with pytest.raises(Refused) as caught:
        judge.verify(beginning, wall)
    return str(caught.value)


def test_a_members_ticket_is_taken_once() -> None:
    """The ClientHello of a member that means this node, or whoever answers, is admitted, and its copy is not."""
    gate, member = admission(), admission(OTHER)
    for recipient in (NODE, b""):
        beginning = hello(member.make_ticket(recipient, WALL))

        assert gate.verify(beginning, WALL) is TicketVerdict.ADMITTED
        assert refusal(gate, beginning) == "replayed"


def test_who_is_not_admitted() -> None:
    """Another key, another run, another recipient, a clock too far, a time before our start: each has its reason."""
    gate = admission()
    cases = {
        "another key": (admission(OTHER, KeyRing((NEXT_KEY,))).make_ticket(NODE, WALL), "stranger"),
        "another run": (admission(OTHER, run="other").make_ticket(NODE, WALL), "stranger"),
        "another recipient": (admission(OTHER).make_ticket(OTHER, WALL), "stranger"),
        "early clock": (admission(OTHER).make_ticket(NODE, WALL - CLOCK_BOUND_S - 1), "clock"),
        "late clock": (admission(OTHER).make_ticket(NODE, WALL + CLOCK_BOUND_S + 1), "clock"),
        "before our start": (admission(OTHER).make_ticket(NODE, WALL - 11), "before_start"),
        "no ticket": ("example.org", "stranger"),
    }

    assert {name: refusal(gate, hello(ticket)) for name, (ticket, _) in cases.items()} == {
        name: reason for name, (_, reason) in cases.items()
    }


def test_a_member_with_a_wrong_clock_is_told_of() -> None:
    """Whoever watches the gate learns by how much a member's clock is ahead; of strangers' it learns nothing."""
    ahead: list[float] = []
    gate = TicketVerifier(KeyRing((KEY,)), "tests", NODE, bytes, started_wall=WALL, clock_differs=ahead.append)
    refusal(gate, hello(admission(OTHER).make_ticket(NODE, WALL + 90)))
    refusal(gate, hello(admission(OTHER, KeyRing((NEXT_KEY,))).make_ticket(NODE, WALL + 90)))

    assert ahead == [pytest.approx(90)]


def test_tickets_while_keys_are_rotated() -> None:
    """A ticket under either of two valid keys is taken, one under a key that is no more is not."""
    gate = admission(keys=KeyRing((NEXT_KEY, KEY)))
    old, new = admission(OTHER), admission(OTHER, KeyRing((NEXT_KEY,)))
    assert gate.verify(hello(old.make_ticket(NODE, WALL)), WALL) is TicketVerdict.ADMITTED
    assert gate.verify(hello(new.make_ticket(NODE, WALL)), WALL) is TicketVerdict.ADMITTED
    gate.use(KeyRing((NEXT_KEY,)))

    assert refusal(gate, hello(old.make_ticket(NODE, WALL + 1))) == "stranger"


def test_every_part_of_a_hello() -> None:
    """Of a ClientHello that comes byte by byte nothing is judged before it is whole."""
    gate = admission()
    beginning = hello(admission(OTHER).make_ticket(NODE, WALL))
    judgements = {gate.verify(beginning[:size], WALL) for size in range(len(beginning))}

    assert judgements == {TicketVerdict.INCOMPLETE}
    assert gate.verify(beginning, WALL) is TicketVerdict.ADMITTED


def test_any_bytes_are_judged() -> None:
    """Random bytes, and a ClientHello with any bytes changed, end in a judgement, never in another error."""
    rng = random.Random(11)
    print("seed 11")
    beginning = hello("example.org")
    for _ in range(3000):
        junk = bytearray(beginning[: rng.randint(0, len(beginning))])
        for _ in range(rng.randint(0, 6)):
            if junk:
                junk[rng.randrange(len(junk))] = rng.randrange(256)
        for data in (bytes(junk), rng.randbytes(rng.randint(0, 600)), b"\x16\x03\x01" + rng.randbytes(200)):
            with contextlib.suppress(Refused):
                name = server_name(data)
                assert name is None or len(name) <= MAX_HELLO_BYTES


# -- certificates ------------------------------------------------------------------------------------------------


def test_the_authority_follows_from_key_and_run() -> None:
    """Two nodes make the same authority, byte for byte; another run or key makes another."""
    made = [authority(key, run)[1].public_bytes(Encoding.DER) for key in (KEY, NEXT_KEY) for run in ("a", "b")]

    assert authority(KEY, "a")[1].public_bytes(Encoding.DER) == made[0]
    assert len(set(made)) == 4


def test_the_id_of_a_certificate_is_its_keys() -> None:
    """What is read from a node's certificate is the id of the identity it was made for."""
    for number in range(20):
        seed = number.to_bytes(32, "big")
        certificate = node_certificate(seed, KEY, "tests", NOW)[1]

        assert id_of_certificate(certificate.public_bytes(Encoding.DER)) == identity_from_seed(seed).node_id


def test_a_subject_that_looks_like_a_key_fools_nobody() -> None:
    """The key is read where it stands: another's key, encoded in the subject before it, is not taken for it."""
    victim = identity_from_seed(b"v" * 32)
    spki = bytes.fromhex("302a300506032b6570032100") + victim.public_key
    private = Ed25519PrivateKey.from_private_bytes(b"l" * 32)
    issuer_key, issuer = authority(KEY, "tests")
    lying = (
        x509.CertificateBuilder()
        .subject_name(
            x509.Name(
                [
                    x509.NameAttribute(
                        NameOID.X500_UNIQUE_IDENTIFIER, spki, x509.name._ASN1Type.BitString, _validate=False
                    )
                ]
            )
        )
        .issuer_name(issuer.subject)
        .public_key(private.public_key())
        .serial_number(7)
        .not_valid_before(NOW)
        .not_valid_after(NOW + datetime.timedelta(days=1))
        .sign(issuer_key, None)
        .public_bytes(Encoding.DER)
    )

    assert spki in lying
    assert id_of_certificate(lying) == identity_from_seed(b"l" * 32).node_id


def test_what_is_no_nodes_certificate() -> None:
    """Another kind of key, and bytes that are torn or changed, have no id; no other error comes out."""
    key = generate_private_key(SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    foreign = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + datetime.timedelta(days=1))
        .sign(key, SHA256())
        .public_bytes(Encoding.DER)
    )
    with pytest.raises(NotANodeCertificate, match="Ed25519"):
        id_of_certificate(foreign)
    good = node_certificate(b"g" * 32, KEY, "tests", NOW)[1].public_bytes(Encoding.DER)
    for size in range(0, 200, 3):
        with pytest.raises(NotANodeCertificate):
            id_of_certificate(good[:size])
    rng = random.Random(12)
    print("seed 12")
    for _ in range(2000):
        junk = bytearray(good)
        junk[rng.randrange(len(junk))] ^= 1 << rng.randrange(8)
        try:
            assert len(id_of_certificate(bytes(junk))) == 20
        except NotANodeCertificate:
            pass


def credentials(seed: bytes, keys: KeyRing, run: str = "tests") -> Credentials:
    return Credentials.of(make_bundle(CertificateRequest(seed, run, [key.secret for key in keys], time.time())))


def handshake(client: Credentials, server: Credentials) -> tuple[bytes, bytes]:
    """Ids that both sides of a TLS connection see. Raises `ssl.SSLError` where one refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.client.wrap_bio(to_client, to_server)
    two = server.server.wrap_bio(to_server, to_client, server_side=True)
    done: set[ssl.SSLObject] = set()
    for _ in range(10):
        for side in (one, two):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                pass
    assert done == {one, two}
    seen = []
    for side in (one, two):
        certificate = side.getpeercert(True)
        assert certificate is not None
        seen.append(id_of_certificate(certificate))
    assert (one.version(), two.version()) == ("TLSv1.3", "TLSv1.3")
    return seen[0], seen[1]


def test_two_members_shake_hands() -> None:
    """Both see the other's id."""
    seen = handshake(credentials(b"a" * 32, KeyRing((KEY,))), credentials(b"b" * 32, KeyRing((KEY,))))

    assert seen == (identity_from_seed(b"b" * 32).node_id, identity_from_seed(b"a" * 32).node_id)


@pytest.mark.parametrize("stranger", [(KeyRing((NEXT_KEY,)), "tests"), (KeyRing((KEY,)), "other")], ids=["key", "run"])
def test_strangers_do_not(stranger: tuple[KeyRing, str]) -> None:
    """A certificate under another key's or run's authority is refused, on either side."""
    member, foreign = credentials(b"a" * 32, KeyRing((KEY,))), credentials(b"b" * 32, *stranger)
    for client, server in ((member, foreign), (foreign, member)):
        with pytest.raises(ssl.SSLError, match=r"(?i)certificate.verify.failed|unknown.ca"):
            handshake(client, server)


def test_hands_are_shaken_while_keys_are_rotated() -> None:
    """Nodes that are one step of a rotation apart accept each other's certificates."""
    steps = [KeyRing((KEY,)), KeyRing((KEY, NEXT_KEY)), KeyRing((NEXT_KEY, KEY)), KeyRing((NEXT_KEY,))]
    ends = [(credentials(b"a" * 32, ring), credentials(b"b" * 32, ring)) for ring in steps]
    for mine, theirs in ((0, 1), (1, 1), (1, 2), (2, 2), (2, 3), (3, 3)):
        handshake(ends[mine][0], ends[theirs][1])
        handshake(ends[theirs][0], ends[mine][1])
