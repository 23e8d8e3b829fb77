import assert from "node:assert/strict";
import { test } from "node:test";
import { answers, connected, learning, linkWords, lost, stateOf, waiting } from "../../../../../p2pnode/status/static/words.js";

const population = { exact: true, estimate: 4, low: 4, high: 4 };
const status = {
  state: "training", step: 812, summary: "…", overlay: { peers: 3, suspects: 0 }, population, waiting: null,
  training: { loss: 0.3124 }, barrier: { method: "ssp", staleness: 4 }, result: null, lost: [],
};
const with_ = (fields) => ({ ...status, ...fields });
const said = ({ tone, text }) => [tone, text];

test("a node that is well says so in four sentences", () => {
  assert.deepEqual(answers(status, 0.4).map(said), [
    ["good", "Connected to 3 peers."],
    ["good", "Learning: step 812, loss 0.312, down from 0.400 a minute ago."],
    ["good", "Waiting for no one."],
    ["good", "Lost no one in the last 10 minutes."],
  ]);
});

test("connected: how many, how sure, and what is wrong", () => {
  assert.deepEqual(said(connected(with_({ state: "joining" }))), ["warn", "Not connected yet: looking for the swarm."]);
  const download = { what: "download of the state", done: 41, total: 100, unit: "bytes", since_seconds: 12, left_seconds: 17 };
  assert.equal(connected(with_({ state: "joining", progress: [download] })).text, "Joining: download of the state, 41 %, 17 s to go.");
  const join = { what: "join the swarm", done: 0, total: 0, unit: "", since_seconds: 130, left_seconds: null };
  assert.match(connected(with_({ state: "joining", progress: [join] })).text, /looking for the swarm, for 2 min\.$/);
  assert.deepEqual(said(connected(with_({ overlay: { peers: 0 } }))), ["idle", "Alone: no other node is known."]);
  const gone = [{ id: "ab".repeat(20), how: "dead", seconds_ago: 60 }];
  assert.deepEqual(said(connected(with_({ overlay: { peers: 0 }, lost: gone }))), ["bad", "Alone: every peer is gone."]);
  const large = { exact: false, estimate: 1030, low: 900, high: 1180 };
  assert.equal(connected(with_({ population: large })).text, "Connected to 3 peers, of about 1030 nodes (900 to 1180).");
  assert.deepEqual(said(connected(with_({ overlay: { peers: 3, suspects: 1 } }))), ["warn", "Connected to 3 peers; 1 peer suspected."]);
});

test("learning: every state has words, and only trouble is red", () => {
  for (const state of ["joining", "waiting_for_nodes", "paused", "stalled", "finished", "leaving", "serving", "failed", "waiting", "training"]) {
    const { tone, text } = learning(with_({ state }), null);
    assert.ok(text.length > 5, state);
    assert.equal(tone === "bad", ["stalled", "failed"].includes(state), state);
  }
  assert.equal(learning(with_({ training: { loss: null } }), null).tone, "warn");
  assert.equal(learning(status, 0.3125).text, "Learning: step 812, loss 0.312.", "no trend in less than half a percent");
  assert.match(learning(status, 0.2).text, /up from 0.200 a minute ago/);
  const result = { reason: "max_steps", best: { metric: "accuracy", value: 0.9712 } };
  assert.equal(learning(with_({ state: "finished", result }), null).text, "Finished at step 812 (max steps); best accuracy 0.971.");
});

test("waiting: for whom, since when, why", () => {
  assert.equal(waiting(status).tone, "good");
  assert.equal(waiting(with_({ state: "failed" })).tone, "idle", "of a node that has failed it is no good news");
  const held = { slowest: "7f".repeat(20), behind: 1, sampled: 4, since_seconds: 2.4, its_step: 807 };
  assert.deepEqual(said(waiting(with_({ waiting: held }))), ["warn", "Waiting for 7f7f7f7f for 2.4 s: it is at step 807, 5 steps behind; ssp allows 4."]);
  assert.equal(waiting(with_({ waiting: { ...held, since_seconds: 12 } })).tone, "bad");
  assert.match(waiting(with_({ waiting: { ...held, behind: 3 } })).text, /and 2 more peers of 4 asked/);
  assert.match(waiting(with_({ waiting: held, barrier: { method: "quantile", staleness: null } })).text, /5 steps behind\.$/);
});

test("lost: whom and when; those who left said goodbye", () => {
  const dead = (number, seconds_ago) => ({ id: `${number}`.repeat(40).slice(0, 40), how: "dead", seconds_ago });
  assert.deepEqual(said(lost(with_({ lost: [dead(1, 90)] }))), ["bad", "Lost 1 peer: 11111111 2 min ago."]);
  assert.match(lost(with_({ lost: [1, 2, 3, 4, 5].map((number) => dead(number, 30)) })).text, /^Lost 5 peers: .* and 2 more\.$/);
  assert.deepEqual(said(lost(with_({ lost: [{ ...dead(1, 5), how: "left" }] }))), ["idle", "1 peer left: 11111111 5.0 s ago."]);
  assert.equal(lost(with_({ lost: [dead(1, 601)] })).tone, "good", "older than ten minutes");
  assert.equal(lost(with_({ lost: undefined })).tone, "good", "a node that does not tell");
});

test("the link has words for all that is wrong, and none while all is well", () => {
  const link = { state: "lost", reason: "it does not answer", since: 0, retryAt: 9000 };
  assert.equal(linkWords(link, 5000).text, "The node does not answer since 5.0 s: it does not answer. Next try in 4 s.");
  assert.match(linkWords({ ...link, state: "ended" }, 9500).text, /^The node ended 9.5 s ago.*Trying again\.$/);
  assert.equal(linkWords({ ...link, state: "token", reason: "" }, 0).text, "The node asks for its token.");
  for (const state of ["live", "connecting"]) assert.equal(linkWords({ ...link, state }, 0), null);
});

test("an unknown state is shown as it is", () => {
  assert.deepEqual(stateOf("half_open"), { word: "half open", tone: "idle" });
});
