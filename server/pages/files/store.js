// Conversations, in the browser's storage alone. A conversation is a tree of messages; a path through it is shown.

const INDEX = "jswa.chats";
const ONE = "jswa.chat.";
const TITLE = 60; // characters

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise; // another program has written it, or the browser stores nothing
  }
}

/** Return whether a value was stored: the browser may have no room, or store nothing. */
function write(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}

/** Return {id, title, at} of all conversations, the last used first. */
export function conversations() {
  const found = read(INDEX, []);
  return Array.isArray(found) ? found : [];
}

/** Return a conversation, or null. */
export function load(id) {
  const found = read(ONE + id, null);
  return found && typeof found.nodes === "object" ? found : null;
}

/** Store a conversation; `used` also makes it the first of the list. Return whether there was room. */
export function save(chat, used = false) {
  const all = conversations();
  const entry = all.find((one) => one.id === chat.id);
  const item = { id: chat.id, title: chat.title, at: used || !entry ? Date.now() : entry.at };
  const rest = all.filter((one) => one.id !== chat.id);
  return write(ONE + chat.id, chat) && write(INDEX, [item, ...rest].sort((a, b) => b.at - a.at));
}

export function remove(id) {
  localStorage.removeItem(ONE + id);
  write(INDEX, conversations().filter((one) => one.id !== id));
}

/** Return an empty conversation with the settings of another. */
export function created(like) {
  const { system = "", tools = "", params = {}, model = "" } = like ?? {};
  return { id: crypto.getRandomValues(new Uint32Array(2)).join("-"), title: "", nodes: {}, leaf: null, count: 0,
    system, tools, params: { ...params }, model };
}

/** Return the beginning of a text as the title of a conversation, cut between words. */
export function titleOf(text) {
  const line = text.trim().replace(/\s+/g, " ");
  const letters = [...line];
  if (letters.length <= TITLE) return line;
  const cut = letters.slice(0, TITLE).join("");
  return `${cut.slice(0, cut.lastIndexOf(" ") > TITLE / 2 ? cut.lastIndexOf(" ") : cut.length)}…`;
}

/** Add a message after another (null: at the beginning), show it, and return it. */
export function add(chat, parent, message) {
  const node = { id: String((chat.count += 1)), parent, content: "", ...message };
  chat.nodes[node.id] = node;
  chat.leaf = node.id;
  return node;
}

/** Return the messages from the first to one of them, or to the last that is shown. */
export function path(chat, to = chat.leaf) {
  const found = [];
  for (let node = chat.nodes[to]; node; node = chat.nodes[node.parent]) found.unshift(node);
  return found;
}

/** Return whether an answer failed before its first word. */
export function failed({ error, content, reasoning, calls }) {
  return Boolean(error) && !content && !reasoning && !calls?.length;
}

/** Return the messages of a path that the server is sent: what it has refused stays out, from the question on. */
export function valid(messages) {
  const kept = [];
  for (const message of messages) {
    if (!failed(message)) kept.push(message);
    else while (kept.length && kept.pop().role !== "user");
  }
  return kept;
}

/** Return a message and its alternatives, in the order in which they were made. */
export function alternatives(chat, node) {
  return Object.values(chat.nodes).filter((one) => one.parent === node.parent).sort((a, b) => a.id - b.id);
}

/** Show the path through a message that was continued last. */
export function show(chat, node) {
  let last = node;
  for (;;) {
    const next = Object.values(chat.nodes).filter((one) => one.parent === last.id).sort((a, b) => b.id - a.id)[0];
    if (!next) break;
    last = next;
  }
  chat.leaf = last.id;
}

/** Return a setting of all conversations: theme, key, options of the last conversation. */
export function setting(name, otherwise = null) {
  return read(`jswa.${name}`, otherwise);
}

export function set(name, value) {
  if (value === null) localStorage.removeItem(`jswa.${name}`);
  else write(`jswa.${name}`, value);
}

/** The API key: of this tab, or of this browser if its user wants it kept. */
export const key = {
  get: () => sessionStorage.getItem("jswa.key") ?? setting("key", ""),
  set(value, keep) {
    sessionStorage.setItem("jswa.key", value);
    set("key", keep && value ? value : null);
  },
  kept: () => Boolean(setting("key")),
};
