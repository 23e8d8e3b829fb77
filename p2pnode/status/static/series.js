// The figures of the charts: what the node has kept, and what has come since. No DOM: tested with `node --test`.

/** Most rows that a page keeps: an hour of seconds and all that the node had. */
export const MOST_ROWS = 5000;
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
    this.times = [...answer.times];
    this.#columns = new Map(Object.entries(answer.series).map(([name, values]) => [name, [...values]]));
  }

  /**
   * Append one row. A column that is new has no values before; one that is missing has none now.
   * @param {number} time @param {Record<string, number | null>} row
   */
  append(time, row) {
    if (this.times.length && time <= this.times[this.times.length - 1]) return;
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
