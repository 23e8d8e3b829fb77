"""The messages of audits: about deltas of the sender that an owner has acknowledged, whom the sender leaves out for
them, and whether deltas that a third member offers are of the receiver. Pure."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from training.exchange.messages import Digest
from training.exchange.terms import MAX_SHARDS, Genesis, Number, ShardIndex, Term, TermNode, TermNumber

#: Deltas of one question: those of a few steps.
MAX_AUDITED = 4 * MAX_SHARDS


class AuditedDelta(msgspec.Struct, frozen=True, array_like=True):
    """One shard of a delta of the sender. `digest`: of its encoding, as it was pushed; empty: only the identity is
    asked about. `term`: under which the owner says that it has the delta, and that the receiver is its backup; the
    term 0 in a question to the owner itself."""

    shard: ShardIndex
    step: Number
    digest: Digest = b""
    term_number: TermNumber = 0
    term_node: TermNode = b""

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)


class Audit(msgspec.Struct, frozen=True, array_like=True):
    """What does the receiver, as owner or backup, know of these deltas of the sender? `owner`: of the shards, in a
    question to their backup. `is_repeated`: owner and backup contradicted each other the last time, too."""

    genesis: Genesis
    incarnation: Number
    deltas: Annotated[list[AuditedDelta], Meta(max_length=MAX_AUDITED)]
    owner: TermNode = b""
    is_repeated: bool = False


#: `other`: the receiver is neither. `forgotten`: it cannot tell any more, or not yet. `differs`: it was sent another
#: delta under this identity.
Known = Literal["has", "lacks", "differs", "forgotten", "other"]


class AuditResult(msgspec.Struct, frozen=True, array_like=True):
    """What an owner (`is_owner`) or a backup knows of one delta, under its present term. `partner`: the backup of the
    owner, if it has one, or the owner of the backup. `era_step`: of deltas with an older base an owner cannot tell
    whether its value has them."""

    shard: ShardIndex
    step: Number
    known: Known
    is_owner: bool = False
    term_number: TermNumber = 0
    term_node: TermNode = b""
    partner: TermNode = b""
    era_step: Number = 0

    @property
    def term(self) -> Term:
        return Term(self.term_number, self.term_node)

    def misses(self, base_step: int) -> bool:
        """Whether an owner certainly lacks the delta, which has this base."""
        return self.is_owner and self.known == "lacks" and base_step >= self.era_step


class AuditAnswer(msgspec.Struct, frozen=True, array_like=True):
    results: Annotated[list[AuditResult], Meta(max_length=MAX_AUDITED)]


class ConfirmDeltas(msgspec.Struct, frozen=True, array_like=True):
    """Has the receiver made these deltas, in the start of this number? Another member offers them to the sender."""

    genesis: Genesis
    incarnation: Number
    deltas: Annotated[list[AuditedDelta], Meta(max_length=MAX_AUDITED)]


class AuditVerdict(msgspec.Struct, frozen=True, array_like=True):
    """The sender has left out a member for audits. `follows`: because others had."""

    genesis: Genesis
    member: TermNode
    follows: bool = False


class AuditVerdictAnswer(msgspec.Struct, frozen=True, array_like=True):
    """Whether the receiver leaves the member out now."""

    is_left_out: bool
