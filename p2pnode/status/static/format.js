// Numbers as people read them: three digits, a unit, no more. No DOM: tested with `node --test`.

/** What stands where there is no value. */
export const NONE = "–";

/**
 * Three significant digits, without an exponent between 0.001 and 9999; "k", "M", "G" above.
 * @param {number | null | undefined} value
 * @returns {string}
 */
export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 0.001) return value.toExponential(2).replace("e-", "e−").replace(/^-/, "−");
  if (size >= 9999.5) return scaled(value, 1000, ["", " k", " M", " G", " T"]);
  return signed(Number.isInteger(value) ? value : value.toPrecision(size >= 1000 ? 4 : 3));
}

/** As short as it can be, for an axis. @param {number | null} value */
export function tick(value) {
  return number(value).replace(/(\.\d*?)0+(?=$| )/, "$1").replace(/\.(?=$| )/, "");
}

/**
 * A count in full, in groups of three: steps are compared digit by digit.
 * @param {number | null | undefined} value
 */
export function count(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return signed(Math.round(value)).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");
}

/** @param {number | null | undefined} value bytes */
export function bytes(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  return scaled(value, 1000, [" B", " kB", " MB", " GB", " TB"]);
}

/** @param {number | null | undefined} value bytes per second */
export function rate(value) {
  const text = bytes(value);
  return text === NONE ? NONE : `${text}/s`;
}

/** @param {number | null | undefined} share from 0 to 1 */
export function percent(share) {
  if (share === null || share === undefined || !Number.isFinite(share)) return NONE;
  const value = share * 100;
  return `${value > 0 && value < 1 ? "<1" : Math.round(value)} %`;
}

/**
 * A time span in its one or two largest units.
 * @param {number | null | undefined} seconds
 */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const s = Math.max(0, seconds);
  if (s < 0.0995) return `${Number((s * 1000).toPrecision(2))} ms`;
  if (s < 9.95) return `${s.toFixed(1)} s`;
  if (s < 59.5) return `${Math.round(s)} s`;
  const minutes = Math.round(s / 60);
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 24 * 60) return two(Math.floor(minutes / 60), "h", minutes % 60, "min");
  const hours = Math.round(s / 3600);
  return two(Math.floor(hours / 24), "d", hours % 24, "h");
}

/** @param {number | null | undefined} milliseconds */
export function milliseconds(milliseconds) {
  return milliseconds === null || milliseconds === undefined ? NONE : `${number(milliseconds)} ms`;
}

/** The first eight digits of a node's id. @param {string | null | undefined} id */
export function shortId(id) {
  return id ? id.slice(0, 8) : NONE;
}

/** The time of day of a moment. @param {number} time seconds since 1970 */
export function clock(time) {
  return new Date(time * 1000).toLocaleTimeString([], { hour12: false });
}

/** "1 peer", "2 peers". @param {number} amount @param {string} word @param {string} [many] */
export function plural(amount, word, many = `${word}s`) {
  return `${count(amount)} ${amount === 1 ? word : many}`;
}

function two(large, largeUnit, small, smallUnit) {
  return small ? `${large} ${largeUnit} ${small} ${smallUnit}` : `${large} ${largeUnit}`;
}

function scaled(value, base, units) {
  let size = Math.abs(value);
  let unit = 0;
  while (size >= base * 0.9995 && unit < units.length - 1) {
    size /= base;
    unit += 1;
  }
  const text = unit === 0 ? String(Math.round(size)) : size.toPrecision(3);
  return `${value < 0 ? "−" : ""}${text}${units[unit]}`;
}

function signed(value) {
  return String(value).replace(/^-/, "−");
}
