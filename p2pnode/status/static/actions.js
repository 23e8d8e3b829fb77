// What the page can ask of the node: pause, resume, leave. Each asks back first, and each needs the token.

import { byId } from "./dom.js";
import * as token from "./token.js";

/** Show a dialog; resolves to true with its confirming button. */
export function confirmed({ title, text, yes, danger = false }) {
  const dialog = byId("confirm");
  byId("confirm-title").textContent = title;
  byId("confirm-text").textContent = text;
  const button = byId("confirm-yes");
  button.textContent = yes;
  button.className = danger ? "danger" : "primary";
  return new Promise((resolve) => {
    const end = (/** @type {boolean} */ answer) => {
      dialog.removeEventListener("cancel", refuse);
      byId("confirm-no").onclick = button.onclick = null;
      dialog.close();
      resolve(answer);
    };
    const refuse = () => end(false);
    dialog.addEventListener("cancel", refuse);
    byId("confirm-no").onclick = refuse;
    button.onclick = () => end(true);
    dialog.showModal();
    // The harmless answer has the focus: Enter alone ends nothing.
    (danger ? byId("confirm-no") : button).focus();
  });
}

/** Ask for the token; resolves to whether one was given. @param {string} why */
export function askToken(why) {
  const dialog = byId("token");
  const input = byId("token-input");
  byId("token-why").textContent = why;
  byId("token-exposed").hidden = !token.isExposed();
  input.value = "";
  return new Promise((resolve) => {
    const end = (/** @type {boolean} */ given) => {
      byId("token-form").onsubmit = byId("token-no").onclick = dialog.oncancel = null;
      if (dialog.open) dialog.close();
      resolve(given);
    };
    byId("token-form").onsubmit = (/** @type {Event} */ event) => {
      event.preventDefault();
      token.remember(input.value);
      end(true);
    };
    byId("token-no").onclick = () => end(false);
    dialog.oncancel = () => end(false);
    if (!dialog.open) dialog.showModal();
    input.focus();
  });
}

/**
 * Send a change to the node. Asks for the token where it is missing or wrong.
 * @param {"/pause" | "/resume" | "/leave"} path
 * @returns {Promise<string>} what went wrong, or ""
 */
export async function request(path) {
  let why = token.known() ? "" : "Changes to the node need its token.";
  for (;;) {
    if (why && !(await askToken(why))) return "";
    let response;
    try {
      const headers = { Authorization: `Bearer ${token.known()}`, "X-P2PNode": "1" };
      response = await fetch(path, { method: "POST", headers, cache: "no-store", credentials: "omit" });
    } catch {
      return "The node does not answer.";
    }
    if (response.ok) return "";
    const answer = await response.json().catch(() => ({}));
    if (response.status !== 401) return `The node refused: ${answer.error ?? response.status}.`;
    token.forget();
    why = `The node refused the token: ${answer.error}.`;
  }
}

const QUESTIONS = {
  "/pause": {
    title: "Pause training?",
    text: "The node stops after its current step. It continues to own its shards, and others do not wait for it.",
    yes: "Pause",
  },
  "/resume": { title: "Resume training?", text: "The node takes the shared model and trains again.", yes: "Resume" },
  "/leave": {
    title: "Leave the swarm?",
    text: "The node hands its shards over, says goodbye to its peers and ends. This page ends with it.",
    yes: "Leave",
    danger: true,
  },
};

/** Wire the buttons. @param {(problem: string) => void} report shows what went wrong */
export function wire(report) {
  const act = async (/** @type {keyof QUESTIONS} */ path) => {
    if (await confirmed(QUESTIONS[path])) report(await request(path));
  };
  byId("pause").onclick = () => act(byId("pause").dataset.paused ? "/resume" : "/pause");
  byId("leave").onclick = () => act("/leave");
}

/** Show what can be asked in this state. @param {string} state @param {boolean} live */
export function offer(state, live) {
  const pause = byId("pause");
  const paused = state === "paused";
  pause.textContent = paused ? "Resume" : "Pause";
  if (paused) pause.dataset.paused = "1";
  else delete pause.dataset.paused;
  pause.disabled = !live || !["training", "waiting", "paused", "waiting_for_nodes", "stalled", "joining"].includes(state);
  byId("leave").disabled = !live || ["leaving", "failed"].includes(state);
}
