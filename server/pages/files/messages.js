// How messages look: text, reasoning, tool calls, and the line of figures under an answer.

import { copyText, el, render } from "./markdown.js";
import { failed } from "./store.js";

const NUMBER = new Intl.NumberFormat("en-US");
const WHY = {
  cold: "new text",
  evicted: "evicted from the cache",
  "window lost": "their windows were rebuilt",
  "too short": "too few after a cached text to be worth a copy",
  "prompt logprobs": "for their log probabilities",
  "mean pooling": "for the mean of their hidden states",
  "not finite": "the cached values were not finite",
  disabled: "the prefix cache is off",
};

export const count = (value) => NUMBER.format(value);

function time(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 1 : 0)} s`;
}

/** Return the figures of an answer, null if there are none: speed and time, and on demand what the cache had. */
function figures(message) {
  const { timings: t, first, stopped, error } = message;
  if (!t) return stopped ? el("div", { class: "stats" }, `stopped${first ? ` · first token after ${time(first)}` : ""}`) : null;
  const parts = [time((t.queue_ms ?? 0) + (t.prompt_ms ?? 0) + (t.predicted_ms ?? 0))];
  if (t.predicted_per_second !== null) {
    const rate = t.predicted_per_second;
    parts.unshift(`${rate < 10 ? rate.toFixed(1) : count(Math.round(rate))} tokens/s`);
  }
  if (message.finish === "length") parts.push("ended by max_tokens or the context");
  if (error || stopped) parts.push("not complete");
  const more = details(message);
  const seen = (event) => event.target.open && event.target.parentNode.scrollIntoView({ block: "nearest" });
  return el("details", { class: "stats", ontoggle: seen },
    el("summary", { title: more.join("\n") }, parts.join(" · ")), ...more.map((line) => el("div", {}, line)));
}

/** Return what an answer has cost, in sentences. */
function details({ timings: t, usage }) {
  const prompt = t.cache_n + t.prompt_n;
  const wait = t.prompt_ms === null ? "" : `, the first after ${time(t.prompt_ms + (t.queue_ms ?? 0))}`;
  const written = `${count(t.predicted_n)} ${t.predicted_n === 1 ? "token" : "tokens"} written${wait}`;
  const cached = `${count(t.cache_n)} of ${count(prompt)} prompt tokens from the cache`;
  const missed = Object.entries(usage?.prompt_tokens_details?.missed_tokens ?? {}).filter(([, n]) => n > 0);
  const reasons = missed.map(([reason, n]) => `${missed.length > 1 ? `${count(n)} ` : ""}${WHY[reason] ?? reason}`);
  const only = t.prompt_n === 1 ? "the last token of a prompt is always computed" : reasons.join(", ");
  return [written, cached, ...(t.prompt_n && only ? [`${count(t.prompt_n)} computed: ${only}`] : [])];
}

/** Return the node of a message. `act`: what its buttons do; `others`: it and its alternatives. */
export function messageNode(message, others, act) {
  const node = el("article", { class: `message ${message.role}`, "data-id": message.id });
  const body = el("div", { class: "body" });
  const bar = el("div", { class: "bar" });
  node.append(body, bar);
  node.fill = (running = false, last = false) => {
    fillBody(body, message, running, last, act);
    fillBar(bar, message, others, running, act);
  };
  return node;
}

/** Return the node of a picture, by its data: URL. */
export function pictureNode(url) {
  return el("img", { src: url, alt: "picture" });
}

function fillBody(body, message, running, last, act) {
  if (message.role === "user" || message.role === "tool") {
    const who = message.role === "tool" ? el("div", { class: "who" }, `result of ${message.name}`) : "";
    const seen = message.images?.length ? el("div", { class: "pictures" }, ...message.images.map(pictureNode)) : "";
    body.replaceChildren(who, seen, message.content || !message.images ? el("div", { class: "bubble" }, message.content) : "");
    return;
  }
  body.parts ??= { reasoning: null, text: el("div", { class: "bubble" }), calls: el("div"), error: el("p", { class: "error", role: "alert" }), out: el("p", { class: "note" }) };
  const { parts } = body;
  if (!parts.text.isConnected) body.replaceChildren(parts.text, parts.calls, parts.error, parts.out);
  if (message.reasoning) {
    if (!parts.reasoning) {
      parts.reasoning = el("details", { class: "reasoning" }, el("summary"), el("div"));
      body.prepend(parts.reasoning);
    }
    const thinks = running && !message.content && !message.calls?.length;
    const tokens = message.usage?.completion_tokens_details?.reasoning_tokens;
    parts.reasoning.firstChild.textContent = thinks ? "Reasoning…" : `Reasoning${tokens ? ` (${count(tokens)} tokens)` : ""}`;
    const text = parts.reasoning.lastChild;
    if (text.textContent !== message.reasoning) text.textContent = message.reasoning;
  }
  render(parts.text, message.content);
  parts.text.classList.toggle("waiting", running && !message.content && !message.reasoning && !message.calls?.length);
  parts.calls.replaceChildren(...callNodes(message, running, last, act));
  parts.error.textContent = message.error ?? "";
  parts.out.textContent = failed(message) ? "Your next message is sent without this one. Edit it or retry to keep it." : "";
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function callNodes(message, running, last, act) {
  const calls = message.calls ?? [];
  const nodes = calls.map((call) =>
    el("div", { class: "call" },
      el("div", {}, "calls ", el("span", { class: "name" }, call.name)),
      el("pre", {}, running ? call.arguments : pretty(call.arguments)),
      last && !running && el("textarea", { rows: 2, "aria-label": `Result of ${call.name}`, placeholder: "result for the model" }) || null));
  if (!calls.length || running || !last) return nodes;
  const send = () => act.results(message, nodes.map((node) => node.querySelector("textarea").value));
  return [...nodes, el("button", { type: "button", onclick: send }, calls.length > 1 ? "Send results" : "Send result")];
}

function fillBar(bar, message, others, running, act) {
  const button = (text, title, onclick, off = false) =>
    el("button", { type: "button", class: "quiet", title, "aria-label": title, onclick, disabled: off }, text);
  const found = [];
  if (others.length > 1) {
    const at = others.indexOf(message);
    found.push(
      button("‹", "Previous branch", () => act.show(others[at - 1]), at === 0 || running),
      el("span", { class: "branch" }, `${at + 1}/${others.length}`),
      button("›", "Next branch", () => act.show(others[at + 1]), at === others.length - 1 || running));
  }
  if (!running) {
    const copy = button("Copy", "Copy the text", () => copyText(message.content, copy));
    if (message.content) found.push(copy);
    if (message.role === "user") found.push(button("Edit", "Edit, and answer in a new branch", () => act.edit(message)));
    if (message.role === "assistant") found.push(button("Retry", "Answer again in a new branch", () => act.retry(message)));
    if (failed(message)) found.push(button("Edit", "Edit the message without an answer", () => act.editAsked(message)));
  }
  const line = message.role === "assistant" && !running ? figures(message) : null;
  bar.replaceChildren(...(line ? [line] : []), ...found);
}
