// Small helpers for elements. Text only ever enters as text: a name that a peer has chosen can never become markup.

import { stateOf } from "./words.js";

/**
 * An element with attributes and children; `class` and `text` as attributes, null leaves one out.
 * @param {string} tag
 * @param {Record<string, string | number | boolean | null | undefined>} [attributes]
 * @param {(Node | string)[]} [children]
 */
export function element(tag, attributes = {}, children = []) {
  const made = document.createElement(tag);
  assign(made, attributes);
  made.append(...children);
  return made;
}

/** The same in SVG. @param {string} tag @param {Record<string, any>} [attributes] @param {(Node | string)[]} [children] */
export function svg(tag, attributes = {}, children = []) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  assign(made, attributes);
  made.append(...children);
  return made;
}

function assign(made, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") made.textContent = String(value);
    else made.setAttribute(name, String(value));
  }
}

/** @param {string} id @returns {any} */
export function byId(id) {
  return document.getElementById(id);
}

/** Set the text of an element, without touching what is the same: a selection stays. */
export function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

/** A state as shape, colour and word. @param {import("./words.js").Tone} tone @param {string} word */
export function badge(tone, word) {
  return element("span", { class: `badge ${tone}`, text: word });
}

/** The state of a node in a table. @param {string} state */
export function stateBadge(state) {
  const { tone, word, brief } = stateOf(state);
  return badge(tone, brief ?? word);
}

/**
 * Rows of a list of definitions. A value is text, or an element.
 * @param {Element} list @param {[string, string | Node, string?][]} rows name, value and, where there is one, a note
 */
export function definitions(list, rows) {
  rows.forEach(([name, value, note], place) => {
    const made = element("div", {}, [
      element("dt", { text: name }),
      element("dd", {}, [value, ...(note ? [element("small", { text: note })] : [])]),
    ]);
    // A row that is the same stays: who has selected a path keeps the selection.
    const shown = list.children[place];
    if (!shown) list.append(made);
    else if (!shown.isEqualNode(made)) shown.replaceWith(made);
  });
  while (list.children.length > rows.length) list.lastElementChild?.remove();
}
