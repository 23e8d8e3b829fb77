import assert from "node:assert/strict";
import { test } from "node:test";
import { bins, circle, median, samplesPerSecond, waits } from "../../../../../p2pnode/status/static/steps.js";

test("every step is in one bin, bins are equal and few", () => {
  for (const steps of [[5], [5, 5, 5], [1, 2, 3], [0, 1000], Array.from({ length: 500 }, (_, place) => place * 7)]) {
    const found = bins(steps);
    assert.ok(found.length <= 24);
    assert.equal(found.reduce((sum, bin) => sum + bin.amount, 0), steps.length);
    for (const step of steps) assert.equal(found.filter((bin) => bin.low <= step && step <= bin.high).length, 1);
    assert.equal(new Set(found.map((bin) => bin.high - bin.low)).size, 1);
  }
  assert.deepEqual(bins([]), []);
  assert.deepEqual([median([3, 1, 2]), median([])], [2, null]);
});

const member = (id, step, progress = 0, state = "training") => ({ id, step, progress, state, stepSeconds: 1 });
const facts = { self: "a", waiting: null, staleness: 2, samples: false };

test("this node's own wait is known", () => {
  const members = [member("a", 9), member("b", 2)];
  assert.deepEqual(waits(members, { ...facts, samples: true, waiting: { slowest: "b" } }), [{ from: "a", to: "b", known: true }]);
  assert.deepEqual(waits(members, { ...facts, waiting: { slowest: "gone" } }), []);
});

test("of another a wait is concluded from its step, its rest and the rule", () => {
  const members = [member("a", 5), member("b", 8, 5), member("c", 8, 1), member("d", 7, 5), member("e", 5)];
  assert.deepEqual(waits(members, facts), [{ from: "b", to: "a", known: false }], "c moved lately, d is within the bound");
  assert.deepEqual(waits(members, { ...facts, self: "b" }), [], "this node would say so itself");
  assert.deepEqual(waits(members, { ...facts, samples: true }), [], "a sample is not known to others");
  assert.deepEqual(waits(members, { ...facts, staleness: null }), [], "asp never waits");
});

test("no one waits for a node that does not train", () => {
  const members = [member("a", 5), member("b", 8, 5), member("c", 1, 0, "paused")];
  assert.deepEqual(waits(members, { ...facts, staleness: 3 }), []);
});

test("the total counts those that train", () => {
  const peers = [
    { state: "training", samples: 10, step_seconds: 2 },
    { state: "paused", samples: 10, step_seconds: 2 },
    { state: "training", samples: 10, step_seconds: 0 },
    { state: "suspect", samples: 3, step_seconds: 1 },
  ];
  assert.equal(samplesPerSecond(peers), 8);
});

test("a node keeps its place in the order, whatever order they come in", () => {
  const one = circle(["b", "a", "c"], 10);
  assert.deepEqual([...one], [...circle(["c", "b", "a"], 10)]);
  const top = one.get("a");
  assert.ok(Math.abs(top.x) < 1e-9 && Math.abs(top.y + 10) < 1e-9);
});
