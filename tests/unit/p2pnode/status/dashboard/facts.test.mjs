import assert from "node:assert/strict";
import { test } from "node:test";
import { coordinationFacts, exchangeFacts, machineFacts, sections, work } from "../../../../../p2pnode/status/static/facts.js";

const exchange = {
  shards: 64, shards_owned: 16, shards_backed: 16, shards_without_backup: 0, state_bytes: 0, bytes_sent: 0,
  bytes_received: 0, merged_last_step: 0, outstanding_steps: [], refused: 0, lost: 0, shards_to_mend: 0,
  shards_resigned: 0,
};
const names = (rows) => rows.map(([name]) => name);

test("work: how far, how long still, and what nobody knows", () => {
  const progress = [
    { what: "max_steps", done: 500, total: 2000, unit: "steps", since_seconds: 9, left_seconds: 90 },
    { what: "last checkpoint", done: 1e6, total: 1e6, unit: "bytes", since_seconds: 2, left_seconds: 0 },
    { what: "join the swarm", done: 0, total: 0, unit: "", since_seconds: 12, left_seconds: null },
  ];
  assert.deepEqual(work({ progress }), [
    { name: "Steps of the run", share: 0.25, text: "500 of 2\u202f000, 2 min to go" },
    { name: "Last checkpoint", share: 1, text: "1.00 MB of 1.00 MB" },
    { name: "Join the swarm", share: null, text: "for 12 s" },
  ]);
  assert.deepEqual(work({}), [], "a node that does not tell");
});

test("shards that broke in memory have a row, and only then", () => {
  assert.ok(!names(exchangeFacts({ exchange })).includes("Broken in memory"));
  const mended = { ...exchange, shards_resigned: 2, shards_to_mend: 3 };
  const rows = exchangeFacts({ exchange: mended });
  assert.deepEqual(rows.find(([name]) => name === "Broken in memory"), ["Broken in memory", "2", "left to their backups"]);
  assert.ok(names(rows).includes("Superseded copies"));
});

test("what the nodes decide together: who divides the local steps, that nobody does, and who leads", () => {
  const node = { id: "aa".repeat(20) };
  const facts = (coordination) => coordinationFacts({ node, coordination });
  assert.deepEqual(facts(null), [], "each node decides for itself");
  const [own] = facts({ server: node.id, serves: true, trainers: 6, leader: null });
  assert.deepEqual(own, ["Local steps", "divided by this node", "among 6 trainers"]);
  const other = facts({ server: "bb".repeat(20), serves: false, trainers: 0, leader: "cc".repeat(20) });
  assert.deepEqual(other.map(([, value]) => value), ["divided by bbbbbbbb", "cccccccc"]);
  const alone = facts({ server: null, serves: false, trainers: 0, leader: node.id });
  assert.deepEqual(alone.map(([, value]) => value), ["this node takes its own share", "this node"]);
});

test("a GPU has a row of the machine, with what its driver says", () => {
  const status = {
    node: { address: "a", role: "peer" }, memory: { budget_bytes: null }, overlay: { round_trip_ms: null },
    training: { trainer: "running" }, barrier: { staleness: null }, swarm: { keys: [] },
  };
  assert.ok(!names(machineFacts(status)).includes("GPU"));
  const known = {
    device: "cuda:0", name: "H100", memory_used_bytes: 40e9, memory_total_bytes: 80e9, utilisation: 0.93,
    temperature_celsius: 61.4, error: null,
  };
  const silent = {
    device: "cuda:1", name: "H100", memory_used_bytes: null, memory_total_bytes: null, utilisation: null,
    temperature_celsius: null, error: "Xid 79: the GPU has fallen off the bus",
  };
  const rows = machineFacts({ ...status, gpus: [known, silent] }).filter(([name]) => name === "GPU");
  assert.deepEqual(rows, [
    ["GPU", "cuda:0 40.0 GB of 80.0 GB, 93 % busy, 61 °C", "H100"],
    ["GPU", "cuda:1 does not answer", "Xid 79: the GPU has fallen off the bus"],
  ]);
});

test("a part that a node does not have has no section", () => {
  assert.deepEqual(sections({ values: null, server: null, data: null, members_quarantined: [] }), []);
  const values = {
    keys: 3, bytes: 40, limit_bytes: 1000, updates: 5, refused: 0, reads: 7, batches: 1, waiting: 0, waiting_bytes: 0,
    unanswered: 0,
  };
  const server = { version: 4, workers: 2, given: 9, done: 8, held: 1, waiting: 0, again: 0, refused: 0, lost: 2 };
  const found = sections({ values, server });
  assert.deepEqual(found.map(([title]) => title), ["Named values", "Parameter server"]);
  assert.deepEqual(found[0][1][1], ["Updates", "5", "in 1 batch"]);
  assert.deepEqual(found[1][1].at(-1), ["Updates lost", "2", "with their worker and their server"]);
});
