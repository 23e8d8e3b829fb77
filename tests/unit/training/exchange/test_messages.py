"""Messages of a step: checked on decoding, and readable answers.

The streamed answer to a push: pieces of results, signs of life, and what is malformed.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from p2pnode.overlay.transport import MAX_HEAD_BYTES
from p2pnode.training.encoding.frames import BadFrame, FrameReader
from p2pnode.training.exchange.messages import (
    MAX_DELTAS,
    MAX_PIECE_BYTES,
    SIGN_OF_LIFE,
    Forward,
    Forwarded,
    LocateOwners,
    LocateOwnersAnswer,
    Pull,
    PullAnswer,
    PullResult,
    Push,
    PushAnswer,
    PushResult,
    Wanted,
    decode,
    encode,
    piece_of,
    read_record,
    read_results,
    record_frames,
)
from p2pnode.training.exchange.ownership_messages import (
    MAX_BUFFERS_BYTES,
    MAX_FETCHED,
    MAX_SOUGHT,
    CompareCopies,
    CopyDigest,
    CopyStatus,
    Fetch,
    FinalBuffers,
    FinalBuffersAnswer,
    FindDeltas,
    HandOver,
    LoggedDelta,
    OfferedDeltas,
    OwnedHistory,
    PublishedHead,
    ReplicasAnswer,
    StateHead,
    TransferResult,
)
from p2pnode.training.exchange.terms import MAX_SHARDS, ZERO_TERM, Fence, OwnerInfo, Term
from p2pnode.training.values.encoding import MAX_KEY_BYTES
from p2pnode.training.values.owner import MAX_ITEMS, ReadValues, UpdateValuesAnswer
from tests.harness.builders.stores import IDS, contact, term
from tests.harness.environment.virtual_loop import run
from tests.harness.runner.stories import run_by
from tests.harness.swarms.exchange_overlay import chunks

PUSH = Push(IDS["x"], 1, 2, 1, 0.5, [0, 1])


def test_a_message_survives_the_wire() -> None:
    """As an array, without the names of its fields."""
    assert decode(encode(PUSH), Push) == PUSH
    assert msgspec.msgpack.decode(encode(PUSH))[0] == IDS["x"]


@pytest.mark.parametrize(
    "changes",
    [{"node": b"short"}, {"step": -1}, {"weight": 0.0}, {"shards": [4096]}, {"shards": [0] * (MAX_SHARDS + 1)}],
)
def test_a_value_out_of_range_is_refused(changes: dict[str, object]) -> None:
    """Lengths, signs and the number of shards are checked before a handler runs."""
    with pytest.raises(msgspec.ValidationError):
        decode(encode(msgspec.structs.replace(PUSH, **changes)), Push)


@pytest.mark.parametrize("kind", [LocateOwnersAnswer, PushAnswer])
def test_text_and_lists_that_msgspec_cannot_read_are_malformed(kind: type[msgspec.Struct]) -> None:
    """It raises other errors for text that is no UTF-8, and for lists in lists behind the last element that is known:
    they would end the task that reads an answer."""
    shown = PushAnswer([PushResult(0, "refused", reason="xy")]) if kind is PushAnswer else LocateOwnersAnswer([info()])
    payload = encode(shown)
    assert decode(payload, kind) == shown
    with pytest.raises(msgspec.DecodeError):
        decode(payload.replace(b"xy", b"\xff\xff").replace(b"10.0", b"\xff\xff\xff\xff"), kind)
    deep = (
        bytes([payload[0] + 3]) + payload[1:] + (b"\xc2" * 1 if kind is PushAnswer else b"") + b"\x91" * 5_000 + b"\1"
    )
    with pytest.raises(msgspec.DecodeError):
        decode(deep, kind)


def info() -> OwnerInfo:
    return OwnerInfo.of(0, term(1, "b"), contact("b"))


def test_a_reason_of_a_later_version_is_accepted() -> None:
    """A refusal is final whatever its reason."""
    result = decode(encode(PushResult(0, "refused", reason="from-the-future")), PushResult)

    assert (result.status, result.reason, result.denies_ownership) == ("refused", "from-the-future", False)


def test_only_a_redirect_or_an_unknown_owner_denies_ownership() -> None:
    """Any other retry is for the same owner."""
    info = OwnerInfo.of(0, term(1, "b"), contact("b"))

    assert PushResult(0, "redirect", owner_info=info).denies_ownership
    assert PushResult.retry(0, "owner_unknown").denies_ownership
    assert not PushResult.retry(0, "too_many_pending").denies_ownership
    assert not PushResult.refused(0, "late").denies_ownership
    assert PullResult(0, "retry").denies_ownership
    assert not PullResult(0, "same").denies_ownership


def test_a_value_ranks_by_its_own_term_unless_another_is_given() -> None:
    """The rank differs after a take-over that has added nothing."""
    assert PullResult(0, "value", term(9, "a")).rank_term == term(9, "a")
    assert PullResult(0, "value", term(9, "a"), 1, None, term(4, "b")).rank_term == term(4, "b")


def test_the_longest_messages_fit_a_head() -> None:
    """With an entry for each of the most shards that there are, each as long as it may be: what may be longer travels
    in bodies. The envelope, and a relay's own message around it, have room."""
    node, number, index = b"n" * 20, (1 << 48) - 1, MAX_SHARDS - 1
    highest = Term(number, node)
    owner = OwnerInfo(index, highest, node, "f" * 45, 65_535)
    fences = [Fence(index, highest)] * MAX_SHARDS
    wanted = Wanted(index, highest, number, b"c" * 8, number)
    pulled = PullResult(index, "redirect", highest, number, owner, highest, b"c" * 8, number, b"d" * 8, 1024)
    status = CopyStatus(index, "replica", highest, number, highest, number, True)
    head = PublishedHead(b"c" * 8, number, b"d" * 8, number, highest, 1024)
    forwarded = Forwarded(index, highest, number, 0.5, 0.5, True, number)
    logged = LoggedDelta(index, node, number, number, 0.5, 1e6)
    digest = CopyDigest(index, highest, number, number, b"d" * 16)
    key = b"s" * (MAX_KEY_BYTES + 1)
    shards = [index] * MAX_SHARDS
    for message in (
        Push(node, number, number, number, 0.5, shards, fences, 1e6, True),
        PushAnswer([PushResult(index, "refused", "r" * 200)] * MAX_SHARDS),
        PushAnswer([PushResult(index, "redirect", owner_info=owner)] * MAX_SHARDS),
        Pull(number, "bfloat16", [wanted] * MAX_SHARDS, fences),
        PullAnswer([pulled] * MAX_SHARDS),
        Forward(node, number, number, 0.5, [forwarded] * MAX_SHARDS),
        LocateOwners(shards, [owner] * MAX_SHARDS, fences),
        HandOver([owner] * MAX_SHARDS, [number] * MAX_SHARDS, [head] * MAX_SHARDS),
        TransferResult(shards, [owner] * MAX_SHARDS, [b"c" * 8] * MAX_SHARDS),
        ReplicasAnswer([status] * MAX_SHARDS, [owner] * MAX_SHARDS),
        CompareCopies([digest] * MAX_SHARDS),
        FinalBuffers(bytes(MAX_BUFFERS_BYTES)),
        FinalBuffersAnswer(bytes(MAX_BUFFERS_BYTES)),
        FindDeltas(index, [(node, number, [(number, number)])] * MAX_SOUGHT),
        OfferedDeltas([logged] * MAX_DELTAS),
        UpdateValuesAnswer([PushResult(index, "refused", "r" * 200)] * MAX_ITEMS),
        ReadValues([(index, key)] * MAX_ITEMS, fences),
    ):
        assert len(encode(message)) <= MAX_HEAD_BYTES - 1024, type(message).__name__


def test_a_record_in_a_body_is_read_as_it_was_written() -> None:
    """However long it is; one of another shard, or a malformed one, is a bad frame."""
    rows = [(number.to_bytes(20, "big"), 1, [(1, 2)]) for number in range(40_000)]
    history = OwnedHistory(3, "owner", Term(1, bytes(20)), known=rows)
    body = [bytes(buffer) for buffer in record_frames(3, history)]
    assert max(map(len, body)) <= MAX_HEAD_BYTES

    async def read(buffers: list[bytes], shard: int) -> OwnedHistory:
        return await read_record(FrameReader(chunks(buffers)), shard, OwnedHistory)

    assert asyncio.run(read(body, 3)) == history
    for broken, shard in ((body, 2), (body[:-1], 3), ([body[0], b"\xc1" * len(body[1]), *body[2:]], 3)):
        with pytest.raises(BadFrame):
            asyncio.run(read(broken, shard))


ONE, TWO = PushResult(1, "ok"), PushResult.retry(2, "backup_silent")


async def read(data: bytes, cut: int = 5) -> list[list[PushResult]]:
    pieces = [data[start : start + cut] for start in range(0, len(data), cut)]
    return [results async for results in read_results(chunks(pieces))]


@run_by(run)
async def test_results_arrive_in_pieces() -> None:
    """Wherever the stream is cut; signs of life carry none."""
    data = SIGN_OF_LIFE + piece_of([ONE]) + SIGN_OF_LIFE + piece_of([TWO, ONE])
    for cut in (1, 3, len(data)):
        assert await read(data, cut) == [[ONE], [TWO, ONE]]
    assert await read(b"") == []


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (piece_of([ONE])[:-1], "ended inside"),
        (b"\0\0", "ended inside"),
        ((MAX_PIECE_BYTES + 1).to_bytes(4, "big"), "a piece of"),
        (b"\0\0\0\1\xc1", "malformed piece"),
        (b"\0\0\0\x0a\x91\x94\0\xa2ok\0\xa2\xff\xff", "malformed piece"),
    ],
)
@run_by(run)
async def test_a_malformed_stream_is_refused(data: bytes, reason: str) -> None:
    """What came before it was given out."""
    found = read_results(chunks([piece_of([ONE]), data]))
    assert await anext(found) == [ONE]
    with pytest.raises(BadFrame, match=reason):
        await anext(found)


def test_terms_are_ordered_by_number_and_then_by_node() -> None:
    """Of two simultaneous take-overs one is higher, the same one at every node."""
    assert ZERO_TERM < term(1, "a") < term(1, "b") < term(2, "a")


def test_an_owner_survives_the_wire() -> None:
    """Term and contact are those that were encoded."""
    info = OwnerInfo.of(3, term(5, "c"), contact("b"))

    again = decode(encode(info), OwnerInfo)

    assert (again.shard, again.term, again.contact()) == (3, term(5, "c"), contact("b"))


def test_a_malformed_address_is_an_error_of_the_contact_only() -> None:
    """The message is decoded; the entry is skipped where its contact is needed."""
    info = decode(encode(OwnerInfo(0, term(1, "b"), IDS["b"], "not-an-address", 1)), OwnerInfo)

    with pytest.raises(ValueError, match="address"):
        info.contact()


def test_a_fence_carries_its_term() -> None:
    """Number and node, as a `Term`, which compares as one."""
    assert decode(encode(Fence(2, term(7, "a"))), Fence).term > Term(6, IDS["b"])


def test_a_copy_has_a_term_and_a_fence() -> None:
    """The fence may be above the copy's own term."""
    status = decode(encode(CopyStatus(0, "backup", term(3, "a"), 7, term(5, "c"), 9)), CopyStatus)

    assert (status.term, status.fence, status.is_stored) == (term(3, "a"), term(5, "c"), False)


def test_an_unknown_role_is_refused() -> None:
    """A role decides how a copy ranks."""
    status = CopyStatus(0, "king", term(3, "a"), 7, term(5, "c"), 9)  # type: ignore[arg-type]

    with pytest.raises(msgspec.ValidationError):
        decode(encode(status), CopyStatus)


def test_a_fetch_names_few_shards() -> None:
    """The receiver copies each state for its answer."""
    with pytest.raises(msgspec.ValidationError):
        decode(encode(Fetch([0] * (MAX_FETCHED + 1))), Fetch)


def test_the_rows_of_identities_are_bounded() -> None:
    """A row has at most 64 ranges, twice as many as a set of applied identities."""
    rows = [(IDS["x"], 1, [(2 * step, 2 * step) for step in range(64)])]
    assert decode(encode(FindDeltas(0, rows)), FindDeltas).identities == rows

    with pytest.raises(msgspec.ValidationError):
        decode(encode(FindDeltas(0, [(IDS["x"], 1, [*rows[0][2], (999, 999)])])), FindDeltas)


def test_a_repaired_delta_had_at_least_one_worker() -> None:
    """Reconciliation scales its weight by that number."""
    with pytest.raises(msgspec.ValidationError):
        decode(encode(LoggedDelta(0, IDS["x"], 1, 1, 1.0, 0.5)), LoggedDelta)


def test_the_terms_of_states_and_histories_survive_the_wire() -> None:
    """As number and node."""
    head = StateHead(0, term(4, "a"), 1, 0.0, 0, 0, False, [], [])
    assert decode(encode(head), StateHead).term == term(4, "a")
    assert decode(encode(OwnedHistory(0, "owner", term(6, "b"))), OwnedHistory).term == term(6, "b")
