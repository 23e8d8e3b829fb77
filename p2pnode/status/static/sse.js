// Reads a stream of server-sent events (HTML standard, section 9.2). `EventSource` cannot send a token in a header, so
// the page reads the stream with `fetch`. No DOM: tested with `node --test`.

/** @typedef {{ event: string, data: string }} Message */

/** Turns text, in pieces of any size, into messages. */
export class Parser {
  #rest = "";
  #event = "";
  /** @type {string[]} */
  #data = [];

  /**
   * @param {string} text the next piece
   * @returns {Message[]} the messages that it completes
   */
  feed(text) {
    const lines = (this.#rest + text).split(/\r\n|\n|\r(?!$)/);
    this.#rest = lines.pop() ?? "";
    const messages = [];
    for (const line of lines) {
      if (line === "") {
        if (this.#data.length) messages.push({ event: this.#event || "message", data: this.#data.join("\n") });
        this.#event = "";
        this.#data = [];
      } else {
        this.#field(line);
      }
    }
    return messages;
  }

  /** @param {string} line */
  #field(line) {
    const colon = line.indexOf(":");
    if (colon === 0) return; // a comment
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.#event = value;
    if (name === "data") this.#data.push(value);
  }
}

/**
 * Seconds to wait before the next attempt: 1, 2, 4, 8, then 15, each shortened by up to a quarter at random, so that
 * many pages do not come back at the same moment.
 * @param {number} failures attempts that have failed
 * @param {number} random from 0 to 1
 */
export function backoff(failures, random) {
  const full = Math.min(15, 2 ** Math.max(0, failures - 1));
  return full * (1 - random / 4);
}
