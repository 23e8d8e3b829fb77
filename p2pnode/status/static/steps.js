// The steps of the peers as a distribution, and who waits for whom. No DOM: tested with `node --test`.

/**
 * @typedef {{ low: number, high: number, amount: number }} Bin steps `low` to `high`, both included
 */

/**
 * Bins of equal width over all steps, at most `most` of them.
 * @param {number[]} steps @param {number} [most]
 * @returns {Bin[]}
 */
export function bins(steps, most = 24) {
  if (!steps.length) return [];
  const low = Math.min(...steps);
  const high = Math.max(...steps);
  const width = Math.max(1, Math.ceil((high - low + 1) / most));
  const amount = Math.floor((high - low) / width) + 1;
  const found = Array.from({ length: amount }, (_, place) => ({
    low: low + place * width,
    high: low + (place + 1) * width - 1,
    amount: 0,
  }));
  for (const step of steps) found[Math.floor((step - low) / width)].amount += 1;
  return found;
}

/** The middle of some numbers. @param {number[]} values */
export function median(values) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted.length ? sorted[Math.floor(sorted.length / 2)] : null;
}

/**
 * @typedef {{ id: string, step: number, state: string, progress: number, stepSeconds: number }} Member
 * @typedef {{ from: string, to: string, known: boolean }} Wait `known`: the node itself says so; otherwise its step and
 * the rule of the barrier suggest it
 */

/**
 * Who waits for whom. This node's own wait is known. Of another, its messages carry the step alone: where the rule looks
 * at all workers (a bound on staleness), one that is too far ahead and has not moved for longer than its steps take
 * waits for the slowest.
 * @param {Member[]} members all nodes, this one included
 * @param {{ self: string, waiting: { slowest: string } | null, staleness: number | null, samples: boolean }} facts
 * @returns {Wait[]}
 */
export function waits(members, { self, waiting, staleness, samples }) {
  const found = [];
  if (waiting && members.some((member) => member.id === waiting.slowest)) {
    found.push({ from: self, to: waiting.slowest, known: true });
  }
  if (staleness === null || samples) return found;
  const workers = members.filter((member) => ["training", "waiting", "suspect"].includes(member.state));
  for (const member of workers) {
    if (member.id === self || member.progress <= 1.5 * member.stepSeconds) continue;
    const slower = workers.filter((other) => other.step < member.step - staleness);
    if (!slower.length) continue;
    const slowest = slower.reduce((least, other) => (other.step < least.step ? other : least));
    found.push({ from: member.id, to: slowest.id, known: false });
  }
  return found;
}

/**
 * Samples per second of all that train: of each its last step's samples over its usual step time.
 * @param {{ state: string, samples: number, step_seconds: number }[]} peers
 */
export function samplesPerSecond(peers) {
  const working = peers.filter((peer) => ["training", "waiting", "suspect"].includes(peer.state) && peer.step_seconds > 0);
  return working.reduce((sum, peer) => sum + peer.samples / peer.step_seconds, 0);
}

/**
 * Places on a circle, from the top clockwise, in the order of the ids: a node keeps its place while others come and go.
 * @param {string[]} ids @param {number} radius
 * @returns {Map<string, { x: number, y: number }>} around 0, 0
 */
export function circle(ids, radius) {
  const ordered = [...ids].sort();
  return new Map(
    ordered.map((id, place) => {
      const angle = (2 * Math.PI * place) / ordered.length - Math.PI / 2;
      return [id, { x: radius * Math.cos(angle), y: radius * Math.sin(angle) }];
    }),
  );
}
