// The figures of the charts: what the node has kept, what has come since, and the rates of both. No DOM: tested with `node --test`.

/** Most rows that a page keeps: an hour of seconds and all that the node had. */
export const MOST_ROWS = 5000;
/** Rates are means over so many seconds, or over four steps where these take longer: a rate per second would alternate
 * between nothing and much. At most the last. */
const RATE_S = 10;
const RATE_STEPS = 4;
const MOST_RATE_S = 300;
/** What only rises, and the column of its rate. */
const RATES = [
  ["samples", "samples_per_second"],
  ["bytes_sent", "sent_bytes_per_second"],
  ["bytes_received", "received_bytes_per_second"],
];
const PHASES = ["train", "push", "wait", "pull"];
/** A longer gap, in seconds, is none of a slow line. */
const MOST_GAP_S = 60;

/** Columns of equal length over rising times, as uPlot takes them. */
export class Series {
  /** @type {number[]} seconds since 1970 */
  times = [];
  /** @type {Map<string, (number | null)[]>} */
  #columns = new Map();

  /** Replace everything by an answer of `/history`. @param {{ times: number[], series: Record<string, (number | null)[]> }} answer */
  set(answer) {
    this.times = [];
    this.#columns = new Map();
    const columns = Object.entries(answer.series);
    answer.times.forEach((time, place) => this.append(time, Object.fromEntries(columns.map(([name, values]) => [name, values[place]]))));
  }

  /**
   * Append one row, with its rates and shares. A column that is new has no values before; one that is missing has none now.
   * @param {number} time @param {Record<string, number | null>} row
   */
  append(time, row) {
    if (this.times.length && time <= this.times[this.times.length - 1]) return;
    row = { ...row, ...this.#derived(time, row) };
    for (const name of Object.keys(row)) {
      if (!this.#columns.has(name)) this.#columns.set(name, this.times.map(() => null));
    }
    this.times.push(time);
    for (const [name, values] of this.#columns) values.push(row[name] ?? null);
    if (this.times.length > MOST_ROWS) {
      const surplus = this.times.length - MOST_ROWS;
      this.times.splice(0, surplus);
      for (const values of this.#columns.values()) values.splice(0, surplus);
    }
  }

  /**
   * Rates since the row of some seconds before, and how the time of the steps divides since then; none at the first row,
   * nor after a counter has fallen, as where the exchange begins anew.
   * @param {number} time @param {Record<string, number | null>} row
   */
  #derived(time, row) {
    /** @type {Record<string, number>} */
    const found = {};
    const span = Math.min(Math.max(RATE_S, RATE_STEPS * (row.step_seconds ?? 0)), MOST_RATE_S);
    let first = this.times.length - 1;
    while (first > 0 && time - this.times[first - 1] <= span) first -= 1;
    const risen = (/** @type {string} */ name) => {
      const before = this.#columns.get(name)?.[first] ?? null;
      const now = row[name] ?? null;
      return before === null || now === null || now < before ? null : now - before;
    };
    for (const [counter, rate] of RATES) {
      const more = risen(counter);
      if (more !== null) found[rate] = more / (time - this.times[first]);
    }
    const spent = PHASES.map((phase) => risen(`${phase}_seconds`) ?? 0);
    const total = spent.reduce((sum, seconds) => sum + seconds, 0);
    if (total > 0) PHASES.forEach((phase, place) => (found[`${phase}_share`] = spent[place] / total));
    return found;
  }

  /** Whether a row of this time leaves a gap that only a clock that was set, or a long sleep, makes. @param {number} time */
  jumps(time) {
    const last = this.times[this.times.length - 1];
    return last !== undefined && Math.abs(time - last) > MOST_GAP_S;
  }

  /** Names of the columns that begin so. @param {string} [prefix] */
  names(prefix = "") {
    return [...this.#columns.keys()].filter((name) => name.startsWith(prefix));
  }

  /** Whether a column has a value. @param {string} name */
  has(name) {
    return (this.#columns.get(name) ?? []).some((value) => value !== null);
  }

  /**
   * The rows of the last `seconds`: the times, and a column for each name.
   * @param {string[]} names @param {number} seconds
   * @returns {[number[], ...(number | null)[][]]}
   */
  last(names, seconds) {
    const end = this.times.length ? this.times[this.times.length - 1] : 0;
    let first = this.times.findIndex((time) => time >= end - seconds);
    if (first < 0) first = 0;
    const times = this.times.slice(first);
    return [times, ...names.map((name) => this.#columns.get(name)?.slice(first) ?? times.map(() => null))];
  }

  /** The value of a column about `seconds` before the end, or null. @param {string} name @param {number} seconds */
  before(name, seconds) {
    const values = this.#columns.get(name);
    if (!values || !this.times.length) return null;
    const wanted = this.times[this.times.length - 1] - seconds;
    for (let place = this.times.length - 1; place >= 0; place -= 1) {
      if (this.times[place] <= wanted) {
        // A row of hours ago says nothing about a minute ago.
        return wanted - this.times[place] <= seconds ? values[place] : null;
      }
    }
    return null;
  }

  /** The newest value of a column, or null. @param {string} name */
  newest(name) {
    return this.#columns.get(name)?.findLast((value) => value !== null) ?? null;
  }
}

/**
 * Columns summed up from the first, for areas on top of each other; a row without any value is a gap.
 * @param {(number | null)[][]} columns
 */
export function stacked(columns) {
  const sums = columns.map((column) => column.slice());
  for (let row = 0; row < (columns[0]?.length ?? 0); row += 1) {
    let total = 0;
    const empty = columns.every((column) => column[row] === null);
    for (let index = 0; index < columns.length; index += 1) {
      total += columns[index][row] ?? 0;
      sums[index][row] = empty ? null : total;
    }
  }
  return sums;
}
