// The server's API, as the pages use it.

import { key } from "./store.js";

/** What the server, or the way to it, has refused. `status` is 0 if there was no answer. */
export class Refusal extends Error {
  constructor(status, message, after = 0) {
    super(message);
    this.status = status;
    this.after = after; // seconds until another try makes sense
  }
}

/** Send a request with the key, and return the response. Throws Refusal. */
export async function ask(address, body, signal, secret = key.get()) {
  const headers = body ? { "Content-Type": "application/json" } : {};
  if (secret) headers.Authorization = `Bearer ${secret}`;
  let response;
  try {
    response = await fetch(address, { method: body ? "POST" : "GET", headers, signal, body: body && JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refusal(0, "The server does not answer. It may be down, or the network may be.");
  }
  if (response.ok) return response;
  const text = await response.text();
  let message = `The server answers with status ${response.status}.`;
  try {
    message = JSON.parse(text).error.message || message;
  } catch {
    // a proxy has answered
  }
  throw new Refusal(response.status, message, Number(response.headers.get("Retry-After")) || 0);
}

/** Yield the events of a stream as objects, until "[DONE]" or its end. Throws Refusal if the connection breaks. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) throw new Refusal(0, "The answer broke off: the server has closed the connection.");
      rest += value;
      const blocks = rest.split("\n\n");
      rest = blocks.pop();
      for (const block of blocks) {
        const data = block.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
        if (!data.length) continue; // a comment that keeps the connection
        if (data[0] === "[DONE]") return;
        yield JSON.parse(data.join("\n"));
      }
    }
  } catch (error) {
    if (error instanceof Refusal || error.name === "AbortError") throw error;
    throw new Refusal(0, "The answer broke off: the connection to the server is lost.");
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** Return {id, parent, max_model_len} of the models and adapters that the server has. Throws Refusal. */
export async function models() {
  return (await (await ask("v1/models")).json()).data;
}

/** Return what a chat shows of the model, null if it has no chat template. Throws Refusal. */
export async function hints() {
  return (await (await ask("server_info")).json()).chat;
}

/** Return why the server has refused a request with status 401. */
export function whyKey(secret = key.get()) {
  return secret ? "The server does not know this key." : "The server asks for an API key.";
}
