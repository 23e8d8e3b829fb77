// Charts over time, drawn by uPlot, with their own legends: a name, a line and the value now, or under the pointer.

import { NONE, number, tick } from "./format.js";
import { element, setText } from "./dom.js";
import { stacked } from "./series.js";

/**
 * @typedef {object} Line
 * @property {string} column of the history
 * @property {string} label
 * @property {number} colour 1 to 6, see `style.css`
 * @property {(value: number | null) => string} format
 * @property {"left" | "right"} [scale]
 * @property {boolean} [dashed]
 * @property {string} [bandTo] the area between this line and that column is filled
 *
 * @typedef {object} Plan
 * @property {string} id
 * @property {string} title
 * @property {string} about what the chart shows, in a sentence
 * @property {Line[]} lines
 * @property {boolean} [stacked] shares of a whole
 * @property {boolean} [fromZero]
 * @property {boolean} [rightFromZero]
 * @property {boolean} [share] from 0 to 1
 */

const HEIGHT = 180;

/** One chart, remade when its lines, its colours or its width change. */
export class Chart {
  /** @type {any} */
  #plot = null;
  /** @type {any[] | null} */
  #data = null;
  #made = "";

  /** @param {Plan} plan */
  constructor(plan) {
    this.plan = plan;
    this.legend = element("ul", { class: "legend" });
    this.place = element("div", { class: "plot" });
    this.empty = element("p", { class: "empty", text: "No figures yet." });
    this.figure = element("figure", { class: "chart", id: `chart-${plan.id}` }, [
      element("figcaption", {}, [element("h3", { text: plan.title }), element("p", { text: plan.about })]),
      this.legend,
      this.place,
      this.empty,
    ]);
    this.place.setAttribute("role", "img");
    new ResizeObserver(() => this.#resize()).observe(this.place);
  }

  /** Draw the last `seconds` of the series. @param {import("./series.js").Series} series @param {number} seconds */
  draw(series, seconds) {
    const lines = this.plan.lines.filter(({ column }) => series.has(column));
    this.empty.hidden = lines.length > 0;
    this.place.hidden = lines.length === 0;
    this.legend.hidden = lines.length === 0;
    if (!lines.length) return;
    const [times, ...columns] = series.last(lines.map(({ column }) => column), seconds);
    this.values = columns;
    this.#data = [times, ...(this.plan.stacked ? stacked(columns) : columns)];
    const wanted = lines.map(({ column }) => column).join();
    if (this.#made !== wanted) {
      this.#make(lines);
      this.#made = wanted;
    } else {
      this.#plot.setData(this.#data);
    }
    this.#read(null);
  }

  /** Make it anew, as after a change between light and dark. */
  restyle() {
    this.#made = "";
  }

  #make(lines) {
    this.#plot?.destroy();
    this.lines = lines;
    this.values_shown = lines.map(() => element("b"));
    this.legend.replaceChildren(
      ...lines.map(({ label, colour, dashed }, index) =>
        element("li", {}, [
          element("span", { class: `swatch c${colour}${dashed ? " dashed" : ""}` }),
          element("span", { text: label }),
          this.values_shown[index],
        ]),
      ),
    );
    const style = getComputedStyle(document.documentElement);
    const colour = (/** @type {string} */ name) => style.getPropertyValue(name).trim();
    const right = lines.some((line) => line.scale === "right");
    const axis = { stroke: colour("--muted"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false } };
    const font = `12px ${style.fontFamily}`;
    const labels = (/** @type {string} */ scale) => {
      const found = lines.find((line) => (line.scale ?? "left") === scale)?.format ?? number;
      return (_, splits) => splits.map((value) => (value === null ? "" : found === number ? tick(value) : found(value)));
    };
    this.#plot = new globalThis.uPlot(
      {
        width: this.place.clientWidth || 300,
        height: HEIGHT,
        padding: [8, right ? 0 : 8, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: false, y: false }, points: { size: 7 } },
        scales: {
          x: { time: true },
          left: { range: (_, low, high) => this.#range(low, high) },
          right: { range: (_, low, high) => (this.plan.rightFromZero ? fromZero(high) : padded(low, high)) },
        },
        axes: [
          { ...axis, font, size: 28, gap: 4, space: 70, values: clockLabels },
          { ...axis, font, scale: "left", size: 64, gap: 6, space: 36, values: labels("left") },
          ...(right
            ? [{ ...axis, font, scale: "right", side: 1, size: 56, gap: 6, space: 36, grid: { show: false }, values: labels("right") }]
            : []),
        ],
        series: [{}, ...this.#series(lines, colour)],
        bands: this.#bands(lines, colour),
        hooks: { setCursor: [(plot) => this.#read(plot.cursor.idx ?? null)] },
      },
      this.#data,
      this.place,
    );
  }

  #series(lines, colour) {
    return lines.map((line, index) => ({
      fill: this.plan.stacked && index === 0 ? colour(`--c${line.colour}-fill`) : undefined,
      scale: this.plan.stacked ? "left" : line.scale ?? "left",
      stroke: colour(`--c${line.colour}`),
      width: this.plan.stacked ? 1 : 1.75,
      dash: line.dashed ? [5, 4] : undefined,
      spanGaps: true,
      points: { show: (plot) => plot.data[0].length < 3 },
    }));
  }

  #bands(lines, colour) {
    if (this.plan.stacked) {
      // Each area reaches down to the one below it; the lowest fills down to zero by itself.
      return lines.slice(1).map((line, index) => ({
        series: [index + 2, index + 1],
        fill: colour(`--c${line.colour}-fill`),
      }));
    }
    return lines.flatMap((line, index) => {
      const other = lines.findIndex(({ column }) => column === line.bandTo);
      return line.bandTo && other >= 0 ? [{ series: [index + 1, other + 1], fill: colour(`--c${line.colour}-fill`) }] : [];
    });
  }

  #range(low, high) {
    if (this.plan.stacked || this.plan.share) return [0, 1];
    if (this.plan.fromZero) return fromZero(high);
    return padded(low, high);
  }

  /** Values at a place under the pointer, or the newest. @param {number | null} place */
  #read(place) {
    if (!this.values_shown || !this.values) return;
    this.lines.forEach(({ format }, index) => {
      const column = this.values[index];
      const value = place === null ? column.findLast((entry) => entry !== null) : column[place];
      setText(this.values_shown[index], value === null || value === undefined ? NONE : format(value));
    });
    if (place === null) {
      const text = this.lines.map(({ label }, index) => `${label} ${this.values_shown[index].textContent}`).join(", ");
      this.place.setAttribute("aria-label", `${this.plan.title}: now ${text}`);
    }
  }

  #resize() {
    const width = this.place.clientWidth;
    if (this.#plot && width && width !== this.#plot.width) this.#plot.setSize({ width, height: HEIGHT });
  }
}

function fromZero(high) {
  return [0, high > 0 ? high * 1.08 : 1];
}

function padded(low, high) {
  if (low === null || high === null) return [0, 1];
  const room = high > low ? 0.08 * (high - low) : Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

/** The time of day, with seconds only where labels are close. */
function clockLabels(_, splits) {
  const step = splits.length > 1 ? splits[1] - splits[0] : 60;
  const parts = step < 60 ? { hour: "2-digit", minute: "2-digit", second: "2-digit" } : { hour: "2-digit", minute: "2-digit" };
  return splits.map((time) => new Date(time * 1000).toLocaleTimeString([], { ...parts, hour12: false }));
}
