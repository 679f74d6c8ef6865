// The page at /live: the events of the server, or the steps of a plan file, as drawings.

import { ask, events, Refusal } from "./api.js";
import { Arena, CODES, css, drawRows, drawTree, readColors } from "./draw.js";
import { el } from "./markdown.js";
import { Replay, read } from "./plan.js";

const $ = (id) => document.getElementById(id);
const NAMES = {
  free: "free", full: "full, of rows", shared: "full, of rows and cache", cached: "full, cached",
  local: "local, in windows of rows", "local-shared": "local, of rows and cache", kept: "local, kept windows",
  left: "left by rows", ghost: "full KV",
};
const NUMBER = new Intl.NumberFormat("en-US");
const count = (value) => NUMBER.format(Math.round(value));
const counted = (value, name) => `${count(value)} ${name}${value === 1 ? "" : "s"}`;
const RETRY_MS = 3000;
const NO_KEY = "This server has no admin key. Start it with one to see its cache here: jswa serve MODEL --admin-api-key KEY";

const now = { geometry: null, slots: new Uint8Array(0), host: new Uint8Array(0), rows: [], tree: [], windows: [], micros: 0, events: 0 };
const arena = new Arena($("arena"));
const host = new Arena($("host"));
let paused = false;
let replay = null;

// ---- drawing, once for each frame of the screen at most ----

let dirty = false;
function redraw() {
  if (dirty || !now.geometry) return;
  dirty = true;
  requestAnimationFrame(() => {
    dirty = false;
    const ghosts = showFigures();
    let fading = arena.draw(now.slots, $("full-kv").checked ? ghosts : 0);
    $("host-memory").hidden = !now.host.length;
    if (now.host.length) {
      showHost();
      fading = host.draw(now.host, 0) || fading;
    }
    const group = drawRows($("rows"), now.rows, now.geometry);
    $("rows-size").textContent = `${count(now.rows.length)} of ${count(now.geometry.max_rows)}${group > 1 ? `, ${group} a line` : ""}`;
    if (fading && !matchMedia("(prefers-reduced-motion: reduce)").matches) setTimeout(redraw, 30);
  });
}

function redrawTree() {
  drawTree($("tree"), now.tree, now.windows);
  const out = now.tree.reduce((sum, edge) => sum + edge[6], 0);
  $("tree-size").textContent = replay ? "not in a plan file"
    : `${counted(now.tree.length, "edge")}${out ? `, ${count(out)} more not shown` : ""}, ${counted(now.windows.length, "window")}`;
}

/** Return how many slots have each code, without the slab of zeros. */
function countsOf(slots, pagesPerSlab) {
  const counts = CODES.map(() => 0);
  for (const code of slots) counts[code] += 1;
  counts[0] -= pagesPerSlab;
  return counts;
}

/** Show the codes that have slots, and the first few in any case. */
function showLegend(node, counts, always) {
  const shown = counts.map((n, code) => [n, code]).filter(([n, code]) => n > 0 || code < always);
  node.replaceChildren(...shown.map(([n, code]) => {
    const key = el("span", { class: "key" }, `${NAMES[CODES[code]]} ${count(n)}`);
    key.style.setProperty("--color", css(code));
    return key;
  }));
}

function showBar(node, counts, scale) {
  const parts = counts.map((n, code) => [n, code]).filter(([n, code]) => code && n);
  node.replaceChildren(...parts.map(([n, code]) => {
    const part = el("span");
    part.style.width = `${(100 * n) / scale}%`;
    part.style.background = css(code);
    return part;
  }));
}

function showHost() {
  const m = now.geometry.pages_per_slab;
  const counts = countsOf(now.host, m);
  const total = now.host.length - m;
  showLegend($("host-legend"), counts, 1);
  showBar($("host-bar"), counts, total);
  $("host-size").textContent = `${count(total)} slots: pages that the arena has evicted`;
}

/** Show the legend, the bar and the sentence about full KV; return the slots that full KV would take besides. */
function showFigures() {
  const { pages_per_slab: m, page_size: page, num_slabs: slabs, has_full: hasFull, window } = now.geometry;
  const counts = countsOf(now.slots, m);
  const total = (slabs - 1) * m;
  const fullPages = counts[1] + counts[2] + counts[3];
  const localPages = (counts[4] + counts[5] + counts[6]) / m;
  const rowsPages = now.rows.reduce((sum, row) => sum + row[3], 0);
  const ghosts = window ? m * Math.max(0, hasFull && !replay ? fullPages - localPages : rowsPages) : 0;
  const wants = total - counts[0] + ghosts;
  const scale = Math.max(total, $("full-kv").checked ? wants : 0);
  showLegend($("legend"), counts, 2);
  showBar($("bar"), counts.map((n, code) => (code === 8 && $("full-kv").checked ? ghosts : n)), scale);
  $("arena-size").textContent = `${count(total)} slots: a full page takes one, a local page ${m}; ${page} tokens a page`;
  $("full-kv-text").textContent = $("full-kv").checked
    ? `With full KV the same text takes ${count(wants)} slots, ${(wants / total).toFixed(2)} of this arena, in place of ${count(total - counts[0])}.`
    : "";
  return ghosts;
}

// ---- the server's events ----

function bytes(text) {
  return Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
}

function grouped(list, size) {
  return Array.from({ length: list.length / size }, (_, i) => list.slice(i * size, (i + 1) * size));
}

/** Return slots after a change; local pages that come free fade. */
function changed(slots, change, drawn) {
  if (change.slots !== undefined) return bytes(change.slots);
  for (let i = 0; i < change.runs.length; i += 3) {
    const [first, length, code] = change.runs.slice(i, i + 3);
    for (let slot = first; slot < first + length; slot += 1) {
      if (slots[slot] >= 4 && code === 0) drawn.change(slot, slots[slot]);
      slots[slot] = code;
    }
  }
  return slots;
}

function take(event) {
  if (event.error) throw new Refusal(500, event.error.message);
  if (event.geometry) now.geometry = event.geometry;
  if (event.model) showTitle(event.model);
  now.slots = changed(now.slots, event.arena, arena);
  now.host = changed(now.host, event.host, host);
  now.rows = grouped(event.rows, 5);
  now.micros = event.micros;
  now.events += 1;
  $("cache").hidden = false;
  if (event.tree) {
    now.tree = event.tree;
    now.windows = grouped(event.windows, 2);
    redrawTree();
  }
  redraw();
}

function showTitle(of) {
  $("title").textContent = `KV cache of ${of}`;
  document.title = `KV cache – ${of} – jswa`;
}

let connection = null;
async function connect() {
  connection?.abort();
  const mine = (connection = new AbortController());
  try {
    const response = await ask("live/events", null, mine.signal, adminKey());
    for await (const event of events(response)) {
      if (paused || replay) continue;
      take(event);
      say("live");
      $("status").title = `Reading the cache takes ${now.micros} µs of the engine's time, ten times a second at most.`;
    }
  } catch (error) {
    if (error.name === "AbortError") return;
    const wrong = adminKey() ? "This is not the admin key." : "Enter the admin key.";
    say(error.status === 401 ? wrong : error.status === 403 ? NO_KEY : error.message);
    if (error.status === 401) askKey(wrong);
    else if (error.status !== 403 && error.status !== 404) setTimeout(() => mine === connection && connect(), RETRY_MS);
  }
}

function adminKey() {
  return sessionStorage.getItem("jswa.adminKey");
}

function askKey(why) {
  $("key-why").textContent = why;
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

function say(text) {
  if (!replay && $("status").textContent !== text) $("status").textContent = text;
}

// ---- plan files ----

let timer = 0;
function open(text, name) {
  let file;
  try {
    file = read(text);
  } catch (error) {
    $("status").textContent = error.message;
    return;
  }
  connection?.abort();
  replay = new Replay(file);
  $("status").textContent = `${name}: ${count(file.steps.length)} steps`;
  $("status").title = "";
  showTitle(name);
  $("player").hidden = false;
  $("pause").hidden = true;
  $("at").max = String(file.steps.length);
  now.geometry = file.geometry;
  $("cache").hidden = false;
  now.tree = now.windows = [];
  now.host = new Uint8Array(0);
  redrawTree();
  goTo(1);
  play(true);
}

function goTo(step) {
  const before = replay.slots.slice();
  replay.go(step);
  for (let slot = 0; slot < before.length; slot += 1) {
    if (before[slot] === 4 && replay.slots[slot] !== 4) arena.change(slot, 4);
  }
  now.slots = replay.slots;
  now.rows = replay.list();
  $("at").value = String(step);
  $("step").textContent = `step ${count(step)} of ${count(replay.steps.length)}`;
  redraw();
}

function play(on) {
  clearTimeout(timer);
  timer = 0;
  $("play").textContent = on ? "Stop" : "Play";
  if (!on) return;
  const tick = () => {
    if (replay.at >= replay.steps.length) {
      play(false);
      return;
    }
    goTo(replay.at + 1);
    timer = setTimeout(tick, 1000 / Number($("speed").value));
  };
  timer = setTimeout(tick, 0);
}

$("file").addEventListener("change", async (event) => {
  const [file] = event.target.files;
  if (file) open(await file.text(), file.name);
});
$("play").addEventListener("click", () => {
  if (!timer && replay.at >= replay.steps.length) goTo(0);
  play(!timer);
});
$("at").addEventListener("input", () => {
  play(false);
  goTo(Number($("at").value));
});
$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").textContent = paused ? "Go on" : "Pause";
  if (!paused) connect();
});
$("full-kv").addEventListener("change", redraw);
$("key-button").addEventListener("click", () => askKey("Enter the admin key."));
$("key-dialog").querySelector("form").addEventListener("submit", (event) => {
  if (event.submitter?.value !== "save") return;
  sessionStorage.setItem("jswa.adminKey", event.target.elements.key.value.trim());
  connect();
});
for (const query of ["(prefers-color-scheme: dark)"]) {
  matchMedia(query).addEventListener("change", () => (readColors(), redraw(), redrawTree()));
}
addEventListener("resize", () => (redraw(), redrawTree()));

const theme = localStorage.getItem("jswa.theme");
if (theme) document.documentElement.dataset.theme = JSON.parse(theme);
readColors();
const plan = new URLSearchParams(location.search).get("plan");
if (plan) fetch(new URL(plan, location.href)).then((response) => response.text()).then((text) => open(text, plan.split("/").at(-1)));
else connect();
