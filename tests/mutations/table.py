"""The deliberate faults: which source is changed how, and which test must fail then.

A change names text that occurs exactly once in its file; a test checks that it still does, so that a fault whose source
has moved on is noticed. Together with its test a fault is an assertion about the tests: this they would not miss.
"""

from __future__ import annotations

from tests.mutations.first_hour import FIRST_HOUR
from tests.mutations.mutation import Change, Mutation

HISTORIES = "tests/simulated/test_conservation.py"
SMALL = f"{HISTORIES}::test_what_was_acknowledged_is_in_the_model_once[1000-12-8]"
THREE_SIDES = f"{HISTORIES}::test_what_was_acknowledged_is_in_the_model_once[1091-1-8]"
PAIR_DIES = "tests/simulated/test_pair_dies.py::test_a_shard_whose_owner_and_backup_die_goes_on_from_a_replica"
FORGOTTEN = "tests/simulated/test_forgotten_identities.py::test_a_node_that_starts_again_and_again_leaves_a_bounded_set"
FAILOVER = "tests/unit/training/exchange/recovery/test_failover.py"
DELTAS = "tests/unit/training/exchange/owner/test_deltas.py"
OUTBOX = "tests/unit/training/exchange/client/test_outbox.py"
PUSHES = "tests/unit/training/exchange/client/test_push.py"
LEARNERS = "tests/unit/training/exchange/recovery/test_learners.py"
PAIRS = "tests/unit/training/exchange/store/test_shard_store_pairs.py"
FOLLOWED = "tests/unit/training/exchange/owner/test_publishing.py"
FOLLOWER = "tests/unit/training/exchange/client/test_follower.py"
VALUES = "tests/simulated/test_values_attacks.py"
RELAYS = "tests/simulated/test_relays.py"
RELAYED = f"{RELAYS}::test_relayed_deltas_are_in_the_model_once[6002-1-8]"
NOT_TRUE = f"{RELAYS}::test_who_hands_down_what_is_not_true_is_found_and_avoided"
HANDED = "tests/unit/training/exchange/aggregation/test_handed_down.py"
CLOSER = (
    "tests/unit/training/exchange/aggregation/test_relays.py"
    "::test_a_relay_hands_on_to_a_node_that_shares_more_bits_with_it_than_the_one_before"
)
RELAYED_PULL = "tests/unit/training/exchange/client/test_relayed_pull.py"
CLIPPED = f"{HISTORIES}::test_a_backup_adds_what_its_owner_has_clipped[1002-1]"


def _mutation(part: str, fault: str, test: str, file: str, old: str, new: str) -> Mutation:
    return Mutation(part, fault, test, (Change(f"training/exchange/{file}", old, new),))


MUTATIONS = (
    # -- owner
    _mutation(
        "owner",
        "adds a delta that it may have forgotten",
        FORGOTTEN,
        "owner/deltas.py",
        "        if owned.state.may_have_forgotten(identity):\n",
        "        if False:\n",
    ),
    _mutation(
        "owner",
        "a push holds a place that forwards need",
        "tests/simulated/test_full_owners.py::test_owners_full_of_pushes_to_each_other_go_on",
        "owner/deltas.py",
        'self._rpc.register("push", Push, self._on_push, waits=True)',
        'self._rpc.register("push", Push, self._on_push)',
    ),
    _mutation(
        "backup",
        "adds a delta that it may have forgotten",
        FORGOTTEN,
        "store/shard_store.py",
        "if state is not None and not state.knows(item.identity) and state.may_have_forgotten(item.identity):",
        "if False:",
    ),
    _mutation(
        "owner",
        "acknowledges a delta without adding it",
        SMALL,
        "owner/replication.py",
        "version = self._store.add(item.shard, item.buffered(identity, weight, synchronous=self._context.synchronous))",
        "version = owned.state.version + 1",
    ),
    _mutation(
        "owner",
        "acknowledges its own delta of a shard that it owns alone, without adding it",
        SMALL,
        "owner/deltas.py",
        "version = self._store.add(shard, own)",
        "version = owned.state.version + 1",
    ),
    _mutation(
        "owner",
        "a node that exchanges nothing adds nothing to its own vector",
        "tests/unit/training/exchange/test_exchange.py::test_a_node_alone_adds_its_deltas_to_its_own_vector",
        "exchange.py",
        "        self._replica.vector += delta\n",
        "",
    ),
    _mutation(
        "owner",
        "adds a delta again when it is sent again",
        SMALL,
        "store/shard_store.py",
        "        if not state.knows(item.identity):\n            item.add_to(state, self.rule)",
        "        if True:\n            item.add_to(state, self.rule)",
    ),
    _mutation(
        "owner",
        "acknowledges before the backup has the delta",
        SMALL,
        "owner/replication.py",
        "            self._on_failure(to, pairs, str(error))\n            return {}",
        "            self._on_failure(to, pairs, str(error))\n            return dict.fromkeys(receipts.values())",
    ),
    _mutation(
        "owner",
        "forwards a clipped delta without the factor",
        CLIPPED,
        "owner/replication.py",
        "item.scale,\n        item.norm or 0.0,",
        "1.0,\n        item.norm or 0.0,",
    ),
    _mutation(
        "owner",
        "serves the bytes of an earlier version under the number of the present one",
        SMALL,
        "owner/encoding_cache.py",
        "if found[0]() is state.value and found[1] == state.version:",
        "if found[0]() is state.value:",
    ),
    _mutation(
        "owner",
        "answers every pull with `same`",
        SMALL,
        "owner/reads.py",
        "if not wanted.chain and known == (rank_term, state.version):",
        "if known != (rank_term, -1):",
    ),
    _mutation(
        "owner",
        "publishes its value instead of what its followers decode",
        SMALL,
        "owner/published.py",
        "advanced = apply(published.value, codec, payload)",
        "advanced = value.copy()",
    ),
    _mutation(
        "owner",
        "goes on with a chain without the copy that its followers hold",
        FOLLOWED,
        "owner/published.py",
        "if digest == last.digest and has_length",
        "if has_length",
    ),
    _mutation(
        "owner",
        "adds a sparse delta by the rule of the others, once nodes change their codec",
        SMALL,
        "store/records.py",
        "plain = is_plain(self.codec)",
        "plain = False",
    ),
    # -- backup
    _mutation(
        "backup",
        "acknowledges a forwarded delta without storing it",
        SMALL,
        "store/shard_store.py",
        "            self.add(shard, item, state)\n            if not self._close_all(state, closed_windows):\n"
        '                return "unknown", fence\n        return "ok", term',
        '        return "ok", term',
    ),
    _mutation(
        "backup",
        "drops the deltas that arrive before the state of its catch-up",
        SMALL,
        "store/shard_store.py",
        "        for item in backed.buffered:\n            self.add(shard, item, state)\n",
        "",
    ),
    _mutation(
        "backup",
        "ignores the fence: it goes on storing for an owner that was replaced",
        f"{PAIRS}::test_a_fenced_forward_names_the_higher_term_and_adds_nothing",
        "store/shard_store.py",
        '        if term < fence:\n            return "fenced", fence\n        if backed is None',
        "        if backed is None",
    ),
    # -- client
    # -- aggregation
    _mutation(
        "aggregation",
        "a relay whose next node failed answers that the owner has the delta",
        RELAYED,
        "aggregation/consignments.py",
        'PushResult.retry(item.shard, "not_relayed")',
        'PushResult(item.shard, "ok")',
    ),
    _mutation(
        "aggregation",
        "hands on what its sender says to be another's",
        f"{RELAYS}::test_a_node_hands_on_no_delta_that_its_sender_forged",
        "aggregation/relays.py",
        "if message.hops == 1 and push.node != sender.node_id:",
        "if False:",
    ),
    _mutation(
        "aggregation",
        "two relays hand a delta to each other, and wait for each other for ever",
        CLOSER,
        "aggregation/relays.py",
        "if before and not comes_closer(",
        "if before and False and not comes_closer(",
    ),
    _mutation(
        "aggregation",
        "a delta that no relay has delivered is handed to relays for ever",
        f"{RELAYS}::test_a_relay_that_fails_costs_one_timeout",
        "client/outbox.py",
        "                    delivery.direct[result.shard] = None",
        "                    continue",
    ),
    _mutation(
        "aggregation",
        "hands the trainer's memory to a relay, and the trainer writes to it",
        f"{OUTBOX}::test_what_a_relay_is_given_is_not_the_memory_of_the_trainer",
        "client/delivery.py",
        """        encoded = bytes(self.encoded) if self.is_borrowed else self.encoded
        return Carried""",
        """        encoded = self.encoded
        return Carried""",
    ),
    _mutation(
        "aggregation",
        "takes a relay at its word: what its owner has not got is not looked for again",
        f"{RELAYS}::test_a_relay_that_keeps_deltas_is_found_and_avoided",
        "aggregation/delivery_checks.py",
        "one.missing_s = self._clock.monotonic()",
        "self.waiting.remove(one)",
    ),
    _mutation(
        "aggregation",
        "what a relay has kept is not sent again",
        f"{RELAYS}::test_a_relay_that_keeps_deltas_is_found_and_avoided",
        "aggregation/relays.py",
        "self._context.acknowledged.moved(key, one.relay)",
        "pass",
    ),
    _mutation(
        "aggregation",
        "looks for a delta under the term of another owner",
        "tests/unit/training/exchange/aggregation/test_delivery_checks.py",
        "aggregation/delivery_checks.py",
        "if term != one.term or not groups",
        "if not groups",
    ),
    _mutation(
        "aggregation",
        "hands down changes that do not follow one another",
        HANDED,
        "aggregation/handed_down.py",
        'if result.status == "changes" and held.result.published == result.published - result.changes:',
        'if result.status == "changes":',
    ),
    _mutation(
        "aggregation",
        "values that are handed down are never too old",
        RELAYED_PULL,
        "client/relayed_pull.py",
        "if age_s <= pull_sources.oldest_s(",
        "if age_s >= 0.0 * pull_sources.oldest_s(",
    ),
    _mutation(
        "aggregation",
        "takes what another owner than the known one has said",
        RELAYED_PULL,
        "client/relayed_pull.py",
        "known is None or known.term != result.term or routes is None",
        "known is None or routes is None",
    ),
    _mutation(
        "aggregation",
        "asks a node again that does not answer",
        RELAYED_PULL,
        "client/relayed_pull.py",
        "self._avoid(to.node_id, UNABLE_S if error.is_not_served else AVOIDED_S)",
        "pass",
    ),
    _mutation(
        "aggregation",
        "does not compare as a backup what the owner itself says",
        RELAYED_PULL,
        "client/relayed_pull.py",
        "if shard not in backed and position_of(shard) != NO_POSITION",
        "if position_of(shard) != NO_POSITION",
    ),
    _mutation(
        "aggregation",
        "wrong values that were handed down are nobody's",
        f"{NOT_TRUE}[wrong]",
        "client/relayed_pull.py",
        "elif giver is not None and self._disbelieve(giver):",
        "elif False and giver is not None:",
    ),
    _mutation(
        "aggregation",
        "believes the dates of values that are handed down",
        f"{NOT_TRUE}[frozen]",
        "aggregation/pull_sources.py",
        "return result.published < stated.published and date_s >= stated.heard_s",
        "return False",
    ),
    _mutation(
        "aggregation",
        "does not notice that nothing is ever new",
        f"{NOT_TRUE}[nothing new]",
        "aggregation/pull_sources.py",
        "return dated.by if least_s > PACE * (now_s - dated.date_s) + PACE_STEPS * step_s else None",
        "return None",
    ),
    _mutation(
        "aggregation",
        "checks no owner",
        f"{NOT_TRUE}[frozen]",
        "aggregation/pull_sources.py",
        "return chance.choice(chance.choice(drawn_from)) if drawn_from else None",
        "return None",
    ),
    _mutation(
        "aggregation",
        "of forwards in one request each has the answer of another",
        "tests/unit/training/exchange/owner/test_forward_bundles.py",
        "owner/forward_bundles.py",
        "zip(batch, await self._request(to, batch), strict=True)",
        "zip(batch, reversed(await self._request(to, batch)), strict=True)",
    ),
    _mutation(
        "client",
        "takes `retry` for an answer and drops the delta from the outbox",
        SMALL,
        "client/outbox.py",
        'if result.status in ("ok", "refused"):',
        'if result.status in ("ok", "refused", "retry"):',
    ),
    _mutation(
        "client",
        "the outbox gives up a delta after its first round, and says nothing",
        SMALL,
        "client/outbox.py",
        "        await self._directory.refresh(after)",
        "        delivery.unacknowledged.clear()",
    ),
    _mutation(
        "client",
        "keeps no residual: what a codec rounds off is lost",
        SMALL,
        "client/error_feedback.py",
        "codecs.encode_with_feedback(values, self.residual(shard), codec, sparse_values)",
        "codecs.encode_with_feedback(values, self.residual(shard).copy(), codec, sparse_values)",
    ),
    _mutation(
        "client",
        "forgets the residual of a shard that it comes to own alone",
        SMALL,
        "client/push.py",
        "(shard, self._corrected(shard, delta[slice(*bounds[shard])], returned))",
        "(shard, delta[slice(*bounds[shard])])",
    ),
    _mutation(
        "client",
        "takes back a delta that its owner may have",
        f"{OUTBOX}::test_a_delta_waits_until_the_one_before_is_answered_and_can_be_taken_back",
        "client/outbox.py",
        "waiting = [item for item in delivery.unacknowledged.values() if not item.is_started]",
        "waiting = list(delivery.unacknowledged.values())",
    ),
    _mutation(
        "client",
        "forgets a delta that it has taken back",
        f"{PUSHES}::test_a_delta_that_was_never_sent_travels_with_the_next_one",
        "client/push.py",
        "values = values + returned.of(shard)",
        "pass",
    ),
    _mutation(
        "client",
        "a pull reports a shard as changed and writes nothing",
        SMALL,
        "client/pull.py",
        "                        codecs.decode(encoded, codec, values)\n",
        "",
    ),
    _mutation(
        "client",
        "a follower of a chain applies a change twice",
        SMALL,
        "owner/published.py",
        "        value = apply(value, codec, payload)\n    return value, digest_of(value)",
        "        value = apply(apply(value, codec, payload), codec, payload)\n    return value, digest_of(value)",
    ),
    _mutation(
        "client",
        "a follower of a chain does not compare the digest",
        f"{FOLLOWER}::test_another_digest_is_counted_logged_and_puts_the_shard_in_doubt",
        "client/follower.py",
        "        if digest != result.digest:",
        "        if not digest:",
    ),
    _mutation(
        "owner",
        "publishes the value of before under the next version of its chain",
        SMALL,
        "owner/published.py",
        "        advanced,\n        digest_of(advanced),",
        "        published.value,\n        published.digest,",
    ),
    # -- recovery
    _mutation(
        "recovery",
        "takes over 60 s late",
        SMALL,
        "recovery/failover.py",
        "        before = {shard: self._store.ownership.fence(shard) for shard in shards}\n",
        "        await asyncio.sleep(60.0)\n"
        "        before = {shard: self._store.ownership.fence(shard) for shard in shards}\n",
    ),
    _mutation(
        "recovery",
        "takes over from its own copy, however old, instead of the best one",
        f"{FAILOVER}::test_a_better_copy_is_asked_to_take_over",
        "recovery/failover.py",
        '        if not ranked or (mine.role != "none" and own_rank >= ranked[-1][0]):',
        '        if not ranked or mine.role != "none":',
    ),
    _mutation(
        "recovery",
        "asks a node that was started again at its former address",
        f"{PAIR_DIES}[2-0.8]",
        "rpc.py",
        "        to = self._swarm.contact(to.node_id) or to\n        limit_s",
        "        limit_s",
    ),
    _mutation(
        "recovery",
        "waits for an owner that was started again and serves no exchange yet",
        f"{PAIR_DIES}[5-90.0]",
        "recovery/failover.py",
        "                if error.is_not_served:",
        "                if False:",
    ),
    _mutation(
        "recovery",
        "hands a state on without its pending deltas",
        THREE_SIDES,
        "store/state_head.py",
        "pending=[(*item.identity, item.weight, item.momentum) for item in state.pending_deltas()],",
        "pending=[],",
    ),
    _mutation(
        "recovery",
        "promotes a learner that has not taken the state, and releases the former backup",
        f"{LEARNERS}::test_a_learner_that_refuses_the_state_releases_no_backup",
        "recovery/learners.py",
        "            if head.shard in taken:\n                former = self._promote(head, to)",
        "            if True:\n                former = self._promote(head, to)",
    ),
    _mutation(
        "backup",
        "completes a state with what it holds of another chain than the owner's",
        "tests/unit/training/exchange/backup/test_handler.py::test_a_state_without_its_base_is_refused",
        "store/shard_store.py",
        "return None if found is None or found[0] != chain else found[1]",
        "return None if found is None else found[1]",
    ),
    _mutation(
        "backup",
        "ends the catch-up that its owner has begun since it was asked about the one before",
        "tests/unit/training/exchange/backup/test_confirmation.py"
        "::test_a_catch_up_that_the_owner_has_given_up_is_dropped",
        "store/shard_store.py",
        "is_given_up = not backed.is_active and backed.attempt == attempt and info.term >= backed.term",
        "is_given_up = not backed.is_active and info.term >= backed.term",
    ),
    _mutation(
        "recovery",
        "hands over while deltas are on their way to the backup",
        f"{DELTAS}::test_a_retry_waits_for_the_first_attempt",
        "owner/deltas.py",
        "[flight for (shard, _), flight in self._in_flight.items() if shard in wanted]",
        "[flight for (shard, _), flight in self._in_flight.items() if shard < 0]",
    ),
    _mutation(
        "recovery",
        "a superseded owner drops its copy, and offers none of its deltas",
        SMALL,
        "store/shard_store.py",
        "        if state is not None:\n            copy, former =",
        "        if state is not None and not self.bounds:\n            copy, former =",
    ),
    _mutation(
        "recovery",
        "a repair adds the deltas of the other side without their weight",
        SMALL,
        "recovery/repair_handler.py",
        "            weight=self._weight(logged),",
        "            weight=2.0 * self._weight(logged),",
    ),
    _mutation(
        "recovery",
        "states on disk are read without their identities",
        SMALL,
        "store/state_head.py",
        "        applied=set_of(head.applied, head.forgotten),",
        "        applied=Applied(),",
    ),
    _mutation(
        "recovery",
        "believes a claim of any term",
        "tests/unit/training/exchange/store/test_ownership.py",
        "store/ownership.py",
        " or not self.is_plausible(term):",
        ":",
    ),
    _mutation(
        "recovery",
        "rises above a fence of any term",
        "tests/unit/training/exchange/store/test_ownership.py",
        "rebalance_requests.py",
        " and self._store.ownership.is_plausible(fence.term):",
        ":",
    ),
    _mutation(
        "recovery",
        "continues from a copy of any term",
        "tests/unit/training/exchange/recovery/test_failover.py",
        "recovery/failover.py",
        " and is_plausible(copy.term) and is_plausible(copy.fence):",
        ":",
    ),
    _mutation(
        "client",
        "a node follows a single other one to any step",
        "tests/unit/training/exchange/test_swarm_view.py",
        "swarm_view.py",
        "[int(min(others[0], self._run.explained_step(now)))]",
        "others",
    ),
    _mutation(
        "owner",
        "adds a delta of the largest finite numbers",
        "tests/unit/training/exchange/owner/test_validation.py",
        "owner/validation.py",
        "        if norm > MAX_LENGTH:",
        "        if False:",
    ),
    _mutation(
        "owner",
        "adds a delta however long those of the others are",
        "tests/unit/training/exchange/owner/test_validation.py",
        "owner/validation.py",
        "return None if norm <= longest(size, reference) else",
        "return None if True else",
    ),
    _mutation(
        "backup",
        "adds a forwarded delta out of range",
        "tests/unit/training/exchange/backup/test_handler.py",
        "backup/handler.py",
        "            if not is_in_range:",
        "            if False:",
    ),
    _mutation(
        "recovery",
        "goes on from a state with values that are not finite",
        "tests/unit/training/exchange/store/test_state_stream.py",
        "store/state_stream.py",
        "    if not is_in_range:",
        "    if False:",
    ),
    _mutation(
        "recovery",
        "a late copy takes a shard back as soon as it has one delta more",
        "tests/unit/training/exchange/store/test_losses.py",
        "store/losses.py",
        "    return gained > lost or",
        "    return ahead > 0 or",
    ),
    _mutation(
        "recovery",
        "a restart begins no new generation of terms",
        "tests/unit/training/exchange/recovery/test_failover.py",
        "store/shard_store.py",
        "GENERATION if begins_generation else",
        "GENERATION if False else",
    ),
    _mutation(
        "recovery",
        "a resume reports none of the deltas that were recorded",
        "tests/simulated/test_restarts.py",
        "store/losses.py",
        "    missing = recorded.beyond(known)",
        "    missing = Applied()",
    ),
    _mutation(
        "client",
        "a node does not record what it pushes",
        "tests/unit/training/exchange/client/test_push_log.py",
        "client/push_log.py",
        "        self._changed.set()\n        return identity",
        "        return identity",
    ),
    _mutation(
        "recovery",
        "a leaving node goes with the last copies of what another leaver had given it",
        f"{VALUES}::test_nodes_that_leave_at_one_moment_lose_no_value[23]",
        "recovery/rebalancing.py",
        "return len(self._store.owned) + len(self._orphaned_copies())",
        "return len(self._store.owned)",
    ),
    _mutation(
        "recovery",
        "a node that may own nothing begins the values of a dead server anew",
        f"{VALUES}::test_a_node_that_may_own_nothing_takes_no_values_over",
        "directory.py",
        "if to is None and not has_state(self._store, shard):",
        "if False:",
    ),
    _mutation(
        "recovery",
        "a former owner that nobody can dial stays the backup",
        "tests/unit/training/exchange/backup/test_handler.py::"
        "test_a_former_owner_that_nobody_can_dial_backs_nothing_up",
        "backup/handler.py",
        "is_reached = self._context.swarm.takes_streams(sender.node_id)",
        "is_reached = True",
    ),
    _mutation(
        "client",
        "what is trained while no owner is in reach is not put together",
        "tests/unit/training/exchange/client/test_push.py::"
        "test_what_is_trained_while_no_owner_is_in_reach_becomes_one_delta[float32-sum]",
        "client/push.py",
        "await self._executor.run(self._put_back, self._outbox.take_apart(), delta)",
        "self._outbox.take_apart()",
    ),
    _mutation(
        "client",
        "an owner that was started again is not asked what it lacks",
        "tests/simulated/test_hidden_nodes.py::"
        "test_a_server_that_was_killed_and_is_back_has_all_that_was_trained_meanwhile[one-4-1]",
        "services.py",
        "            context.acknowledged.doubt(change.node_id)\n",
        "",
    ),
    _mutation(
        "client",
        "takes a named value of a term below one that it has seen",
        f"{VALUES}::test_a_value_of_a_lower_term_than_was_seen_is_not_taken[get]",
        "client/values.py",
        "is_old = result is not None and result.term < self._store.ownership.fence(shard)",
        "is_old = False",
    ),
    *FIRST_HOUR,
)
