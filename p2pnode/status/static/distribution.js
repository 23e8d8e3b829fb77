// The steps of the peers as bars, with this node's own step marked.

import { count, plural } from "./format.js";
import { bins, median } from "./steps.js";
import { element, svg } from "./dom.js";

const HEIGHT = 180;
const BASE = 150;

export class Distribution {
  #drawn = "";

  constructor() {
    this.place = element("div", { class: "plot", role: "img" });
    this.note = element("p", { class: "note" });
    this.figure = element("figure", { class: "chart", id: "chart-steps" }, [
      element("figcaption", {}, [
        element("h3", { text: "Steps of the peers" }),
        element("p", { text: "How many peers are at which step; the line is this node." }),
      ]),
      this.note,
      this.place,
    ]);
  }

  /** @param {number[]} steps of the peers @param {number} mine @param {number | null} staleness */
  draw(steps, mine, staleness) {
    const width = Math.max(240, this.place.clientWidth || 300);
    const made = JSON.stringify([steps, mine, staleness, width]);
    if (made === this.#drawn) return;
    this.#drawn = made;
    const middle = median(steps);
    this.note.textContent = steps.length
      ? `Median ${count(middle)}, from ${count(Math.min(...steps))} to ${count(Math.max(...steps))}; this node ${count(mine)}.${this.#limit(steps, mine, staleness)}`
      : `No peers; this node is at step ${count(mine)}.`;
    this.place.setAttribute("aria-label", this.note.textContent);
    this.place.replaceChildren(this.#picture(steps, mine, staleness, width));
  }

  #limit(steps, mine, staleness) {
    const shown = staleness !== null && mine - staleness > Math.min(...steps);
    return shown ? ` Dashed: the barrier waits for peers below step ${count(mine - staleness)}.` : "";
  }

  #picture(steps, mine, staleness, width) {
    const all = bins([...steps, mine]);
    const low = all[0].low;
    const high = Math.max(all[all.length - 1].high, low + 1);
    const left = 34;
    const span = width - left - 16;
    const bins_ = all.map((bin) => ({ ...bin, amount: 0 }));
    for (const step of steps) bins_[Math.floor((step - low) / (bins_[0].high - low + 1))].amount += 1;
    const most = Math.max(1, ...bins_.map(({ amount }) => amount));
    const one = span / bins_.length;
    const at = (/** @type {number} */ step) => left + ((step - low + 0.5) / (bins_.length * (bins_[0].high - low + 1))) * span;
    const tall = (/** @type {number} */ amount) => (amount / most) * (BASE - 34);
    const bar = Math.min(one - 2, 36);
    const parts = bins_
      .filter(({ amount }) => amount > 0)
      .map((bin) =>
        svg("rect", {
          class: "bar",
          x: at((bin.low + bin.high) / 2) - bar / 2,
          y: BASE - tall(bin.amount),
          width: Math.max(2, bar),
          height: tall(bin.amount),
          rx: 2,
        }, [svg("title", { text: `${plural(bin.amount, "peer")} at ${name(bin)}` })]),
      );
    const x = at(mine);
    const side = x > width - 70 ? "end" : x < left + 40 ? "start" : "middle";
    const limit = staleness === null ? null : mine - staleness;
    return svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, "aria-hidden": "true" }, [
      svg("text", { class: "tick", x: left - 8, y: BASE - tall(most) + 4, "text-anchor": "end", text: count(most) }),
      svg("text", { class: "tick", x: left - 8, y: BASE + 4, "text-anchor": "end", text: "0" }),
      svg("line", { class: "axis", x1: left, x2: width - 8, y1: BASE, y2: BASE }),
      ...parts,
      ...(limit !== null && limit > low && limit <= mine
        ? [svg("line", { class: "limit", x1: at(limit), x2: at(limit), y1: 26, y2: BASE }, [svg("title", { text: `the barrier waits for peers below step ${count(limit)}` })])]
        : []),
      svg("line", { class: "mine", x1: x, x2: x, y1: 22, y2: BASE + 6 }),
      svg("text", { class: "mine-label", x, y: 14, "text-anchor": side, text: "this node" }),
      svg("text", { class: "tick", x: left, y: BASE + 22, text: count(low) }),
      svg("text", { class: "tick", x: width - 8, y: BASE + 22, "text-anchor": "end", text: count(high) }),
    ]);
  }
}

function name(bin) {
  return bin.low === bin.high ? `step ${count(bin.low)}` : `steps ${count(bin.low)} to ${count(bin.high)}`;
}
