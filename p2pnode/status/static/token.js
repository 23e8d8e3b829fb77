// The node's token: kept in this tab alone, sent in a header alone. `p2pnode dashboard` hands it over in the part of the
// address after "#", which no request contains; it is removed from the address at once.

const KEY = "p2pnode-token";

/** Take the token out of the address, if it is there. */
export function takeFromAddress() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    remember(given);
    history.replaceState(null, "", location.pathname + location.search);
  }
}

/** The token of this tab, or "". @returns {string} */
export function known() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage is switched off
  }
}

/** @param {string} token */
export function remember(token) {
  try {
    sessionStorage.setItem(KEY, token.trim());
  } catch {
    // Without storage the next reload asks again.
  }
}

export function forget() {
  try {
    sessionStorage.removeItem(KEY);
  } catch {
    // Nothing was stored.
  }
}

/** Whether what this page sends can be read on the way. */
export function isExposed() {
  const near = ["localhost", "[::1]"].includes(location.hostname) || location.hostname.startsWith("127.");
  return location.protocol === "http:" && !near;
}
