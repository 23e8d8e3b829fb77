// Rows of names and values from `/status`. A part that a node does not have has no rows. No DOM, but `code` for paths.

import { bytes, count, duration, milliseconds, number, percent, plural, rate, shortId } from "./format.js";
import { samplesPerSecond } from "./steps.js";

/** @typedef {[string, string, string?]} Row name, value, note */

/**
 * The figures at the top.
 * @param {any} status @param {import("./series.js").Series} series @param {any[]} peers
 * @returns {Row[]}
 */
export function vitals(status, series, peers) {
  const { training, population } = status;
  /** @type {Row[]} */
  const rows = [["Step", count(status.step), training.step_seconds ? `${duration(training.step_seconds)} each` : ""]];
  rows.push(["Loss", number(training.loss), "last step"]);
  for (const [name, value] of metrics(training)) {
    rows.push([name, number(value), training.evaluated_step === null ? "" : `at step ${count(training.evaluated_step)}`]);
  }
  const own = series.newest("samples_per_second");
  rows.push(["Samples/s", number(own), `all nodes ${number(samplesPerSecond(peers) + (own ?? 0))}`]);
  rows.push(["Nodes", number(population.estimate), population.exact ? `${number(population.workers)} train` : "estimated"]);
  const goal = progressOf(status, "max_steps");
  if (goal && goal.left_seconds !== null) rows.push(["Time to go", duration(goal.left_seconds), `to step ${count(goal.total)}`]);
  return rows;
}

/** The metrics that a script reports, the first three. @param {any} training @returns {[string, number | null][]} */
export function metrics(training) {
  return Object.entries(training.metrics ?? {})
    .filter(([name]) => name !== "loss")
    .slice(0, 3);
}

/** The node's progress of one kind, or null. @param {any} status @param {string} what */
export function progressOf(status, what) {
  return (status.progress ?? []).find((/** @type {any} */ one) => one.what === what) ?? null;
}

/** @param {any} status @returns {Row[]} */
export function exchangeFacts(status) {
  const { exchange } = status;
  if (!exchange.shards) return [];
  const share = exchange.shards_owned / exchange.shards;
  /** @type {Row[]} */
  const rows = [
    ["Owned here", `${count(exchange.shards_owned)} of ${count(exchange.shards)}`, percent(share)],
    ["Backed up here", count(exchange.shards_backed)],
  ];
  if (exchange.shards_without_backup) rows.push(["Without a backup", count(exchange.shards_without_backup)]);
  if (exchange.shards_to_mend) rows.push(["Superseded copies", count(exchange.shards_to_mend), "what their owners lack is sent to them"]);
  if (exchange.shards_resigned) rows.push(["Broken in memory", count(exchange.shards_resigned), "left to their backups"]);
  rows.push(["Memory of shards", bytes(exchange.state_bytes)]);
  rows.push(["Sent, received", `${bytes(exchange.bytes_sent)}, ${bytes(exchange.bytes_received)}`]);
  rows.push(["Deltas merged", count(exchange.merged_last_step), "in the last step"]);
  const waiting = exchange.outstanding_steps.length;
  rows.push(["Deltas on their way", waiting ? `of ${plural(waiting, "step")}` : "none"]);
  if (exchange.refused) rows.push(["Deltas refused", count(exchange.refused), "by owners, since the start"]);
  return rows;
}

/** @param {any} status @returns {Row[]} */
export function lineFacts(status) {
  const { line } = status;
  if (!line) return [];
  const up = line.upload_bytes_per_s ?? line.upload_at_least_bytes_per_s;
  const least = line.upload_bytes_per_s === null && up !== null;
  /** @type {Row[]} */
  const rows = [
    ["Carries up", up === null ? "not measured yet" : `${least ? "at least " : ""}${rate(up)}`],
    ["Carries down", line.download_bytes_per_s === null ? "not measured yet" : rate(line.download_bytes_per_s)],
  ];
  if (line.codec) rows.push(["Codec", line.codec, line.codec_reason]);
  if (line.needed_bytes_per_step !== null) rows.push(["A step sends", bytes(line.needed_bytes_per_step)]);
  if (line.carried_bytes_per_step !== null) rows.push(["The line carries", bytes(line.carried_bytes_per_step), "in a step's time"]);
  return rows;
}

/** The queue of a master, or this node's part in it. @param {any} status @returns {Row[]} */
export function dispatchFacts(status) {
  const { dispatch } = status;
  if (!dispatch) return [];
  const master = dispatch.serves ? "this node" : dispatch.master ? shortId(dispatch.master) : "not known";
  /** @type {Row[]} */
  const rows = [["Master", master, dispatch.store ? `store ${dispatch.store}` : ""]];
  if (dispatch.tasks !== null) {
    const passes = dispatch.passes ? ` of ${count(dispatch.passes)}` : "";
    rows.push(["Pass", `${count(dispatch.pass_number)}${passes}`]);
    rows.push(["Tasks done", `${count(dispatch.done)} of ${count(dispatch.tasks)}`, percent(dispatch.tasks ? dispatch.done / dispatch.tasks : null)]);
    rows.push(["To do, leased", `${count(dispatch.todo)}, ${count(dispatch.leased)}`]);
    if (dispatch.failed) rows.push(["Failed", count(dispatch.failed)]);
  }
  rows.push(["Held here", count(dispatch.held), `${count(dispatch.records_trained)} records trained`]);
  if (dispatch.ended) rows.push(["State", "the job is done"]);
  if (dispatch.unanswered_seconds !== null) rows.push(["No answer", `for ${duration(dispatch.unanswered_seconds)}`]);
  if (dispatch.last_error) rows.push(["Last error", dispatch.last_error]);
  return rows;
}

/** @param {any} status @returns {Row[]} */
export function machineFacts(status) {
  const { node, memory, overlay, training, barrier } = status;
  const rule = [barrier.sample ? `samples ${count(barrier.sample)}` : "", barrier.staleness === null ? "" : `staleness ${barrier.staleness}`];
  /** @type {Row[]} */
  const rows = [
    ["Address", node.address, overlay.reachable?.reached ? "reached by others" : overlay.reachable?.reason || "not checked yet"],
    ["Role", node.client_only ? `${node.role}, owns no shards` : node.role],
    ["Swarm", status.swarm.closed ? "closed" : "open", status.swarm.keys[0] ? `key ${status.swarm.keys[0]}` : ""],
    ["Barrier", barrier.method, rule.filter(Boolean).join(", ")],
    ["Trainer", training.trainer, training.trainer_failures ? plural(training.trainer_failures, "failure") : ""],
    ["Trains", percent(training.training_share), "of the time of the last steps"],
  ];
  if (training.busy) rows.push(["Busy", training.busy.what, `since ${duration(training.busy.since_seconds)}`]);
  if (memory.budget_bytes !== null) rows.push(["Memory", bytes(memory.budget_bytes), `${bytes(memory.available_bytes)} free`]);
  for (const gpu of status.gpus ?? []) rows.push(["GPU", `${gpu.device} ${gpuFacts(gpu)}`, gpu.error ?? gpu.name]);
  if (overlay.round_trip_ms !== null) rows.push(["Round trip", milliseconds(overlay.round_trip_ms), "mean of all calls"]);
  return rows;
}

/** Memory, load and temperature, as far as the driver says them. @param {any} gpu */
function gpuFacts({ memory_used_bytes, memory_total_bytes, utilisation, temperature_celsius }) {
  const facts = memory_total_bytes === null ? [] : [`${bytes(memory_used_bytes)} of ${bytes(memory_total_bytes)}`];
  if (utilisation !== null) facts.push(`${percent(utilisation)} busy`);
  if (temperature_celsius !== null) facts.push(`${Math.round(temperature_celsius)} °C`);
  return facts.join(", ") || "does not answer";
}

/** What came of the run. @param {any} result @returns {Row[]} */
export function resultFacts(result) {
  /** @type {Row[]} */
  const rows = [["Ended by", result.reason.replaceAll("_", " "), `after ${plural(result.steps, "step")}`]];
  if (result.best) rows.push([`Best ${result.best.metric}`, number(result.best.value), `at step ${count(result.best.step)}`]);
  if (result.model) rows.push(["Model", result.model, result.sha256 ? `SHA-256 ${result.sha256.slice(0, 16)}…` : ""]);
  if (result.load.length) rows.push(["Load it", result.load.join("\n")]);
  if (result.may_differ) rows.push(["May differ", result.may_differ]);
  return rows;
}

/** What the nodes decide together, beside the table of devices. @param {any} status @returns {Row[]} */
export function coordinationFacts({ coordination, node }) {
  if (!coordination) return [];
  const { server, serves, trainers, leader } = coordination;
  const who = (/** @type {string} */ id) => (id === node.id ? "this node" : shortId(id));
  /** @type {Row[]} */
  const rows = [["Local steps", "this node takes its own share", "no node answers that divides them among all"]];
  if (serves) rows[0] = ["Local steps", "divided by this node", `among ${plural(trainers, "trainer")}`];
  else if (server) rows[0] = ["Local steps", `divided by ${who(server)}`];
  if (leader) rows.push(["Leader of all nodes", who(leader), "the lowest loss: the others follow it"]);
  return rows;
}

/** The values that this node owns. @param {any} values @returns {Row[]} */
function valuesFacts(values) {
  /** @type {Row[]} */
  const rows = [
    ["Keys", count(values.keys), `${bytes(values.bytes)} of ${bytes(values.limit_bytes)}`],
    ["Updates", count(values.updates), `in ${plural(values.batches, "batch", "batches")}`],
    ["Keys read", count(values.reads)],
    ["Wait for a batch", count(values.waiting), values.waiting ? bytes(values.waiting_bytes) : ""],
    ["Not answered yet", count(values.unanswered), "of this node's own updates"],
  ];
  if (values.refused) rows.push(["Updates refused", count(values.refused)]);
  return rows;
}

/** The tasks of a server's workers. @param {any} server @returns {Row[]} */
function serverFacts(server) {
  /** @type {Row[]} */
  const rows = [
    ["Workers", count(server.workers)],
    ["Updates in the values", count(server.version)],
    ["Tasks done", count(server.done), `${count(server.given)} given`],
    ["With workers", count(server.held)],
  ];
  if (server.waiting) rows.push(["Wait for a worker", count(server.waiting)]);
  if (server.again) rows.push(["Given again", count(server.again), "after an error, a death or the end of a lease"]);
  if (server.refused) rows.push(["Updates refused", count(server.refused), "too old"]);
  if (server.lost) rows.push(["Updates lost", count(server.lost), "with their worker and their server"]);
  return rows;
}

/** What the progress of each kind is called. @type {Record<string, string>} */
const WORK = { max_steps: "Steps of the run", nodes: "Nodes that are ready" };

/**
 * Work that takes long: its name, how far it is from 0 to 1 (null where nobody knows), and that in words.
 * @param {any} status
 * @returns {{ name: string, share: number | null, text: string }[]}
 */
export function work(status) {
  return (status.progress ?? []).map((/** @type {any} */ one) => {
    const name = WORK[one.what] ?? one.what.charAt(0).toUpperCase() + one.what.slice(1);
    if (!one.total) return { name, share: null, text: `for ${duration(one.since_seconds)}` };
    const amount = one.unit === "bytes" ? bytes : count;
    const left = one.left_seconds === null || one.done >= one.total ? "" : `, ${duration(one.left_seconds)} to go`;
    return { name, share: one.done / one.total, text: `${amount(one.done)} of ${amount(one.total)}${left}` };
  });
}

/** Parts that only some nodes have. @param {any} status @returns {[string, Row[]][]} */
export function sections(status) {
  const found = [];
  if (status.values) found.push(["Named values", valuesFacts(status.values)]);
  if (status.server) found.push(["Parameter server", serverFacts(status.server)]);
  if (status.data) {
    const { data } = status;
    const trained = data.trained === null ? "" : `${percent(data.trained)} of epoch ${count(data.open_epoch)} trained`;
    found.push(["Shared data", [["Kind", data.kind, `size ${count(data.size)}`], ["Epoch", count(data.epoch), trained], ["Shared by", plural(data.nodes, "node")]]]);
  }
  if (status.members_quarantined?.length) {
    const rows = status.members_quarantined.map((/** @type {any} */ one) => [shortId(one.id), one.reason, one.seconds ? `${duration(one.seconds)} more` : "until it answers"]);
    found.push(["Quarantined", rows]);
  }
  return found;
}
