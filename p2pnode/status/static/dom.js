// Small helpers for elements. Text only ever enters as text: a name that a peer has chosen can never become markup.

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

/**
 * Rows of a list of definitions. A value is text, or an element.
 * @param {Element} list @param {[string, string | Node, string?][]} rows name, value and, where there is one, a note
 */
export function definitions(list, rows) {
  const made = rows.map(([name, value, note]) =>
    element("div", {}, [
      element("dt", { text: name }),
      element("dd", {}, [value, ...(note ? [element("small", { text: note })] : [])]),
    ]),
  );
  list.replaceChildren(...made);
}
