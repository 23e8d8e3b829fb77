// The connection to the node: its history once, then its stream. Says when the node is gone, and comes back by itself.

import { Parser, backoff } from "./sse.js";

/** A stream that is silent for this long, in milliseconds, has died without an end: the node sends once a second. */
const SILENCE_MS = 6000;

/**
 * `connecting`, `live`, `lost` (with the time of the next attempt), `token` (one is asked for), `refused` (with the
 * node's reason) or `ended` (the node said that it ends).
 * @typedef {{ state: string, reason: string, retryAt: number, since: number }} LinkState
 */

export class Link {
  /** @type {AbortController | null} */
  #abort = null;
  #timer = 0;
  #silence = 0;
  #failures = 0;
  #lastEvent = 0;
  #stopped = true;
  #ended = false;

  /**
   * @param {object} listeners
   * @param {(history: any) => void} listeners.onHistory
   * @param {(update: any) => void} listeners.onUpdate
   * @param {(events: any) => void} listeners.onEvents
   * @param {(state: LinkState) => void} listeners.onState
   * @param {() => string} listeners.token the token that is known, or ""
   */
  constructor({ onHistory, onUpdate, onEvents, onState, token }) {
    this.onHistory = onHistory;
    this.onUpdate = onUpdate;
    this.onEvents = onEvents;
    this.onState = onState;
    this.token = token;
    /** @type {LinkState} */
    this.state = { state: "connecting", reason: "", retryAt: 0, since: Date.now() };
  }

  /** Whether `stop` was called last. */
  get isStopped() {
    return this.#stopped;
  }

  /** Connect now, also while the next attempt is waited for. */
  start() {
    this.stop();
    this.#stopped = false;
    this.#connect();
  }

  /** Close the stream; nothing is asked until `start`. */
  stop() {
    this.#stopped = true;
    this.#abort?.abort();
    clearTimeout(this.#timer);
    clearTimeout(this.#silence);
  }

  /** @param {string} state @param {string} [reason] @param {number} [retryAt] */
  #set(state, reason = "", retryAt = 0) {
    const since = state === this.state.state ? this.state.since : Date.now();
    this.state = { state, reason, retryAt, since };
    this.onState(this.state);
  }

  async #connect() {
    const abort = (this.#abort = new AbortController());
    if (this.state.state !== "lost") this.#set("connecting");
    try {
      this.#watchSilence(abort);
      const history = await this.#get("/history", abort);
      if (!history) return;
      this.onHistory(JSON.parse(await this.#whole(history, abort)));
      const stream = await this.#get(this.#lastEvent ? `/stream?since=${this.#lastEvent}` : "/stream", abort);
      if (!stream?.body) return;
      this.#failures = 0;
      this.#ended = false;
      await this.#read(stream.body, abort);
      this.#lost(this.#ended ? "" : "the stream ended");
    } catch (error) {
      if (abort !== this.#abort || this.#stopped) return; // closed by this page
      this.#lost(abort.signal.aborted ? "it has sent nothing for some seconds" : "it does not answer");
    }
  }

  /** A response, or null where the node refuses; then the state says why. */
  async #get(path, abort) {
    const token = this.token();
    const headers = token ? { Authorization: `Bearer ${token}` } : {};
    const response = await fetch(path, { headers, signal: abort.signal, cache: "no-store", credentials: "omit" });
    if (response.ok) return response;
    clearTimeout(this.#silence);
    const answer = await response.json().catch(() => ({}));
    const reason = answer.error ?? `it answers ${response.status}`;
    if (response.status === 401) {
      this.#set("token", token ? reason : "");
      return null;
    }
    this.#lost(reason);
    return null;
  }

  /** The text of a response. Each piece counts as a sign of life: a slow line is no silence. */
  async #whole(response, abort) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return text;
      this.#watchSilence(abort);
      text += value;
    }
  }

  /** @param {ReadableStream<Uint8Array>} body */
  async #read(body, abort) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    const parser = new Parser();
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      this.#watchSilence(abort);
      for (const message of parser.feed(value)) this.#take(message);
    }
  }

  /** @param {import("./sse.js").Message} message */
  #take({ event, data }) {
    if (event === "end") {
      this.#ended = true;
      return;
    }
    const content = JSON.parse(data);
    if (event === "events") {
      this.#lastEvent = content.last;
      this.onEvents(content);
    }
    if (event === "update") {
      if (this.state.state !== "live") this.#set("live");
      this.onUpdate(content);
    }
  }

  #watchSilence(abort) {
    clearTimeout(this.#silence);
    this.#silence = setTimeout(() => abort.abort(), SILENCE_MS);
  }

  /** @param {string} reason */
  #lost(reason) {
    clearTimeout(this.#silence);
    if (this.#stopped) return;
    this.#failures += 1;
    const seconds = backoff(this.#failures, Math.random());
    this.#set(this.#ended ? "ended" : "lost", reason, Date.now() + 1000 * seconds);
    this.#timer = setTimeout(() => this.#connect(), 1000 * seconds);
  }
}
