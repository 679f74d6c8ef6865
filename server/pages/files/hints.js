// What the page shows of the model: the empty conversation, and the server's defaults in the settings.

import { el } from "./markdown.js";
import { count } from "./messages.js";

const EXAMPLES = [
  "Why is the sky blue? Answer in two sentences.",
  "Rewrite this, short and friendly: I regret to inform you that our meeting has to be postponed until Thursday.",
  "List five things to check before I rent a flat.",
];
const WITHOUT = { max_tokens: "no limit", seed: "random" }; // what no value means
const LEVELS = ["none", "low", "medium", "high"];

/**
 * Return the node of an empty conversation, with examples to choose from.
 * `card`: the model's entry of /v1/models; `hints`: `chat` of /server_info, undefined while the server has not answered.
 */
export function welcome(card, hints, choose) {
  const node = el("div", { class: "empty" }, el("h1", { class: "wordmark" }, "jswa"));
  if (card) {
    const of = card.parent ? ` (adapter of ${card.parent})` : "";
    node.append(el("p", { class: "model" }, `${card.id}${of} · context of ${count(card.max_model_len)} tokens`));
  }
  if (!card || hints === undefined) return node;
  if (hints === null) {
    node.append(el("p", {}, "This model has no chat template, so it cannot chat: start the server with --chat-template, or use /v1/completions."));
    return node;
  }
  const texts = hints.examples.length && !card.parent ? hints.examples : EXAMPLES;
  node.append(el("div", { class: "examples" },
    ...texts.slice(0, 3).map((text) => el("button", { type: "button", onclick: () => choose(text) }, text))));
  return node;
}

/** Show the server's defaults in the empty fields of the settings. */
export function showDefaults(form, hints) {
  for (const [name, value] of Object.entries(hints?.sampling ?? {})) {
    form.elements[name].placeholder = value === null ? WITHOUT[name] ?? "none" : String(value);
  }
}

/** Return the field of reasoning_effort: a choice if the template has one, null if it has no place for it, else a text. */
export function effortField(hints, value) {
  const choices = hints?.reasoning_efforts;
  if (!choices) {
    return el("span", {}, el("input", { name: "reasoning_effort", list: "efforts", autocomplete: "off" }),
      el("datalist", { id: "efforts" }, ...LEVELS.map((one) => el("option", { value: one }))));
  }
  const named = value && !choices.includes(value) ? [...choices, value] : choices;
  if (!named.length) return null;
  return el("select", { name: "reasoning_effort" },
    el("option", { value: "" }, "default"), ...named.map((one) => el("option", { value: one }, one)));
}
