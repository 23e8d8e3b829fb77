import assert from "node:assert/strict";
import { test } from "node:test";
import { bytes, count, duration, number, percent, plural, rate, shortId, tick } from "../../../../../p2pnode/status/static/format.js";

test("numbers have three digits, larger ones a unit, small ones an exponent", () => {
  const cases = [
    [0, "0"], [1, "1"], [2.0001, "2.00"], [0.12345, "0.123"], [12.345, "12.3"], [812, "812"], [1547.4, "1547"], [9999, "9999"],
    [9999.6, "10.0 k"], [12345, "12.3 k"], [999600, "1.00 M"], [3.2e9, "3.20 G"], [-0.5, "−0.500"], [0.00001234, "1.23e−5"],
    [null, "–"], [undefined, "–"], [NaN, "–"], [Infinity, "–"],
  ];
  for (const [value, text] of cases) assert.equal(number(value), text, String(value));
});

test("a tick of an axis is as short as it can be", () => {
  assert.deepEqual([0.5, 2, 0.75, 20000, 1.5e6, 0].map(tick), ["0.5", "2", "0.75", "20 k", "1.5 M", "0"]);
});

test("counts are whole and in groups of three", () => {
  assert.equal(count(1234567), "1\u202f234\u202f567");
  assert.equal(count(999), "999");
  assert.equal(count(-1234), "−1\u202f234");
  assert.equal(count(null), "–");
});

test("bytes and rates have SI units", () => {
  assert.deepEqual([0, 999, 1000, 14512, 1.5e9].map(bytes), ["0 B", "999 B", "1.00 kB", "14.5 kB", "1.50 GB"]);
  assert.equal(rate(2500), "2.50 kB/s");
  assert.equal(rate(null), "–");
});

test("durations have one or two units, and never 60 of one", () => {
  const cases = [
    [0, "0 ms"], [0.0042, "4.2 ms"], [0.0996, "0.1 s"], [1.25, "1.3 s"], [9.96, "10 s"], [59.4, "59 s"], [59.6, "1 min"], [3599, "1 h"],
    [3661, "1 h 1 min"], [86399, "1 d"], [90000, "1 d 1 h"], [-1, "0 ms"], [null, "–"],
  ];
  for (const [value, text] of cases) assert.equal(duration(value), text, String(value));
});

test("shares, words and ids", () => {
  assert.deepEqual([0, 0.004, 0.5, 1, null].map(percent), ["0 %", "<1 %", "50 %", "100 %", "–"]);
  assert.deepEqual([plural(1, "peer"), plural(2, "peer"), plural(0, "peer")], ["1 peer", "2 peers", "0 peers"]);
  assert.equal(shortId("abcdef0123456789"), "abcdef01");
  assert.equal(shortId(""), "–");
});
