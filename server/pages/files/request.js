// What the chat asks the server, and what the server's events add to a message.

import { path, valid } from "./store.js";

const MOST_PIXELS = 2 ** 20; // of a picture: models see fewer, and the browser has little room for conversations
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed", "repetition_penalty",
  "presence_penalty", "frequency_penalty"];

/** Return the request for the answer to a message, with the messages before it. Throws if a setting is wrong. */
export function request(chat, to, model) {
  const messages = valid(path(chat, to)).map(sent);
  if (chat.system) messages.unshift({ role: "system", content: chat.system });
  const body = { messages, stream: true, stream_options: { include_usage: true }, ...settings(chat) };
  if (model) body.model = model;
  return body;
}

function sent(message) {
  const { role, content } = message;
  if (role === "tool") return { role, content, tool_call_id: message.call };
  if (role === "user") return { role, content: message.images?.length ? parts(message) : content };
  const calls = message.calls?.map((one) => ({ id: one.id, type: "function", function: { name: one.name, arguments: one.arguments } }));
  return { role, content, ...(message.reasoning && { reasoning_content: message.reasoning }), ...(calls?.length && { tool_calls: calls }) };
}

/** Return the content of a message with pictures. */
function parts({ content, images }) {
  const pictures = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return content.trim() ? [...pictures, { type: "text", text: content }] : pictures;
}

/** Return the file of a picture as a data: URL, scaled down to `MOST_PIXELS`, on white. Throws if it is no picture. */
export async function picture(file) {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, Math.sqrt(MOST_PIXELS / (image.width * image.height)));
  const canvas = document.createElement("canvas");
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

/** Return the fields of a request that the settings give. Throws SyntaxError with the name of what is no JSON. */
export function settings({ params, tools }) {
  const found = {};
  for (const name of NUMBERS) if ((params[name] ?? "") !== "") found[name] = Number(params[name]);
  if (params.reasoning_effort) found.reasoning_effort = params.reasoning_effort;
  const stops = (params.stop ?? "").split("\n").filter((line) => line);
  if (stops.length) found.stop = stops;
  if (tools.trim()) found.tools = parsed("Tools", tools, Array.isArray, "a JSON list");
  const other = params.other?.trim()
    ? parsed("Other fields", params.other, (value) => value && typeof value === "object" && !Array.isArray(value), "a JSON object")
    : {};
  return { ...found, ...other };
}

function parsed(name, text, fits, what) {
  let value;
  try {
    value = JSON.parse(text);
  } catch (error) {
    throw new SyntaxError(`${name}: ${error.message}`);
  }
  if (!fits(value)) throw new SyntaxError(`${name} must be ${what}.`);
  return value;
}

/** Add what an event of the stream says to a message. */
export function take(message, event, begun) {
  if (event.usage) message.usage = event.usage;
  if (event.timings) message.timings = event.timings;
  const choice = event.choices?.[0];
  if (!choice) return;
  const { content, reasoning_content: reasoning, tool_calls: calls } = choice.delta;
  if (content || reasoning || calls) message.first ??= performance.now() - begun;
  if (content) message.content += content;
  if (reasoning) message.reasoning = (message.reasoning ?? "") + reasoning;
  for (const part of calls ?? []) {
    message.calls ??= [];
    const call = (message.calls[part.index] ??= { id: "", name: "", arguments: "" });
    call.id = part.id ?? call.id;
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }
  if (choice.finish_reason) message.finish = choice.finish_reason;
}
