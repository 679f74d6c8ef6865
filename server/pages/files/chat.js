// The chat at /: conversations, the message field, and one answer at a time.

import { ask, events, hints, models, Refusal, whyKey } from "./api.js";
import { effortField, showDefaults, welcome } from "./hints.js";
import { el } from "./markdown.js";
import { count, messageNode, pictureNode } from "./messages.js";
import { picture, request, settings, take } from "./request.js";
import * as store from "./store.js";

const $ = (id) => document.getElementById(id);
const SAVE_MS = 1000;

let chat = store.load(store.conversations()[0]?.id) ?? store.created(store.setting("last"));
let running = null; // {message, abort, node}
let known = []; // models of the server
let pictures = []; // data: URLs of those that the next message has
let told; // what the server says of its model; null: the model cannot chat

// ---- what is shown ----

function showList() {
  $("list").replaceChildren(...store.conversations().map((one) =>
    el("div", { class: `chat-item${one.id === chat.id ? " now" : ""}` },
      el("button", { type: "button", class: "open", title: one.title, onclick: () => open(one.id),
        "aria-current": one.id === chat.id ? "true" : null }, one.title || "Conversation"),
      el("span", { class: "tools" },
        el("button", { type: "button", class: "quiet", title: "Rename", "aria-label": `Rename ${one.title}`, onclick: () => rename(one.id) }, "✎"),
        el("button", { type: "button", class: "quiet", title: "Delete", "aria-label": `Delete ${one.title}`, onclick: () => drop(one.id) }, "✕")))));
  showTitle();
}

function showTitle() {
  document.title = [chat.title, model(), "jswa"].filter((part) => part).join(" – ");
}

function showMessages() {
  const path = store.path(chat);
  const sent = new Set(store.valid(path));
  const nodes = path.map((message) => {
    const node = messageNode(message, store.alternatives(chat, message), act);
    const runs = running?.message === message;
    node.fill(runs, message === path.at(-1));
    if (runs) running.node = node;
    node.classList.toggle("out", message.role !== "assistant" && !sent.has(message));
    return node;
  });
  const card = known.find((one) => one.id === model());
  $("messages").replaceChildren(...(nodes.length ? nodes : [welcome(card, told, (text) => running || send(text))]));
  const usage = path.findLast((message) => message.usage)?.usage;
  const most = card?.max_model_len;
  const used = usage ? `${count(usage.total_tokens)} of ` : "";
  $("room").replaceChildren(...(most ? [`${used}${count(most)}`, el("span", { class: "wide" }, " tokens")] : []));
  showSend();
}

function showSend() {
  $("send").textContent = running ? "Stop" : "Send";
  $("send").title = running ? "Stop (Esc)" : "Send (Enter)";
}

function showAll() {
  showList();
  showMessages();
  showModels();
  follow(true);
}

function showModels() {
  const names = known.map((one) => one.id);
  if (chat.model && !names.includes(chat.model) && !names.length) names.push(chat.model);
  $("model").replaceChildren(...names.map((name) => el("option", { value: name, selected: name === model() }, name)));
  showTitle();
}

function model() {
  return known.some((one) => one.id === chat.model) || !known.length ? chat.model : known[0].id;
}

function say(text) {
  $("status").textContent = text;
}

let sticks = true;
function follow(always = false) {
  const box = $("messages");
  if (always) sticks = true;
  if (sticks) box.scrollTop = box.scrollHeight;
  $("down").hidden = sticks;
}
$("messages").addEventListener("scroll", () => {
  const box = $("messages");
  sticks = box.scrollHeight - box.scrollTop - box.clientHeight < 60;
  $("down").hidden = sticks;
});
$("down").addEventListener("click", () => follow(true));

// ---- conversations ----

function keep(used = false) {
  if (!store.save(chat, used)) say("The browser has no room for this conversation: delete another one.");
}

function open(id) {
  const found = store.load(id);
  if (running || !found) return;
  chat = found;
  $("side").classList.remove("open");
  showAll();
  $("input").focus();
}

function begin() {
  if (running) stop();
  chat = store.created(chat);
  $("side").classList.remove("open");
  showAll();
  $("input").focus();
}

function rename(id) {
  const one = id === chat.id ? chat : store.load(id);
  const title = one && prompt("Title of the conversation", one.title);
  if (!title) return;
  one.title = title.slice(0, 200);
  store.save(one);
  showList();
}

function drop(id) {
  const one = store.conversations().find((item) => item.id === id);
  if ((running && id === chat.id) || !confirm(`Delete “${one.title}”?`)) return;
  store.remove(id);
  if (id === chat.id) chat = store.load(store.conversations()[0]?.id) ?? store.created(chat);
  showAll();
}

addEventListener("storage", (event) => {
  if (event.key === "jswa.chats") showList(); // another tab has written
});

// ---- requests ----

/** Let the model answer the message `to`, in a new branch if there is an answer. */
async function answer(to) {
  if (running) return;
  let body;
  try {
    body = request(chat, to, model());
  } catch (error) {
    say(error.message);
    return;
  }
  const message = store.add(chat, to, { role: "assistant", model: body.model });
  const mine = chat;
  running = { message, abort: new AbortController(), node: null };
  showMessages();
  follow(true);
  say("");
  const begun = performance.now();
  const saver = setInterval(() => store.save(mine), SAVE_MS);
  try {
    const response = await ask("v1/chat/completions", body, running.abort.signal);
    for await (const event of events(response)) {
      if (event.error) throw new Refusal(500, event.error.message);
      take(message, event, begun);
      draw();
    }
  } catch (error) {
    fail(message, error);
  } finally {
    clearInterval(saver);
    running = null;
    store.save(mine);
    showMessages();
    follow();
  }
}

function fail(message, error) {
  if (error.name === "AbortError") {
    message.stopped = true;
    return;
  }
  const wait = error.after ? ` Try again in ${error.after} s.` : "";
  message.error = error instanceof Refusal ? error.message + wait : `This page has failed: ${error.message}`;
  if (error.status === 401) askKey(whyKey());
}

let drawn = false;
function draw() {
  if (drawn) return;
  drawn = true;
  requestAnimationFrame(() => {
    drawn = false;
    if (!running?.node) return;
    running.node.fill(true, true);
    follow();
  });
}

function stop() {
  running?.abort.abort();
}

function send(text, images = []) {
  if (!chat.title) chat.title = store.titleOf(text) || "Picture";
  const message = store.add(chat, chat.leaf, { role: "user", content: text, ...(images.length && { images }) });
  store.set("last", { system: chat.system, tools: chat.tools, params: chat.params, model: chat.model });
  keep(true);
  showList();
  answer(message.id);
}

const act = {
  show(message) {
    store.show(chat, message);
    keep();
    showMessages();
  },
  retry(message) {
    answer(message.parent);
  },
  edit(message) {
    if (running) return;
    const node = document.querySelector(`.message[data-id="${message.id}"]`);
    const field = el("textarea", { rows: Math.min(12, message.content.split("\n").length + 1), "aria-label": "Edit the message" });
    field.value = message.content;
    const done = () => {
      const text = field.value;
      if (!text.trim() && !message.images) return;
      chat.leaf = message.parent;
      send(text, message.images);
    };
    field.addEventListener("keydown", (event) => {
      if (enters(event)) done();
      if (event.key === "Escape") showMessages();
    });
    node.replaceChildren(el("div", { class: "edit" }, field, el("menu", {},
      el("button", { type: "button", class: "quiet", onclick: showMessages }, "Cancel"),
      el("button", { type: "button", onclick: done }, "Send as a new branch"))));
    field.focus();
  },
  editAsked(message) {
    act.edit(store.path(chat, message.id).findLast((one) => one.role === "user"));
  },
  results(message, values) {
    let parent = message.id;
    message.calls.forEach((call, index) => {
      parent = store.add(chat, parent, { role: "tool", call: call.id, name: call.name, content: values[index] }).id;
    });
    keep(true);
    answer(parent);
  },
};

// ---- the message field, keys of the keyboard ----

/** Return whether a key press sends, and keep it from making a new line. */
function enters(event) {
  const sends = event.key === "Enter" && !event.shiftKey && !event.isComposing;
  if (sends) event.preventDefault();
  return sends;
}

function submit() {
  const text = $("input").value;
  if (running || (!text.trim() && !pictures.length)) return;
  const images = pictures;
  pictures = [];
  $("input").value = "";
  showPictures();
  send(text, images);
}

function showPictures() {
  $("picture").hidden = !told?.images;
  $("pictures").hidden = !pictures.length;
  $("pictures").replaceChildren(...pictures.map((url, index) =>
    el("button", { type: "button", title: "Remove this picture", "aria-label": "Remove this picture",
      onclick: () => (pictures.splice(index, 1), showPictures()) }, pictureNode(url))));
}

/** Add files to the next message, as far as a request may have them. */
async function addPictures(files) {
  for (const file of files) {
    if (pictures.length >= (told?.images ?? 0)) break;
    try {
      pictures.push(await picture(file));
    } catch {
      say(`${file.name} is no picture that this browser reads.`);
    }
  }
  showPictures();
}

$("picture").addEventListener("click", () => $("files").click());
$("files").addEventListener("change", async () => {
  const files = [...$("files").files];
  $("files").value = "";
  await addPictures(files);
});
$("input").addEventListener("paste", (event) => {
  const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
  if (!files.length || !told?.images) return;
  event.preventDefault();
  addPictures(files);
});

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else submit();
});
$("input").addEventListener("keydown", (event) => {
  if (enters(event)) submit();
  if (event.key === "ArrowUp" && !$("input").value && !running) {
    const last = store.path(chat).findLast((message) => message.role === "user");
    if (last) {
      event.preventDefault();
      act.edit(last);
    }
  }
});
addEventListener("keydown", (event) => {
  if (document.querySelector("dialog[open]")) return;
  if (event.key === "Escape" && running) stop();
  if (event.altKey && event.code === "KeyN") (event.preventDefault(), begin());
  if (event.altKey && event.code === "KeyP") (event.preventDefault(), openSettings());
  const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
  if (event.key === "/" && !typing) (event.preventDefault(), $("input").focus());
});

// ---- settings, key, theme ----

function openSettings() {
  const form = $("settings").querySelector("form");
  const effort = effortField(told, chat.params.reasoning_effort);
  $("effort").hidden = !effort;
  $("effort-field").replaceChildren(...(effort ? [effort] : []));
  showDefaults(form, told);
  for (const field of form.querySelectorAll("[name]")) {
    field.value = field.name === "system" || field.name === "tools" ? chat[field.name] : chat.params[field.name] ?? "";
  }
  $("settings-error").textContent = "";
  $("settings").showModal();
}

$("settings").querySelector("form").addEventListener("submit", (event) => {
  if (event.submitter?.value !== "save") return;
  const { system, tools, ...params } = Object.fromEntries(new FormData(event.target));
  try {
    settings({ params, tools });
  } catch (error) {
    event.preventDefault();
    $("settings-error").textContent = error.message;
    return;
  }
  Object.assign(chat, { system, tools, params });
  if (chat.leaf) keep();
});

function askKey(why) {
  if ($("key-dialog").open) return;
  $("key-why").textContent = `${why ? `${why} ` : ""}The key is stored in this browser and sent to this server only.`;
  const form = $("key-dialog").querySelector("form");
  form.elements.key.value = store.key.get();
  form.elements.keep.checked = store.key.kept();
  $("key-dialog").showModal();
}

$("key-dialog").querySelector("form").addEventListener("submit", (event) => {
  if (event.submitter?.value !== "save") return;
  const { key, keep: keeps } = event.target.elements;
  store.key.set(key.value.trim(), keeps.checked);
  connect();
});

const THEMES = { auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark" };
function showTheme() {
  const theme = store.setting("theme", "auto");
  document.documentElement.dataset.theme = theme;
  $("theme").textContent = THEMES[theme] ?? THEMES.auto;
}
$("theme").addEventListener("click", () => {
  const names = Object.keys(THEMES);
  store.set("theme", names[(names.indexOf(store.setting("theme", "auto")) + 1) % names.length]);
  showTheme();
});

$("new").addEventListener("click", begin);
$("settings-button").addEventListener("click", openSettings);
$("key-button").addEventListener("click", () => askKey(""));
$("help-button").addEventListener("click", () => $("help").showModal());
$("menu").addEventListener("click", () => {
  const opened = $("side").classList.toggle("open");
  $("menu").setAttribute("aria-expanded", String(opened));
});
document.querySelector("main").addEventListener("click", (event) => {
  if (event.target !== $("menu")) $("side").classList.remove("open");
});
$("model").addEventListener("change", () => {
  chat.model = $("model").value;
  if (chat.leaf) keep();
  showMessages();
});

/** Ask the server for its models; this also shows whether it is there and takes the key. */
async function connect() {
  try {
    [known, told] = await Promise.all([models(), hints()]);
    say("");
  } catch (error) {
    say(error.status === 401 ? whyKey() : error.message);
    if (error.status === 401) askKey(whyKey());
  }
  showModels();
  showMessages();
  showPictures();
}

showTheme();
showAll();
connect();
