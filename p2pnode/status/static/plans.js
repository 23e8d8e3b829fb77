// Which charts there are: their columns of the history, and how their values read.

import { number, percent, rate } from "./format.js";

/** Time spans of the charts: seconds, and what the button says. */
export const RANGES = [
  [300, "5 min"],
  [3600, "1 h"],
  [86400, "1 day"],
  [Infinity, "all"],
];

/** Loss and the first metrics of the script. @param {string[]} metrics names of columns */
export function learningPlan(metrics) {
  const lines = metrics.map((column, place) => ({
    column,
    label: column.replace("metric:", ""),
    colour: 2 + place,
    format: number,
    scale: /** @type {"right"} */ ("right"),
    dashed: place > 0,
  }));
  const both = metrics.length ? "Loss on the left; on the right what the script evaluates on the shared model." : "Loss of this node's last step.";
  return { id: "learning", title: "Learning", about: both, lines: [{ column: "loss", label: "loss", colour: 1, format: number }, ...lines] };
}

/** The charts that do not depend on the script. @type {import("./charts.js").Plan[]} */
export const PLANS = [
  {
    id: "population",
    title: "Nodes in the swarm",
    about: "Counted while it is small; then estimated by density, with its 95 % interval, and by zones.",
    fromZero: true,
    lines: [
      { column: "population", label: "nodes", colour: 1, format: number },
      { column: "population_high", label: "at most", colour: 5, format: number, bandTo: "population_low" },
      { column: "population_low", label: "at least", colour: 5, format: number },
      { column: "population_zone", label: "by zones", colour: 4, format: number, dashed: true },
      { column: "workers", label: "that train", colour: 3, format: number, dashed: true },
    ],
  },
  {
    id: "shares",
    title: "Where the time of a step goes",
    about: "Shares of the steps of the last 10 s, from the bottom up.",
    stacked: true,
    lines: [
      { column: "train_share", label: "train", colour: 1, format: percent },
      { column: "push_share", label: "push", colour: 2, format: percent },
      { column: "wait_share", label: "barrier", colour: 4, format: percent },
      { column: "pull_share", label: "pull", colour: 3, format: percent },
    ],
  },
  {
    id: "traffic",
    title: "Traffic",
    about: "Bytes sent and received, over 10 s; dashed: what the line carries up and down.",
    fromZero: true,
    lines: [
      { column: "sent_bytes_per_second", label: "sent", colour: 1, format: rate },
      { column: "received_bytes_per_second", label: "received", colour: 2, format: rate },
      { column: "upload_bytes_per_second", label: "up", colour: 5, format: rate, dashed: true },
      { column: "download_bytes_per_second", label: "down", colour: 4, format: rate, dashed: true },
    ],
  },
  {
    id: "devices",
    title: "Device use",
    about: "Share of the time in which the trainer trains; dashed: samples per second, on the right.",
    share: true,
    rightFromZero: true,
    lines: [
      { column: "training_share", label: "trains", colour: 1, format: percent },
      { column: "samples_per_second", label: "samples/s", colour: 2, format: number, scale: "right", dashed: true },
    ],
  },
];

