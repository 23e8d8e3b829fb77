// The events of the node, newest first, with filters.

import { clock } from "./format.js";
import { badge, byId, setText } from "./dom.js";
import { Table } from "./table.js";

/** Most events that the page keeps, and shows. */
const KEPT = 1000;
const SHOWN = 150;
const LEVELS = { debug: 0, info: 1, warning: 2, error: 3 };
const TONES = { debug: "idle", info: "idle", warning: "warn", error: "bad" };

/** Fields as `name value`, ids cut to what people compare. @param {Record<string, any>} fields */
export function fieldsText(fields) {
  return Object.entries(fields)
    .map(([name, value]) => `${name} ${text(value)}`)
    .join("  ·  ");
}

function text(value) {
  if (typeof value === "string") return /^[0-9a-f]{40}$/.test(value) ? value.slice(0, 8) : value;
  if (typeof value === "number") return String(Number.isInteger(value) ? value : Number(value.toPrecision(4)));
  return JSON.stringify(value);
}

/** Whether an event passes the filters. */
export function passes(event, least, wanted) {
  if ((LEVELS[event.level] ?? 1) < (LEVELS[least] ?? 0)) return false;
  if (!wanted) return true;
  return `${event.event} ${fieldsText(event.fields)} ${JSON.stringify(event.fields)}`.toLowerCase().includes(wanted.toLowerCase());
}

export class EventList {
  /** @type {any[]} newest first */
  #events = [];

  constructor() {
    this.table = new Table(byId("events"), {
      caption: "Events of this node, newest first",
      key: (event) => String(event.id),
      empty: "No events, or none that pass the filters.",
      columns: [
        { title: "Time", value: (event) => clock(event.time) },
        { title: "Level", value: (event) => badge(TONES[event.level] ?? "idle", event.level) },
        { title: "Event", kind: "event", value: (event) => event.event.replaceAll("_", " ") },
        { title: "What", kind: "fields", value: (event) => fieldsText(event.fields) },
      ],
    });
    byId("filters").onsubmit = (/** @type {Event} */ event) => event.preventDefault();
    byId("level").onchange = () => this.show();
    byId("search").oninput = () => this.show();
  }

  /** @param {any[]} events oldest first */
  add(events) {
    this.#events = [...events.reverse(), ...this.#events].slice(0, KEPT);
    this.show();
  }

  clear() {
    this.#events = [];
    this.show();
  }

  show() {
    const found = this.#events.filter((event) => passes(event, byId("level").value, byId("search").value.trim()));
    const cut = found.length > SHOWN ? `newest ${SHOWN} of ${found.length}` : String(found.length);
    setText(byId("events-amount"), cut);
    this.table.show(found.slice(0, SHOWN));
  }
}
