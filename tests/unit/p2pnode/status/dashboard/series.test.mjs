import assert from "node:assert/strict";
import { test } from "node:test";
import { MOST_ROWS, Series, stacked } from "../../../../../p2pnode/status/static/series.js";

test("rows follow the history, and only forwards in time", () => {
  const series = new Series();
  series.set({ times: [1, 2], series: { loss: [9, null] } });
  series.append(3, { loss: 7, accuracy: 0.5 });
  series.append(3, { loss: 0 });
  series.append(2, { loss: 0 });
  series.append(4, {});
  assert.deepEqual(series.last(["loss", "accuracy", "none"], 100), [[1, 2, 3, 4], [9, null, 7, null], [null, null, 0.5, null], [null, null, null, null]]);
  assert.deepEqual(series.last(["loss"], 1), [[3, 4], [7, null]]);
  assert.deepEqual([series.has("accuracy"), series.has("none")], [true, false]);
  assert.equal(series.newest("accuracy"), 0.5);
  assert.deepEqual(series.names("acc"), ["accuracy"]);
});

test("a new history replaces the old one: nothing is there twice after a reconnection", () => {
  const series = new Series();
  series.append(1, { loss: 1 });
  series.set({ times: [5], series: { step: [3] } });
  assert.deepEqual(series.last(["loss", "step"], 100), [[5], [null], [3]]);
});

test("a page that stays open for days keeps a bounded number of rows", () => {
  const series = new Series();
  for (let time = 0; time < MOST_ROWS + 50; time += 1) series.append(time, { step: time });
  const [times, steps] = series.last(["step"], Infinity);
  assert.equal(times.length, MOST_ROWS);
  assert.deepEqual([steps[0], steps.at(-1)], [50, MOST_ROWS + 49]);
});

test("the value of a minute ago is one of about a minute ago", () => {
  const series = new Series();
  assert.equal(series.before("loss", 60), null);
  series.append(0, { loss: 9 });
  for (let time = 1000; time <= 1100; time += 1) series.append(time, { loss: time });
  assert.equal(series.before("loss", 60), 1040);
  assert.equal(series.before("loss", 200), null, "the row before is of a quarter of an hour ago");
  assert.equal(series.before("other", 60), null);
});

test("shares lie on each other, and a row without any is a gap", () => {
  assert.deepEqual(stacked([[0.5, null, null], [0.25, null, 1]]), [[0.5, null, 0], [0.75, null, 1]]);
});

test("rates are means over ten seconds, or over four long steps", () => {
  const series = new Series();
  for (let second = 0; second <= 30; second += 1) series.append(second, { samples: 300 * Math.floor(second / 3), bytes_sent: 1000 * second });
  assert.equal(series.last(["sent_bytes_per_second"], 20)[1].every((rate) => rate === 1000), true);
  assert.equal(series.last(["samples_per_second"], 15)[1].every((rate) => rate !== null && Math.abs(rate - 100) <= 30), true);
  const slow = new Series();
  for (let second = 0; second < 200; second += 1) slow.append(second, { samples: 600 * Math.floor(second / 30), step_seconds: 30 });
  assert.equal(slow.last(["samples_per_second"], 60)[1].every((rate) => rate !== null && Math.abs(rate - 20) <= 5), true);
});

test("the first row has no rate, nor one after a counter has fallen", () => {
  const series = new Series();
  series.set({ times: [1, 100, 101, 200], series: { bytes_sent: [5000, 100, 400, 10300] } });
  assert.deepEqual(series.last(["sent_bytes_per_second"], Infinity)[1], [null, null, 300, 100]);
});

test("the time of the steps since ten seconds before is divided", () => {
  const series = new Series();
  const seconds = (train, push, wait, pull) => ({ train_seconds: train, push_seconds: push, wait_seconds: wait, pull_seconds: pull });
  series.append(1, seconds(5, 5, 5, 5));
  series.append(2, seconds(7, 6, 5.5, 5.5));
  series.append(30, seconds(7, 6, 5.5, 5.5));
  const names = ["train", "push", "wait", "pull"].map((phase) => `${phase}_share`);
  assert.deepEqual(series.last(names, Infinity).slice(1), [[null, 0.5, null], [null, 0.25, null], [null, 0.125, null], [null, 0.125, null]]);
});

test("a clock that was set is told from a slow line", () => {
  const series = new Series();
  assert.equal(series.jumps(5), false, "the first row");
  series.append(10_000, { loss: 1 });
  assert.equal(series.jumps(10_020), false);
  assert.equal(series.jumps(10_000 + 3600), true);
  assert.equal(series.jumps(10_000 - 3600), true);
});
