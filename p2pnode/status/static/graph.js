// A small graph: every node on a circle, and an arrow from each that waits to the one it waits for.

import { count, shortId } from "./format.js";
import { element, setText, svg } from "./dom.js";
import { circle } from "./steps.js";
import { stateOf } from "./words.js";

const MARGIN = { x: 96, y: 56 };
const BARE_MARGIN = { x: 24, y: 24 };
const MOST_RADIUS = 150;
/** More names than this would lie on each other. */
const NAMED = 16;
/** Most nodes that are drawn. */
const DRAWN = 60;

/** @typedef {{ id: string, self: boolean, step: number, state: string }} GraphNode */

/** @param {HTMLElement} place @param {GraphNode[]} all furthest ahead first @param {import("./steps.js").Wait[]} edges */
export function graph(place, all, edges) {
  const ends = new Set(edges.flatMap(({ from, to }) => [from, to]));
  const first = all.filter((node) => node.self || ends.has(node.id) || node.state === "dead");
  const shown = [...first, ...all.filter((node) => !first.includes(node))].slice(0, DRAWN);
  const named = shown.length <= NAMED;
  const waiting = new Set(edges.map(({ from }) => from));
  const width = Math.max(280, place.clientWidth - 34);
  const margin = named ? MARGIN : BARE_MARGIN;
  const radius = Math.min(MOST_RADIUS, width / 2 - margin.x);
  const height = 2 * (radius + margin.y);
  const made = JSON.stringify([width, shown.map(({ id, step, state }) => [id, step, state]), edges]);
  if (place.dataset.made === made) return;
  place.dataset.made = made;
  const at = circle(shown.map(({ id }) => id), shown.length === 1 ? 0 : radius);
  // Neighbours on the circle do not touch.
  const size = Math.min(14, Math.max(3, (2.4 * radius) / shown.length));
  const parts = edges
    .filter(({ from, to }) => at.has(from) && at.has(to))
    .map(({ from, to, known }) => arrow(at.get(from), at.get(to), size, known));
  for (const node of shown) parts.push(drawn(node, at.get(node.id), size, named, waiting.has(node.id)));
  const picture = svg("svg", { width, height, viewBox: `${-width / 2} ${-height / 2} ${width} ${height}`, role: "img", "aria-label": spoken(edges) }, [
    svg("defs", {}, [
      svg("marker", { id: "tip", viewBox: "0 0 10 10", refX: 9, refY: 5, markerWidth: 7, markerHeight: 7, orient: "auto-start-reverse" }, [
        svg("path", { d: "M0 0 10 5 0 10Z", class: "tip" }),
      ]),
    ]),
    ...(shown.length > 2 ? [svg("circle", { class: "ring", r: radius })] : []),
    ...parts,
  ]);
  const words = element("figcaption", {}, [element("p")]);
  setText(words.firstElementChild, spoken(edges));
  place.replaceChildren(words, picture);
}

/** The arrows as a sentence. */
function spoken(edges) {
  if (!edges.length) return "No one waits.";
  const said = edges.slice(0, 4).map(({ from, to, known }) => `${shortId(from)} waits for ${shortId(to)}${known ? "" : " (concluded)"}`);
  const more = edges.length > 4 ? `, and ${edges.length - 4} more` : "";
  return `${said.join(", ")}${more}.`;
}

function arrow(from, to, size, known) {
  const length = Math.hypot(to.x - from.x, to.y - from.y) || 1;
  const unit = { x: (to.x - from.x) / length, y: (to.y - from.y) / length };
  return svg("line", {
    class: known ? "wait" : "wait concluded",
    x1: from.x + unit.x * (size + 3),
    y1: from.y + unit.y * (size + 3),
    x2: to.x - unit.x * (size + 6),
    y2: to.y - unit.y * (size + 6),
    "marker-end": "url(#tip)",
  });
}

function drawn(node, place, size, named, waits) {
  const { tone, word } = waits ? stateOf("waiting") : stateOf(node.state);
  const parts = [svg("title", { text: `${node.id}: ${word}, step ${count(node.step)}` }), shape(tone, size)];
  if (node.self) parts.push(svg("circle", { class: "self", r: size + 5 }));
  if (named) {
    const down = place.y >= -1;
    const side = Math.abs(place.x) < 40 ? "middle" : place.x > 0 ? "start" : "end";
    const x = side === "middle" ? 0 : Math.sign(place.x) * (size + 9);
    const y = side === "middle" ? (down ? size + 20 : -size - 22) : -2;
    parts.push(svg("text", { x, y, "text-anchor": side, class: "name", text: node.self ? "this node" : shortId(node.id) }));
    parts.push(svg("text", { x, y: y + 14, "text-anchor": side, text: `step ${count(node.step)}` }));
  }
  return svg("g", { transform: `translate(${place.x.toFixed(1)} ${place.y.toFixed(1)})`, class: `node ${tone}` }, parts);
}

/** The same shapes as in the words: a disc is well, a triangle waits, a square is an error, a ring is neither. */
function shape(tone, size) {
  if (tone === "warn") return svg("path", { d: `M0 ${-size} L${size} ${size * 0.85} H${-size}Z` });
  if (tone === "bad") return svg("rect", { x: -size * 0.85, y: -size * 0.85, width: size * 1.7, height: size * 1.7, rx: 2 });
  return svg("circle", { r: size * (tone === "idle" ? 0.85 : 1) });
}
