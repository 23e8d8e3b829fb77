// What both pages share: the connection, its notice, the token, the buttons.

import { linkWords, stateOf } from "./words.js";
import { Link } from "./link.js";
import { Series } from "./series.js";
import { byId, setText } from "./dom.js";
import * as actions from "./actions.js";
import * as token from "./token.js";

/** A hidden tab closes its stream after this long: a browser opens only six connections to one node. */
const HIDDEN_MS = 15000;

/**
 * Connect, and keep the page up to date.
 * @param {object} page
 * @param {(update: any, series: Series) => void} page.draw called for every update, and with the last one after a change
 * @param {(events: any[]) => void} [page.onEvents]
 * @param {() => void} [page.onRestart] the node was started again
 */
export function run({ draw, onEvents = () => {}, onRestart = () => {} }) {
  token.takeFromAddress();
  const series = new Series();
  /** @type {any} */
  let update = null;
  let problem = "";
  let asking = false;

  const link = new Link({
    token: token.known,
    onHistory: (history) => series.set(history),
    onEvents: (answer) => onEvents(answer.events),
    onState: show,
    onUpdate: (next) => {
      if (update && update.status.node.incarnation !== next.status.node.incarnation) onRestart();
      update = next;
      if (Object.keys(next.sample).length) {
        // The node keeps its rows by a clock that is never set: it knows where they lie now.
        if (series.jumps(next.time)) link.start();
        else series.append(next.time, next.sample);
      }
      if (!document.hidden) redraw();
    },
  });

  function redraw() {
    if (!update) return;
    const { status } = update;
    const live = link.state.state === "live";
    const { word, tone } = live ? stateOf(status.state) : { word: "no connection", tone: "bad" };
    const state = byId("state");
    setText(state, link.state.state === "ended" ? "ended" : word);
    state.className = `state ${link.state.state === "ended" ? "idle" : tone}`;
    document.body.classList.toggle("stale", !live);
    actions.offer(status.state, live);
    draw(update, series);
    showNotice();
  }

  function showNotice() {
    const words = problem ? { tone: "bad", text: problem } : linkWords(link.state, Date.now());
    const notice = byId("notice");
    notice.hidden = !words;
    if (!words) return;
    notice.className = `notice ${words.tone}`;
    if (notice.firstChild?.textContent !== words.text) {
      const text = document.createElement("span");
      text.textContent = words.text;
      const now = document.createElement("button");
      now.type = "button";
      now.textContent = link.state.state === "token" ? "Enter the token" : "Try now";
      now.onclick = () => (link.state.state === "token" ? login() : link.start());
      notice.replaceChildren(text, ...(problem ? [] : [now]));
    }
  }

  async function login() {
    if (asking) return;
    asking = true;
    const why = link.state.reason ? `The node refused the last one: ${link.state.reason}.` : "This node shows itself only to those who have it.";
    const given = await actions.askToken(why);
    asking = false;
    if (given) link.start();
  }

  function show({ state }) {
    if (state === "token") {
      setText(byId("state"), "locked");
      byId("state").className = "state warn";
      token.forget();
      login();
    }
    redraw();
    showNotice();
  }

  actions.wire((text) => {
    problem = text;
    showNotice();
  });
  setInterval(() => {
    if (link.state.state !== "live") showNotice();
  }, 1000);
  let hiddenTimer = 0;
  document.addEventListener("visibilitychange", () => {
    clearTimeout(hiddenTimer);
    if (document.hidden) {
      hiddenTimer = setTimeout(() => link.stop(), HIDDEN_MS);
    } else if (link.isStopped) {
      link.start();
    } else {
      redraw();
    }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => dispatchEvent(new Event("restyle")));
  addEventListener("restyle", redraw);
  addEventListener("resize", redraw);
  link.start();
  return { link, series };
}
