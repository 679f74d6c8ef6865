// Drawings of /live on canvases: the arena, the rows, the prefix tree. Many slots share a cell, many rows a line.

/** Codes of slots, as in jswa/cache/view.py; `left` and `ghost` are the page's own. */
export const CODES = ["free", "full", "shared", "cached", "local", "local-shared", "kept", "left", "ghost"];
const GHOST = CODES.indexOf("ghost");
const MOST_HEIGHT = 380;
const MOST_LINES = 180;
const FADE_MS = 700;

let colors = []; // [r, g, b] by code

/** Read the colours of the theme again. */
export function readColors() {
  const probe = document.createElement("canvas").getContext("2d");
  const style = getComputedStyle(document.documentElement);
  const dark = style.colorScheme === "dark" || (style.colorScheme.includes("light dark") && matchMedia("(prefers-color-scheme: dark)").matches);
  colors = CODES.map((name) => {
    const value = style.getPropertyValue(`--${name}`);
    const pair = /light-dark\(([^,]+),([^)]+)\)/.exec(value);
    probe.fillStyle = pair ? pair[dark ? 2 : 1].trim() : value;
    const hex = probe.fillStyle;
    return [1, 3, 5].map((at) => Number.parseInt(hex.slice(at, at + 2), 16));
  });
}

export function css(code) {
  return `rgb(${colors[code].join(" ")})`;
}

/** Make a canvas as wide as it is shown and so high, and return its context in CSS pixels and its width. */
function prepared(canvas, height) {
  const ratio = devicePixelRatio || 1;
  const width = Math.max(1, canvas.clientWidth);
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return [context, width];
}

/** The grid of an arena, whose slots fade when they come free. */
export class Arena {
  constructor(canvas) {
    this.canvas = canvas;
    this.buffer = document.createElement("canvas");
    this.faded = new Map(); // slot: [code before, time]
  }

  /** Note that a slot has changed. */
  change(slot, before) {
    if (this.faded.size < 4000) this.faded.set(slot, [before, performance.now()]);
  }

  /** Draw slots; the first `ghosts` free ones as what full KV would hold. Return whether some still fade. */
  draw(slots, ghosts) {
    const width = Math.max(1, this.canvas.clientWidth);
    const group = Math.max(1, Math.ceil(slots.length / ((width / 2) * (MOST_HEIGHT / 2))));
    const cells = Math.ceil(slots.length / group);
    let size = 14;
    while (size > 2 && Math.ceil(cells / Math.floor(width / size)) * size > MOST_HEIGHT) size -= 1;
    const across = Math.floor(width / size);
    const down = Math.ceil(cells / across);
    const image = this.pixels(slots, ghosts, group, across, down);
    this.buffer.width = across;
    this.buffer.height = down;
    this.buffer.getContext("2d").putImageData(image, 0, 0);
    this.canvas.style.height = `${down * size}px`;
    const [context] = prepared(this.canvas, down * size);
    context.imageSmoothingEnabled = false;
    context.drawImage(this.buffer, 0, 0, across * size, down * size);
    if (size >= 5) this.lines(context, across, down, size);
    return this.faded.size > 0;
  }

  pixels(slots, ghosts, group, across, down) {
    const image = new ImageData(across, down);
    const words = new Uint32Array(image.data.buffer);
    const palette = colors.map(([r, g, b]) => (255 << 24) | (b << 16) | (g << 8) | r);
    let left = ghosts;
    if (group === 1) {
      for (let i = 0; i < slots.length; i += 1) {
        const code = slots[i];
        words[i] = palette[code === 0 && left > 0 ? ((left -= 1), GHOST) : code];
      }
      this.fade(words, slots);
      return image;
    }
    for (let cell = 0, at = 0; at < slots.length; cell += 1, at += group) {
      let r = 0;
      let g = 0;
      let b = 0;
      const end = Math.min(slots.length, at + group);
      for (let i = at; i < end; i += 1) {
        const code = slots[i] === 0 && left > 0 ? ((left -= 1), GHOST) : slots[i];
        r += colors[code][0];
        g += colors[code][1];
        b += colors[code][2];
      }
      const n = end - at;
      words[cell] = (255 << 24) | ((b / n) << 16) | ((g / n) << 8) | (r / n);
    }
    this.faded.clear();
    return image;
  }

  fade(words, slots) {
    const now = performance.now();
    for (const [slot, [before, since]] of this.faded) {
      const rest = 1 - (now - since) / FADE_MS;
      if (rest <= 0) {
        this.faded.delete(slot);
        continue;
      }
      const mixed = [0, 1, 2].map((i) => colors[slots[slot]][i] * (1 - rest) + colors[before][i] * rest);
      words[slot] = (255 << 24) | (mixed[2] << 16) | (mixed[1] << 8) | mixed[0];
    }
  }

  lines(context, across, down, size) {
    context.fillStyle = getComputedStyle(document.body).backgroundColor;
    for (let x = 1; x <= across; x += 1) context.fillRect(x * size - 1, 0, 1, down * size);
    for (let y = 1; y <= down; y += 1) context.fillRect(0, y * size - 1, across * size, 1);
  }
}

/** Draw rows, each [row, launched, shared pages, window's page, pages' end]. Return how many rows a line has. */
export function drawRows(canvas, rows, geometry) {
  const group = Math.max(1, Math.ceil(rows.length / MOST_LINES));
  const lines = Math.max(1, Math.ceil(rows.length / group));
  const step = Math.max(2, Math.min(12, Math.floor(MOST_HEIGHT / lines)));
  const height = Math.max(40, lines * step);
  canvas.style.height = `${height}px`;
  const [context, width] = prepared(canvas, height);
  const page = geometry.page_size;
  const longest = Math.max(geometry.window * 1.5, 64, ...rows.map((row) => row[1]));
  const scale = width / longest;
  const thick = Math.max(1, step - (step > 3 ? 2 : 1));
  for (let line = 0; line < lines; line += 1) {
    const mine = rows.slice(line * group, (line + 1) * group);
    if (!mine.length) continue;
    const mean = (index) => mine.reduce((sum, row) => sum + row[index], 0) / mine.length;
    const [launched, shared, window] = [mean(1), mean(2) * page, mean(3) * page];
    const y = line * step;
    const bar = (from, to, code) => {
      context.fillStyle = css(code);
      context.fillRect(from * scale, y, Math.max(0.5, (to - from) * scale), thick);
    };
    bar(0, launched, geometry.has_full ? 1 : 0);
    if (shared) bar(0, Math.min(shared, launched), 2);
    if (geometry.window) bar(Math.min(window, launched), launched, 4);
  }
  return group;
}

/** Draw the edges of the tree, each [above, start, tokens, full pages, local pages, hits, left out], and windows. */
export function drawTree(canvas, tree, windows) {
  const below = tree.map(() => []);
  const roots = [];
  tree.forEach((edge, index) => (edge[0] < 0 ? roots : below[edge[0]]).push(index));
  let leaves = 0;
  const place = tree.map(() => [0, 0]); // first leaf and one past the last
  const visit = (index) => {
    const first = leaves;
    if (below[index].length) below[index].forEach(visit);
    else leaves += 1;
    place[index] = [first, leaves];
  };
  roots.forEach(visit);
  const step = Math.max(2, Math.min(16, Math.floor(MOST_HEIGHT / Math.max(1, leaves))));
  const height = Math.max(40, leaves * step);
  canvas.style.height = `${height}px`;
  const [context, width] = prepared(canvas, height);
  const scale = width / Math.max(64, ...tree.map((edge) => edge[1] + edge[2]));
  tree.forEach(([, start, tokens, full], index) => {
    const [first, end] = place[index];
    context.fillStyle = css(full ? 3 : 6);
    context.fillRect(start * scale, first * step, Math.max(1, tokens * scale - 1), Math.max(1, (end - first) * step - 1));
  });
  context.fillStyle = css(4);
  for (const [index, end] of windows) {
    const [first, last] = place[index];
    context.fillRect(Math.max(0, end * scale - 4), first * step, 3, Math.max(1, (last - first) * step - 1));
  }
}
