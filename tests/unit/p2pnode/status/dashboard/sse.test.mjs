import assert from "node:assert/strict";
import { test } from "node:test";
import { Parser, backoff } from "../../../../../p2pnode/status/static/sse.js";

const STREAM = ": a comment\nevent: update\ndata: {\"a\":1}\n\nevent: events\r\ndata: x\r\ndata: y\r\n\r\ndata: plain\n\nid: 3\n\n";
const MESSAGES = [
  { event: "update", data: '{"a":1}' },
  { event: "events", data: "x\ny" },
  { event: "message", data: "plain" },
];

test("messages are the same, however the stream is cut", () => {
  for (let size = 1; size <= STREAM.length; size += 1) {
    const parser = new Parser();
    const found = [];
    for (let place = 0; place < STREAM.length; place += size) found.push(...parser.feed(STREAM.slice(place, place + size)));
    assert.deepEqual(found, MESSAGES, `pieces of ${size}`);
  }
});

test("a message that has not ended is not a message yet", () => {
  const parser = new Parser();
  assert.deepEqual(parser.feed("event: update\ndata: 1\n"), []);
  assert.deepEqual(parser.feed("\n"), [{ event: "update", data: "1" }]);
});

test("attempts are further and further apart, up to 15 seconds, and never at the same moment", () => {
  assert.deepEqual([1, 2, 3, 4, 5, 6, 50].map((failures) => backoff(failures, 0)), [1, 2, 4, 8, 15, 15, 15]);
  assert.equal(backoff(5, 1), 11.25);
});
