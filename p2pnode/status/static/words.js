// The first lines of the dashboard: is the node connected, does it learn, whom does it wait for, whom did it lose? Each
// answer is a sentence and a tone; the tone is shown as colour, shape and word. No DOM: tested with `node --test`.

import { count, duration, number, percent, plural, shortId } from "./format.js";

/**
 * @typedef {"good" | "warn" | "bad" | "idle"} Tone
 * @typedef {{ topic: string, tone: Tone, text: string }} Answer
 */

/** Whom the node lost in this many seconds belongs into the first line. */
const LOST_RECENTLY_S = 600;
/** A barrier that waits longer than this needs a look. */
export const LONG_WAIT_S = 10;
/** More than a single slow step; below it a wait is ordinary. */
const MANY = 3;

/**
 * What each state is called, in a table too, and how it is shown.
 * @type {Record<string, { word: string, brief?: string, tone: Tone }>}
 */
export const STATES = {
  joining: { word: "joining", tone: "warn" },
  waiting_for_nodes: { word: "waiting for nodes", tone: "warn" },
  ready: { word: "ready", tone: "idle" },
  training: { word: "training", tone: "good" },
  waiting: { word: "waiting at the barrier", brief: "waiting", tone: "warn" },
  paused: { word: "paused", tone: "idle" },
  stalled: { word: "stalled", tone: "bad" },
  suspect: { word: "suspected", tone: "warn" },
  serving: { word: "serving records", tone: "good" },
  finished: { word: "finished", tone: "idle" },
  leaving: { word: "leaving", tone: "idle" },
  failed: { word: "failed", tone: "bad" },
  dead: { word: "dead", tone: "bad" },
  left: { word: "left", tone: "idle" },
};

/** @param {string} state */
export function stateOf(state) {
  return STATES[state] ?? { word: state.replaceAll("_", " "), tone: "idle" };
}

/**
 * The answers in the order in which they are read.
 * @param {any} status of `/status`
 * @param {number | null} lossBefore the loss about a minute ago
 * @returns {Answer[]}
 */
export function answers(status, lossBefore) {
  return [connected(status), learning(status, lossBefore), waiting(status), lost(status)];
}

/** @param {any} status @returns {Answer} */
export function connected(status) {
  const peers = status.overlay?.peers ?? 0;
  const topic = "Connected";
  if (status.state === "joining") return { topic, tone: "warn", text: joining(status) };
  if (status.state === "failed") return { topic, tone: "bad", text: "This node has failed." };
  if (peers === 0) {
    const lostAll = recentlyLost(status).length > 0;
    const text = lostAll ? "Alone: every peer is gone." : "Alone: no other node is known.";
    return { topic, tone: lostAll ? "bad" : "idle", text };
  }
  const { exact, estimate, low, high } = status.population;
  const about = exact ? "" : `, of about ${number(estimate)} nodes (${number(low)} to ${number(high)})`;
  const suspects = status.overlay.suspects ? `; ${plural(status.overlay.suspects, "peer")} suspected` : "";
  return { topic, tone: suspects ? "warn" : "good", text: `Connected to ${plural(peers, "peer")}${about}${suspects}.` };
}

/** What it does before it trains. @param {any} status */
function joining(status) {
  const [first] = status.progress ?? [];
  if (!first || first.what === "join the swarm") {
    const since = first && first.since_seconds >= LONG_WAIT_S ? `, for ${duration(first.since_seconds)}` : "";
    return `Not connected yet: looking for the swarm${since}.`;
  }
  const left = first.left_seconds === null ? "" : `, ${duration(first.left_seconds)} to go`;
  return `Joining: ${first.what}${first.total ? `, ${percent(first.done / first.total)}` : ""}${left}.`;
}

/** @param {any} status @param {number | null} lossBefore @returns {Answer} */
export function learning(status, lossBefore) {
  const topic = "Learning";
  const at = `step ${count(status.step)}`;
  const { loss } = status.training;
  switch (status.state) {
    case "joining":
      return { topic, tone: "idle", text: "It does not train yet." };
    case "waiting_for_nodes":
      return { topic, tone: "warn", text: `It does not train yet: ${status.summary}.` };
    case "paused":
      return { topic, tone: "idle", text: `Paused at ${at}; it continues to own its shards.` };
    case "stalled":
      return { topic, tone: "bad", text: `Stalled at ${at}: the trainer makes no progress.` };
    case "finished":
      return { topic, tone: "idle", text: `Finished at ${at}${ending(status.result)}.` };
    case "leaving":
      return { topic, tone: "idle", text: `Leaving at ${at}.` };
    case "serving":
      return { topic, tone: "good", text: "It serves records, and trains nothing itself." };
    case "failed":
      return { topic, tone: "bad", text: `It ended at ${at}.` };
    default:
  }
  if (status.step === 0) return { topic, tone: "idle", text: "It trains its first step." };
  if (loss === null) return { topic, tone: "warn", text: `Training at ${at}, but the loss is not a number.` };
  return { topic, tone: "good", text: `Learning: ${at}, loss ${number(loss)}${trend(loss, lossBefore)}.` };
}

function trend(loss, before) {
  if (before === null || !(Math.abs(loss - before) > 0.005 * Math.abs(before))) return "";
  return loss < before ? `, down from ${number(before)} a minute ago` : `, up from ${number(before)} a minute ago`;
}

function ending(result) {
  if (!result) return "";
  const best = result.best ? `; best ${result.best.metric} ${number(result.best.value)}` : "";
  return ` (${result.reason.replaceAll("_", " ")})${best}`;
}

/** @param {any} status @returns {Answer} */
export function waiting(status) {
  const topic = "Waiting";
  const held = status.waiting;
  // Only of a node that trains it is good news.
  if (!held) return { topic, tone: status.state === "training" ? "good" : "idle", text: "Waiting for no one." };
  const others = held.behind > 1 ? `, and ${plural(held.behind - 1, "more peer")} of ${count(held.sampled)} asked` : "";
  const behind = status.step - held.its_step;
  const text =
    `Waiting for ${shortId(held.slowest)}${others} for ${duration(held.since_seconds)}: ` +
    `it is at step ${count(held.its_step)}, ${plural(Math.max(0, behind), "step")} behind${rule(status.barrier)}.`;
  return { topic, tone: held.since_seconds > LONG_WAIT_S ? "bad" : "warn", text };
}

/** Why that is too far behind. */
function rule(barrier) {
  if (barrier.staleness === null || barrier.staleness === undefined) return "";
  return `; ${barrier.method} allows ${count(barrier.staleness)}`;
}

/** Whom the node has lost in the last minutes. @param {any} status @returns {any[]} */
export function recentlyLost(status) {
  return (status.lost ?? []).filter((/** @type {any} */ peer) => peer.seconds_ago <= LOST_RECENTLY_S);
}

/** @param {any} status @returns {Answer} */
export function lost(status) {
  const topic = "Lost";
  const gone = recentlyLost(status);
  if (!gone.length) return { topic, tone: "good", text: "Lost no one in the last 10 minutes." };
  const dead = gone.filter((peer) => peer.how === "dead");
  const named = (dead.length ? dead : gone).slice(0, MANY);
  const list = named.map((peer) => `${shortId(peer.id)} ${duration(peer.seconds_ago)} ago`).join(", ");
  const total = dead.length ? dead.length : gone.length;
  const more = total > named.length ? ` and ${count(total - named.length)} more` : "";
  if (dead.length) return { topic, tone: "bad", text: `Lost ${plural(dead.length, "peer")}: ${list}${more}.` };
  return { topic, tone: "idle", text: `${plural(gone.length, "peer")} left: ${list}${more}.` };
}

/**
 * The connection of this page to the node, where it needs words; null while all is well.
 * @param {import("./link.js").LinkState} link
 * @param {number} now milliseconds
 * @returns {{ tone: Tone, text: string } | null}
 */
export function linkWords(link, now) {
  const next = link.retryAt > now ? ` Next try in ${Math.ceil((link.retryAt - now) / 1000)} s.` : " Trying again.";
  const gone = duration((now - link.since) / 1000);
  switch (link.state) {
    case "lost":
      return { tone: "bad", text: `The node does not answer since ${gone}: ${link.reason}.${next}` };
    case "ended":
      return { tone: "idle", text: `The node ended ${gone} ago. What is shown is its last state.${next}` };
    case "token":
      return { tone: "warn", text: link.reason ? `The node refused the token: ${link.reason}.` : "The node asks for its token." };
    default:
      return null;
  }
}
