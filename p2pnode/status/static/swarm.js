// The page of the swarm, as one node sees it: who trains, who waits for whom, how fast, how far.

import { byId, definitions, element, setText, stateBadge } from "./dom.js";
import { metrics, progressOf } from "./facts.js";
import { NONE, count, duration, number, plural, shortId } from "./format.js";
import { graph } from "./graph.js";
import { run } from "./page.js";
import { median, samplesPerSecond, waits } from "./steps.js";
import { Table } from "./table.js";
import { connected, lost, recentlyLost } from "./words.js";

const TRAINS = ["training", "waiting", "suspect"];
/** A barrier that looks at all workers; the others look at a sample or at no one. */
const COMPLETE = ["bsp", "ssp"];

let furthest = 1;
let goal = 0;

const nodes = new Table(byId("nodes"), {
  caption: "All nodes, furthest ahead first",
  key: (node) => node.id,
  empty: "No nodes.",
  columns: [
    {
      title: "Node",
      kind: "id",
      value: (node) =>
        element("span", { title: node.id }, [
          element("code", { text: shortId(node.id) }),
          ...(node.self ? [element("span", { class: "me", text: "this node" })] : []),
        ]),
    },
    { title: "State", value: (node) => stateBadge(node.state) },
    { title: "Step", kind: "number", value: (node) => count(node.step) },
    { title: "Progress", kind: "wide", value: (node) => progressBar(node) },
    { title: "Samples/s", kind: "number", value: (node) => number(TRAINS.includes(node.state) ? node.samplesPerSecond : 0) },
    { title: "Each step", kind: "number wide", value: (node) => duration(node.step_seconds || null) },
    { title: "Version", kind: "wide", hint: "what it says that it runs, where that is known", value: (node) => node.version ?? NONE },
  ],
});

function progressBar(node) {
  const label = goal ? `step ${node.step} of ${goal}` : `step ${node.step}, the furthest is at ${furthest}`;
  return element("progress", { max: goal || Math.max(1, furthest), value: node.step, "aria-label": label });
}

/** All nodes that are shown, this one among them. */
function members({ status, peers }, own) {
  const self = {
    id: status.node.id,
    self: true,
    step: status.step,
    state: status.state,
    step_seconds: status.training.step_seconds,
    version: status.node.version,
    samples: 0,
    samplesPerSecond: own ?? 0,
    progress: 0,
  };
  const others = peers.map((peer) => ({
    ...peer,
    self: false,
    progress: peer.progress_seconds,
    samplesPerSecond: peer.step_seconds ? peer.samples / peer.step_seconds : 0,
  }));
  return [self, ...others].sort((a, b) => b.step - a.step || (a.id < b.id ? -1 : 1));
}

/** Nodes that were found dead in the last minutes: they keep their place, in red. */
function dead(status) {
  return recentlyLost(status)
    .filter(({ how }) => how === "dead")
    .map(({ id, step }) => ({ id, self: false, step, state: "dead", step_seconds: 0, samplesPerSecond: 0 }));
}

/** What the swarm does, in a sentence. */
function doing(all, edges) {
  const training = all.filter(({ state }) => TRAINS.includes(state)).length;
  const rest = all.length - training;
  const waiting = new Set(edges.map(({ from }) => from)).size;
  const parts = [`${count(training)} of ${plural(all.length, "node")} ${training === 1 ? "trains" : "train"}`];
  if (rest) parts.push(`${count(rest)} ${rest === 1 ? "does" : "do"} not`);
  if (waiting) parts.push(`${count(waiting)} ${waiting === 1 ? "waits" : "wait"} for another`);
  const tone = training === 0 ? "idle" : "good";
  return { topic: "Training", tone, text: `${parts.join("; ")}.` };
}

/** How far the swarm has come. */
function soFar(status, all) {
  const steps = all.map(({ step }) => step);
  const middle = `The median node is at step ${count(median(steps))}`;
  const toGo = progressOf(status, "max_steps");
  if (!toGo) return { topic: "Progress", tone: "good", text: `${middle}.` };
  const left = toGo.left_seconds === null ? "" : `, about ${duration(toGo.left_seconds)} to go`;
  return { topic: "Progress", tone: "good", text: `${middle} of ${count(toGo.total)}${left}.` };
}

function totals(status, all, own, peers) {
  const { training } = status;
  const rows = [["Samples/s", number(samplesPerSecond(peers) + (own ?? 0)), "all nodes together"]];
  const best = status.result?.best ?? training.best;
  if (best) rows.push([`Best ${best.metric}`, number(best.value), `at step ${count(best.step)}`]);
  for (const [name, value] of metrics(training)) {
    rows.push([`Shared ${name}`, number(value), training.evaluated_step === null ? "" : `at step ${count(training.evaluated_step)}`]);
  }
  const steps = all.map(({ step }) => step);
  rows.push(["Steps", count(median(steps)), `${count(Math.min(...steps))} to ${count(Math.max(...steps))}`]);
  const toGo = progressOf(status, "max_steps");
  if (toGo && toGo.left_seconds !== null) rows.push(["Time to go", duration(toGo.left_seconds), `to step ${count(toGo.total)}`]);
  return rows;
}

function draw(update, series) {
  const { status, peers } = update;
  const own = series.newest("samples_per_second");
  const all = members(update, own);
  furthest = Math.max(...all.map(({ step }) => step));
  goal = progressOf(status, "max_steps")?.total ?? 0;
  const edges = waits(
    all.map(({ id, step, state, progress, step_seconds: stepSeconds }) => ({ id, step, state, progress, stepSeconds })),
    {
      self: status.node.id,
      waiting: status.waiting,
      staleness: status.barrier.staleness,
      samples: !COMPLETE.includes(status.barrier.method),
    },
  );
  document.title = `${status.run} · the swarm · p2pnode`;
  setText(byId("whoami"), `${status.run}, as ${shortId(status.node.id)} sees it`);
  const list = byId("answers");
  const sentences = [connected(status), doing(all, edges), soFar(status, all), lost(status)];
  list.replaceChildren(
    ...sentences.map(({ tone, text, topic }) =>
      element("li", { class: tone, "data-topic": topic.toLowerCase() }, [element("span", { class: "mark" }), element("span", { text })]),
    ),
  );
  definitions(byId("vitals"), totals(status, all, own, peers));
  const gone = dead(status);
  graph(byId("graph"), [...all, ...gone], edges);
  nodes.show([...all, ...gone]);
  const hidden = update.peers_known - peers.length;
  setText(byId("nodes-amount"), hidden > 0 ? `${all.length} of ${update.peers_known + 1}, evenly chosen` : String(all.length));
  setText(byId("foot"), "What one node knows: of others the last message counts. Dashed arrows are concluded from steps, not reported.");
}

run({ draw });
