// A file of JSWA_DUMP_PLANS as a series of views. A plan says which pages a row gets, not what becomes of them later:
// pages that no row holds any more are "left", in the cache or free.

const FULL = 1;
const LOCAL = 4;
const LEFT = 7;
const GONE = 64; // steps without a row after which it counts as ended

/** Return {geometry, steps} of the text of a plan file. Throws an Error that says what is wrong. */
export function read(text) {
  const lines = text.split("\n").filter((line) => line.trim());
  let header;
  let steps;
  try {
    header = JSON.parse(lines[0]);
    steps = lines.slice(1).map((line) => JSON.parse(line).plan);
  } catch (error) {
    throw new Error(`This is no plan file: ${error.message}`);
  }
  if (!header?.geometry || !steps.every((plan) => Array.isArray(plan?.rows))) {
    throw new Error("This is no plan file of this version: JSWA_DUMP_PLANS=FILE writes one.");
  }
  return { geometry: header.geometry, steps };
}

/** The arena as the plans up to a step leave it. */
export class Replay {
  constructor({ geometry, steps }) {
    this.geometry = geometry;
    this.steps = steps;
    this.start();
  }

  start() {
    const { num_slabs: slabs, pages_per_slab: m } = this.geometry;
    this.at = 0;
    this.slots = new Uint8Array(slabs * m);
    this.owners = { full: new Uint16Array(slabs * m), local: new Uint16Array(slabs) };
    this.rows = new Map(); // row: {full: [], local: Map by position, launched, seen, shared}
  }

  /** Go to a step; back means anew from the first. */
  go(to) {
    if (to < this.at) this.start();
    while (this.at < to) this.apply(this.steps[this.at++]);
  }

  apply(plan) {
    const beginning = new Set(plan.table_rows.map((row) => row.row_id));
    for (const [row, start] of plan.rows) if (start === 0 || beginning.has(row)) this.end(row);
    for (const [row, state] of this.rows) if (this.at - state.seen > GONE) this.end(row);
    for (const [source, target, renames] of plan.moves) if (renames) this.rename(source, target);
    for (const { row_id: row, full, first_local: first, local } of plan.table_rows) {
      full.forEach((page, position) => this.take(row, "full", position, page));
      local.forEach((page, index) => this.take(row, "local", first + index, page));
      this.row(row).shared = full.length;
    }
    for (const kind of ["full", "local"]) {
      for (const [row, position, page] of plan[`${kind}_pages`]) this.take(row, kind, position, page);
    }
    for (const [row, start, count] of plan.rows) {
      const state = this.row(row);
      state.launched = (start < 0 ? state.launched : start) + count;
      state.seen = this.at;
      this.slide(state);
    }
  }

  row(row) {
    if (!this.rows.has(row)) this.rows.set(row, { full: new Map(), local: new Map(), launched: 0, seen: this.at, shared: 0, first: 0 });
    return this.rows.get(row);
  }

  take(row, kind, position, page) {
    const held = this.row(row)[kind];
    if (held.get(position) === page) return;
    if (held.has(position)) this.leave(kind, held.get(position));
    held.set(position, page);
    this.owners[kind][page] += 1;
    this.paint(kind, page, kind === "full" ? FULL : LOCAL);
  }

  leave(kind, page) {
    this.owners[kind][page] -= 1;
    if (!this.owners[kind][page]) this.paint(kind, page, LEFT);
  }

  paint(kind, page, code) {
    const m = this.geometry.pages_per_slab;
    if (kind === "full") this.slots[page] = code;
    else this.slots.fill(code, page * m, page * m + m);
  }

  rename(source, target) {
    let moved = 0;
    for (const state of this.rows.values()) {
      for (const [position, page] of state.full) if (page === source) (state.full.set(position, target), (moved += 1));
    }
    this.owners.full[target] = moved;
    this.owners.full[source] = 0;
    this.slots[target] = moved ? FULL : LEFT;
    this.slots[source] = 0;
  }

  slide(state) {
    const { window, chunked, lookback, page_size: page } = this.geometry;
    if (!window) return;
    const at = state.launched;
    const oldest = chunked ? (Math.floor(at / window) - lookback) * window : at - (window - 1);
    state.first = Math.floor(Math.max(0, oldest) / page);
    for (const [position, id] of state.local) {
      if (position < state.first) {
        state.local.delete(position);
        this.leave("local", id);
      }
    }
  }

  end(row) {
    const state = this.rows.get(row);
    if (!state) return;
    for (const kind of ["full", "local"]) for (const page of state[kind].values()) this.leave(kind, page);
    this.rows.delete(row);
  }

  /** Return the rows as /live's stream has them. */
  list() {
    return [...this.rows].sort((a, b) => a[0] - b[0]).map(([row, { launched, shared, first, local, full }]) =>
      [row, launched, shared, first, Math.max(0, ...local.keys(), ...full.keys())]);
  }
}
