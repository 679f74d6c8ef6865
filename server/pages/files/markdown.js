// Markdown to DOM nodes. Text reaches the page as text nodes only, so nothing in it can become HTML.

const MOST_INLINE = 20000; // characters of a paragraph whose marks are read
const DEEPEST = 12;
const MARKS = [["**", "strong"], ["__", "strong"], ["~~", "del"], ["*", "em"], ["_", "em"]];

/** Return an element with attributes and children; strings become text nodes. */
export function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

/** Show Markdown in a container. Blocks whose text has not changed since the last call keep their nodes. */
export function render(container, source) {
  const blocks = split(source);
  const old = container.shown ?? [];
  let same = 0;
  while (same < blocks.length && same < old.length && blocks[same] === old[same]) same += 1;
  while (container.childNodes.length > same) container.lastChild.remove();
  for (const block of blocks.slice(same)) container.append(blockNode(block, 0));
  container.shown = blocks;
}

/** Return the top-level blocks of a text, as texts. */
function split(source) {
  const lines = source.replace(/\r\n?/g, "\n").split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const end = blockEnd(lines, at);
    blocks.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return blocks;
}

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const ITEM = /^( {0,3})([-*+]|\d{1,9}[.)])(?:[ \t]+|$)/;
const HEAD = /^ {0,3}(#{1,6})(?:[ \t]+(.*?))?[ \t]*#*[ \t]*$/;
const RULE = /^ {0,3}([-*_])[ \t]*(?:\1[ \t]*){2,}$/;
const QUOTE = /^ {0,3}> ?/;
const CELLS = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

function begins(line) {
  return FENCE.test(line) || HEAD.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

/** Return the line behind the block that begins at a line. */
function blockEnd(lines, at) {
  const fence = FENCE.exec(lines[at]);
  if (fence) {
    const close = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
    for (let end = at + 1; end < lines.length; end += 1) if (close.test(lines[end])) return end + 1;
    return lines.length; // still being written
  }
  if (HEAD.test(lines[at]) || RULE.test(lines[at])) return at + 1;
  if (QUOTE.test(lines[at])) {
    let end = at + 1;
    while (end < lines.length && QUOTE.test(lines[end])) end += 1;
    return end;
  }
  if (ITEM.test(lines[at])) return listEnd(lines, at);
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !begins(lines[end])) end += 1;
  return end;
}

function ordered(line) {
  return /\d/.test(ITEM.exec(line)[2]);
}

function listEnd(lines, at) {
  const kind = ordered(lines[at]);
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end];
    const blank = !line.trim();
    const next = blank ? lines.slice(end).find((one) => one.trim()) : line;
    if (next === undefined) return end;
    const inside = /^(?: {2,}|\t)/.test(next) || (ITEM.test(next) && !RULE.test(next) && ordered(next) === kind);
    if (!inside && (blank || begins(line))) return end;
    end += 1;
  }
  return end;
}

function blockNode(text, depth) {
  const lines = text.split("\n");
  const fence = FENCE.exec(lines[0]);
  if (fence) return codeBlock(lines, fence);
  const head = HEAD.exec(lines[0]);
  if (head) return el(`h${head[1].length}`, {}, ...inline(head[2] ?? "", depth));
  if (RULE.test(lines[0])) return el("hr");
  if (depth < DEEPEST && QUOTE.test(lines[0])) {
    return el("blockquote", {}, ...nodes(lines.map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1));
  }
  if (depth < DEEPEST && ITEM.test(lines[0])) return listNode(lines, depth);
  if (lines.length > 1 && lines[0].includes("|") && CELLS.test(lines[1])) return tableNode(lines, depth);
  return el("p", {}, ...inline(text, depth));
}

function nodes(text, depth) {
  return split(text).map((block) => blockNode(block, depth));
}

function codeBlock(lines, fence) {
  const closed = lines.length > 1 && new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`).test(lines.at(-1));
  const code = lines.slice(1, closed ? -1 : undefined).join("\n");
  const copy = el("button", { type: "button", class: "quiet copy", onclick: () => copyText(code, copy) }, "Copy");
  const bar = el("div", { class: "code-bar" }, el("span", {}, fence[2].trim().split(/\s/)[0]), copy);
  return el("div", { class: "code" }, bar, el("pre", { tabindex: "0" }, el("code", {}, code)));
}

/** Copy a text, and say so on the button for a moment. */
export async function copyText(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "The browser refuses";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

function listNode(lines, depth) {
  const number = ordered(lines[0]);
  const items = [];
  let width = 0;
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && !RULE.test(line) && (!items.length || item[1].length < width)) {
      width = item[0].trimEnd().length + 1;
      items.push([line.slice(item[0].length)]);
    } else {
      items.at(-1).push(line.replace(new RegExp(`^(?:\\t| {1,${width}})`), ""));
    }
  }
  const loose = items.some((item) => item.slice(0, -1).some((line, i) => !line.trim() && item[i + 1].trim()));
  const start = number ? Number.parseInt(lines[0].trim(), 10) : 1;
  const list = el(number ? "ol" : "ul", number && start !== 1 ? { start } : {});
  for (const item of items) {
    const inner = nodes(item.join("\n"), depth + 1);
    const [first, ...rest] = inner;
    if (!loose && first?.nodeName === "P") list.append(el("li", {}, ...first.childNodes, ...rest));
    else list.append(el("li", {}, ...inner));
  }
  return list;
}

function tableNode(lines, depth) {
  const cells = (line) =>
    line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  const sides = cells(lines[1]).map((cell) => (/:$/.test(cell) ? (/^:/.test(cell) ? "center" : "right") : "left"));
  const row = (line, name) =>
    el("tr", {}, ...cells(line).map((cell, i) => el(name, { class: `to-${sides[i] ?? "left"}` }, ...inline(cell, depth))));
  const body = el("tbody", {}, ...lines.slice(2).map((line) => row(line, "td")));
  return el("div", { class: "table" }, el("table", {}, el("thead", {}, row(lines[0], "th")), body));
}

/** Return the nodes of a text with marks: code, links, emphasis, line breaks. */
function inline(text, depth) {
  if (text.length > MOST_INLINE || depth > DEEPEST) return [text];
  const found = [];
  let plain = "";
  const push = (node) => {
    if (plain) found.push(plain);
    plain = "";
    found.push(node);
  };
  let at = 0;
  while (at < text.length) {
    const [node, end] = mark(text, at, depth);
    if (node !== null) {
      push(node);
      at = end;
    } else {
      plain += text.slice(at, end);
      at = end;
    }
  }
  if (plain) found.push(plain);
  return found;
}

const LINK = /!?\[((?:[^\][\\]|\\.|\[[^\][]*\])*)\]\(\s*<?([^\s()<>]*(?:\([^\s()<>]*\)[^\s()<>]*)*)>?(?:\s+["'(][^"')]*["')])?\s*\)/y;
const ADDRESS = /<?(https?:\/\/[^\s<>"'`]+)>?/y;
const CODE = /(`+)([^]*?[^`])\1(?!`)/y;

/** Return the node that begins at a place of a text and its end, or null and the end of what is plain. */
function mark(text, at, depth) {
  const sign = text[at];
  if (sign === "\\" && at + 1 < text.length) {
    if (text[at + 1] === "\n") return [el("br"), at + 2];
    return /[!-/:-@[-`{-~]/.test(text[at + 1]) ? [document.createTextNode(text[at + 1]), at + 2] : [null, at + 1];
  }
  if (sign === "\n") return [el("br"), at + 1];
  const match = (pattern) => ((pattern.lastIndex = at), pattern.exec(text));
  if (sign === "`") {
    const code = match(CODE);
    if (code) return [el("code", {}, code[2].replace(/^ ([^]*\S[^]*) $/, "$1")), at + code[0].length];
    return [null, at + /^`+/.exec(text.slice(at))[0].length];
  }
  if (sign === "[" || (sign === "!" && text[at + 1] === "[")) {
    const link = match(LINK);
    if (link) return [linkNode(link[2], inline(link[1] || link[2], depth + 1)), at + link[0].length];
    return [null, at + 1];
  }
  if (sign === "<" || (sign === "h" && !/\w/.test(text[at - 1] ?? " "))) {
    const address = match(ADDRESS);
    if (address) {
      const url = sign === "<" ? address[1] : address[1].replace(/[.,:;!?)\]*_~]+$/, "");
      return [linkNode(url, [url]), at + (sign === "<" ? address[0].length : url.length)];
    }
    return [null, at + 1];
  }
  for (const [delimiter, name] of MARKS) {
    if (!text.startsWith(delimiter, at)) continue;
    const end = closing(text, at, delimiter);
    if (end > 0) {
      const inner = inline(text.slice(at + delimiter.length, end), depth + 1);
      return [el(name, {}, ...inner), end + delimiter.length];
    }
  }
  const plain = /[^\\\n`[!<h*_~]+/y;
  plain.lastIndex = at;
  return [null, plain.exec(text) ? plain.lastIndex : at + 1];
}

/** Return where the mark that opens at a place closes; 0 if it does not. */
function closing(text, at, delimiter) {
  const from = at + delimiter.length;
  const word = delimiter[0] === "_";
  if (!text[from] || /\s/.test(text[from]) || (word && /\w/.test(text[at - 1] ?? " "))) return 0;
  for (let end = text.indexOf(delimiter, from + 1), tries = 0; end > 0 && tries < 50; tries += 1) {
    const behind = text[end + delimiter.length] ?? " ";
    const single = delimiter.length > 1 || (behind !== delimiter && text[end - 1] !== delimiter);
    if (!/\s/.test(text[end - 1]) && single && !(word && /\w/.test(behind))) return end;
    end = text.indexOf(delimiter, end + delimiter.length);
  }
  return 0;
}

/** Return a link if its address is one of the web or of mail; else what it says, and the address as text. */
function linkNode(url, inner) {
  if (/^(https?:|mailto:)/i.test(url)) {
    return el("a", { href: url, target: "_blank", rel: "noopener noreferrer nofollow" }, ...inner);
  }
  return el("span", { class: "no-link", title: url.slice(0, 200) }, ...inner);
}
