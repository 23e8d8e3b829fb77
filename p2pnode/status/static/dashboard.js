// The page of one node: in words, then figures, charts, peers, what it holds, and its events.

import { Chart } from "./charts.js";
import { Distribution } from "./distribution.js";
import { badge, byId, definitions, element, setText, stateBadge } from "./dom.js";
import { EventList } from "./events.js";
import { coordinationFacts, dispatchFacts, exchangeFacts, lineFacts, machineFacts, resultFacts, sections, vitals, work } from "./facts.js";
import { NONE, count, duration, milliseconds, number, percent, plural, shortId } from "./format.js";
import { run } from "./page.js";
import { PLANS, RANGES, learningPlan } from "./plans.js";
import { Table } from "./table.js";
import { answers, stateOf } from "./words.js";

const DEVICE_TONES = { running: "good", starting: "warn", hung: "bad", crashed: "bad", failed: "bad" };
const events = new EventList();
const distribution = new Distribution();
let seconds = RANGES[0][0];
/** @type {Chart[]} */
let charts = [];
let metricsShown = "?";

const peers = new Table(byId("peers"), {
  caption: "Live peers, furthest ahead first",
  key: (peer) => peer.id,
  empty: "No peers. Others join with: p2pnode start --bootstrap and this node's address.",
  columns: [
    { title: "Peer", kind: "id", value: (peer) => element("code", { title: peer.id, text: shortId(peer.id) }) },
    { title: "State", value: (peer) => stateBadge(peer.state) },
    { title: "Step", kind: "number", value: (peer) => count(peer.step) },
    { title: "Lag", kind: "number", hint: "steps of this node minus its steps", value: (peer) => lag(peer.lag) },
    { title: "Step took", kind: "number", value: (peer) => duration(peer.step_seconds || null) },
    { title: "Last step", kind: "number", hint: "how long ago its step rose", value: (peer) => ago(peer.progress_seconds) },
    { title: "Round trip", kind: "number", value: (peer) => milliseconds(peer.round_trip_ms) },
    { title: "Heard", kind: "number", hint: "the age of its step and state", value: (peer) => ago(peer.last_seen_seconds) },
    { title: "Shards", kind: "number", hint: "its share of the shards, as known here", value: (peer) => share(peer.shards) },
    { title: "Version", kind: "wide", hint: "what it says that it runs, once there was a request between it and this node", value: (peer) => peer.version ?? NONE },
    { title: "Started", kind: "number wide", hint: "its incarnation, by its own clock", value: (peer) => new Date(peer.incarnation * 1000).toLocaleString() },
    { title: "Address", kind: "wide", value: (peer) => element("code", { text: peer.address }) },
  ],
});

const lost = new Table(byId("lost"), {
  caption: "Peers that died or left, newest first",
  key: (peer) => `${peer.id} ${peer.how}`,
  empty: "No one since this node's start.",
  columns: [
    { title: "Peer", kind: "id", value: (peer) => element("code", { title: peer.id, text: shortId(peer.id) }) },
    { title: "How", value: (peer) => stateBadge(peer.how) },
    { title: "When", kind: "number", value: (peer) => ago(peer.seconds_ago) },
    { title: "At step", kind: "number", value: (peer) => count(peer.step) },
    { title: "Address", kind: "wide", value: (peer) => element("code", { text: peer.address }) },
    { title: "Why", kind: "fields", value: (peer) => peer.reason ?? "" },
  ],
});

const devices = new Table(byId("devices"), {
  caption: "Devices of this node",
  key: (device) => String(device.index),
  empty: "",
  columns: [
    { title: "Device", kind: "id", value: (device) => element("code", { text: `${device.index} ${device.device}` }) },
    { title: "State", value: (device) => badge(DEVICE_TONES[device.state] ?? "idle", device.state) },
    { title: "Loss", kind: "number", value: (device) => number(device.loss) },
    { title: "Each step", kind: "number", value: (device) => duration(device.step_seconds || null) },
    { title: "Samples", kind: "number", value: (device) => number(device.samples) },
    { title: "Optimizer steps", kind: "number wide", value: (device) => count(device.optimizer_steps) },
    { title: "Failures", kind: "number", value: (device) => count(device.failures) },
    { title: "Process", kind: "number wide", value: (device) => (device.pid === null ? NONE : String(device.pid)) },
    { title: "Part", value: (device) => (device.leads ? "leads" : "") },
  ],
});

let shardsInAll = 0;

function share(shards) {
  if (shards === null || shards === undefined) return "–";
  return shardsInAll ? `${percent(shards / shardsInAll)} (${count(shards)})` : count(shards);
}

function lag(steps) {
  if (steps === 0) return "0";
  return steps > 0 ? `${count(steps)} behind` : `${count(-steps)} ahead`;
}

function ago(value) {
  return value < 1 ? "now" : `${duration(value)} ago`;
}

/** The charts, made again when the script reports a metric for the first time. */
function planCharts(series) {
  const metrics = series.names("metric:").slice(0, 4);
  if (metrics.join() === metricsShown) return;
  metricsShown = metrics.join();
  charts = [learningPlan(metrics), ...PLANS].map((plan) => new Chart(plan));
  const [learning, ...others] = charts.map(({ figure }) => figure);
  byId("charts").replaceChildren(learning, distribution.figure, ...others);
}

function drawCharts(series) {
  planCharts(series);
  for (const chart of charts) chart.draw(series, seconds);
}

function drawRanges(series) {
  const buttons = RANGES.map(([span, text]) => {
    const button = element("button", { type: "button", "aria-pressed": String(span === seconds), text });
    button.onclick = () => {
      seconds = span;
      drawRanges(series);
      drawCharts(series);
    };
    return button;
  });
  byId("ranges").replaceChildren(...buttons);
}

function drawAnswers(status, series) {
  const found = answers(status, series.before("loss", 60));
  const list = byId("answers");
  while (list.children.length < found.length) list.append(element("li", {}, [element("span", { class: "mark" }), element("span")]));
  found.forEach(({ tone, text, topic }, place) => {
    const row = list.children[place];
    row.className = tone;
    row.dataset.topic = topic.toLowerCase();
    setText(row.lastChild, text);
  });
}

function drawHealth(findings) {
  byId("health").hidden = findings.length === 0;
  const text = JSON.stringify(findings);
  if (byId("findings").dataset.shown === text) return;
  byId("findings").dataset.shown = text;
  byId("findings").replaceChildren(
    ...findings.map(({ level, what, do: advice }) => {
      const tone = { error: "bad", warning: "warn" }[level] ?? "idle";
      return element("li", {}, [badge(tone, level), element("p", {}, [element("strong", { text: what }), element("span", { text: advice })])]);
    }),
  );
}

function drawWork(status) {
  const all = work(status);
  byId("work").hidden = all.length === 0;
  const rows = all.map(({ name, share, text }) => {
    // Without a value a bar says that nobody knows how far it is.
    const bar = element("progress", { max: 1, value: share, "aria-label": name });
    return /** @type {[string, Node, string]} */ ([name, bar, text]);
  });
  definitions(byId("work-rows"), rows);
}

function drawFacts(status) {
  const parts = [
    ["Shards", exchangeFacts(status)],
    ["Line", lineFacts(status)],
    ["Dispatched records", dispatchFacts(status)],
    ...sections(status),
    ["This node", machineFacts(status)],
  ].filter(([, rows]) => rows.length);
  const place = byId("facts");
  const titles = parts.map(([title]) => title).join();
  if (place.dataset.titles !== titles) {
    place.dataset.titles = titles;
    place.replaceChildren(
      ...parts.map(([title]) => element("section", {}, [element("h2", { text: title }), element("dl", { class: "facts" })])),
    );
  }
  parts.forEach(([, rows], index) => definitions(place.children[index].lastChild, rows));
}

function draw(update, series) {
  const { status } = update;
  const state = stateOf(status.state).word;
  document.title = `${state} · ${shortId(status.node.id)} · p2pnode`;
  setText(byId("whoami"), `${status.run} · ${shortId(status.node.id)}`);
  byId("whoami").title = status.node.id;
  drawAnswers(status, series);
  drawHealth(status.health);
  byId("result").hidden = !status.result;
  if (status.result) definitions(byId("result-facts"), resultFacts(status.result));
  drawWork(status);
  definitions(byId("vitals"), vitals(status, series, update.peers));
  drawCharts(series);
  const staleness = status.barrier.sample ? status.barrier.staleness : null;
  distribution.draw(update.peers.map(({ step }) => step), status.step, staleness);
  shardsInAll = status.exchange.shards;
  peers.show(update.peers);
  byId("devices-section").hidden = !status.devices?.length;
  devices.show(status.devices ?? []);
  const together = coordinationFacts(status);
  byId("coordination").hidden = !together.length;
  definitions(byId("coordination"), together);
  const hidden = update.peers_known - update.peers.length;
  setText(byId("peers-amount"), hidden > 0 ? `${update.peers.length} of ${update.peers_known}, evenly chosen` : String(update.peers_known));
  lost.show(status.lost ?? []);
  byId("lost-section").hidden = status.lost === undefined;
  setText(byId("lost-amount"), status.lost?.length ? String(status.lost.length) : "");
  drawFacts(status);
  const about = `p2pnode ${status.node.version}, up ${duration(status.node.uptime_seconds)}`;
  setText(byId("foot"), `${about} · ${plural(status.loop.tasks, "task")} · loop late by ${milliseconds(status.loop.delay_ms_p99)} (99 %)`);
}

const page = run({ draw, onEvents: (found) => events.add(found), onRestart: () => events.clear() });
drawRanges(page.series);
addEventListener("restyle", () => charts.forEach((chart) => chart.restyle()));
