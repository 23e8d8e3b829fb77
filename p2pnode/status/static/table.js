// A table whose rows are kept while their numbers change: focus, selection and the screen reader's place stay.

import { element } from "./dom.js";

/**
 * @typedef {object} Column
 * @property {string} title
 * @property {(row: any) => string | Node} value
 * @property {string} [kind] `number` is set right, `id` in fixed width, `wide` left out on a phone
 * @property {string} [hint] what the title means
 */

export class Table {
  /** @type {Map<string, HTMLTableRowElement>} */
  #rows = new Map();

  /**
   * @param {HTMLElement} place where it stands
   * @param {object} options
   * @param {string} options.caption for those who do not see it
   * @param {Column[]} options.columns
   * @param {(row: any) => string} options.key
   * @param {string} options.empty shown while there are no rows
   */
  constructor(place, { caption, columns, key, empty }) {
    this.columns = columns;
    this.key = key;
    this.body = element("tbody");
    const heads = columns.map(({ title, kind, hint }) =>
      element("th", { scope: "col", class: kind, title: hint, text: title }),
    );
    // The roles stay where a narrow page lays the rows out as blocks.
    this.table = element("table", { role: "table" }, [
      element("caption", { class: "hidden", text: caption }),
      element("thead", {}, [element("tr", {}, heads)]),
      this.body,
    ]);
    this.empty = element("p", { class: "empty", text: empty });
    place.replaceChildren(this.table, this.empty);
  }

  /** Show these rows in this order. @param {any[]} rows */
  show(rows) {
    this.table.hidden = rows.length === 0;
    this.empty.hidden = rows.length > 0;
    const kept = new Map();
    let place = this.body.firstElementChild;
    for (const row of rows) {
      const key = this.key(row);
      const shown = this.#rows.get(key) ?? this.#made();
      this.#fill(shown, row);
      if (shown === place) place = place.nextElementSibling;
      else this.body.insertBefore(shown, place);
      kept.set(key, shown);
    }
    for (const [key, shown] of this.#rows) if (!kept.has(key)) shown.remove();
    this.#rows = kept;
  }

  #made() {
    return element("tr", { role: "row" }, this.columns.map(({ kind }) => element("td", { role: "cell", class: kind })));
  }

  #fill(shown, row) {
    this.columns.forEach(({ value }, index) => {
      const content = value(row);
      const cell = shown.children[index];
      if (typeof content === "string") {
        if (cell.textContent !== content) cell.textContent = content;
      } else if (!cell.firstChild?.isEqualNode(content)) {
        cell.replaceChildren(content);
      }
    });
  }
}
