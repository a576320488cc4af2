// Markdown to elements: headings, paragraphs, lists, quotes, code, tables, rules; bold, italic, strike, code, links.
// Made for the text of a model, which nobody trusts: it only ever makes the elements named here, and links only to
// http, https and mailto. What is unfinished, as in a stream, is shown as it is.

import { element } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*)$/;
const RULE = /^ {0,3}([-*_])( *\1){2,} *$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const MOST_DEPTH = 12;

export function render(text) {
  const made = document.createDocumentFragment();
  blocks(text.replace(/\r\n?/g, "\n").split("\n"), made, 0);
  return made;
}

function blocks(lines, into, depth) {
  let at = 0;
  while (at < lines.length) {
    const line = lines[at];
    const fence = FENCE.exec(line);
    const heading = HEADING.exec(line);
    if (!line.trim()) {
      at += 1;
    } else if (fence) {
      at = code(lines, at + 1, fence, into);
    } else if (heading) {
      const level = Math.min(4, heading[1].length + 1);
      into.append(inline(heading[2].trim().replace(/ #+$/, ""), element(`h${level}`)));
      at += 1;
    } else if (RULE.test(line)) {
      into.append(element("hr"));
      at += 1;
    } else if (QUOTE.test(line) && depth < MOST_DEPTH) {
      const inner = [];
      while (at < lines.length && QUOTE.test(lines[at])) inner.push(QUOTE.exec(lines[at++])[1]);
      const quote = element("blockquote");
      blocks(inner, quote, depth + 1);
      into.append(quote);
    } else if (ITEM.test(line) && depth < MOST_DEPTH) {
      at = list(lines, at, into, depth);
    } else if (line.includes("|") && at + 1 < lines.length && divides(lines[at + 1])) {
      at = table(lines, at, into);
    } else {
      at = paragraph(lines, at, into);
    }
  }
}

function code(lines, at, fence, into) {
  const end = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},} *$`);
  const from = at;
  while (at < lines.length && !end.test(lines[at])) at += 1;
  const inner = element("code", {}, lines.slice(from, at).join("\n"));
  if (fence[2]) inner.dataset.language = fence[2];
  into.append(element("pre", { tabIndex: 0 }, inner));
  return at + 1;
}

function list(lines, at, into, depth) {
  const first = ITEM.exec(lines[at]);
  const indent = first[1].length;
  const ordered = /\d/.test(first[2]);
  const made = element(ordered ? "ol" : "ul");
  if (ordered && parseInt(first[2], 10) !== 1) made.start = parseInt(first[2], 10);
  while (at < lines.length) {
    const item = ITEM.exec(lines[at]);
    if (!item || item[1].length > indent + 1 || item[1].length < indent || /\d/.test(item[2]) !== ordered) break;
    const inner = [item[3]];
    at += 1;
    while (at < lines.length) {
      const line = lines[at];
      const deeper = /^ */.exec(line)[0].length > indent + 1;
      const blank = !line.trim();
      if (blank && !(at + 1 < lines.length && /^ */.exec(lines[at + 1])[0].length > indent + 1)) break;
      if (!blank && !deeper && (ITEM.test(line) || FENCE.test(line) || HEADING.test(line) || RULE.test(line))) break;
      inner.push(deeper ? line.slice(indent + 2) : line);
      at += 1;
    }
    const entry = element("li");
    blocks(inner, entry, depth + 1);
    if (entry.childNodes.length && entry.firstChild.tagName === "P") entry.firstChild.replaceWith(...entry.firstChild.childNodes);
    made.append(entry);
    while (at + 1 < lines.length && !lines[at].trim() && ITEM.test(lines[at + 1])) at += 1;
  }
  into.append(made);
  return at;
}

const cells = (line) => line.trim().replace(/^\||\|$/g, "").split("|").map((cell) => cell.trim());

const divides = (line) => line.includes("-") && cells(line).every((cell) => /^:?-+:?$/.test(cell));

function table(lines, at, into) {
  const head = element("tr");
  for (const cell of cells(lines[at])) head.append(inline(cell, element("th", { scope: "col" })));
  const body = element("tbody");
  at += 2;
  while (at < lines.length && lines[at].includes("|")) {
    const row = element("tr");
    for (const cell of cells(lines[at])) row.append(inline(cell, element("td")));
    body.append(row);
    at += 1;
  }
  into.append(element("table", {}, element("thead", {}, head), body));
  return at;
}

function paragraph(lines, at, into) {
  const from = at;
  do at += 1;
  while (
    at < lines.length && lines[at].trim() && !FENCE.test(lines[at]) && !HEADING.test(lines[at]) &&
    !QUOTE.test(lines[at]) && !RULE.test(lines[at]) && !ITEM.test(lines[at])
  );
  into.append(inline(lines.slice(from, at).join("\n"), element("p")));
  return at;
}

// code, bold, italic, strike, links, escapes; no alternative can look at more than a few thousand characters twice
const INLINE = new RegExp(
  [
    "\\\\([!-/:-@\\[-`{-~])", // 1 an escaped sign
    "(?<!`)(`{1,8})([^`\\n]|[^`][^\\n]{0,2000}?[^`])\\2(?!`)", // 2, 3 code
    "\\*\\*(?=\\S)([^*\\n]+?)\\*\\*", // 4 bold
    "(?<!\\w)__(?=\\S)([^_\\n]+?)__(?!\\w)", // 5 bold
    "\\*(?=\\S)([^*\\n]+?)\\*", // 6 italic
    "(?<!\\w)_(?=\\S)([^_\\n]+?)_(?!\\w)", // 7 italic
    "~~(?=\\S)([^~\\n]+?)~~", // 8 strike
    "\\[([^\\[\\]\\n]{1,300})\\]\\(([^()\\s]{1,2000})(?: \"[^\"\\n]*\")?\\)", // 9, 10 link
    "(https?://[^\\s<>\"')\\]]{1,2000})", // 11 bare link
  ].join("|"),
  "g",
);

function inline(text, into, depth = 0) {
  let from = 0;
  for (const match of text.matchAll(INLINE)) {
    append(into, text.slice(from, match.index));
    from = match.index + match[0].length;
    const [, sign, , quoted, bold, bold2, italic, italic2, strike, label, target, bare] = match;
    if (sign) into.append(sign);
    else if (quoted !== undefined) into.append(element("code", {}, quoted.replace(/^ (.*) $/, "$1")));
    else if (bold || bold2) into.append(nested(bold || bold2, "strong", depth));
    else if (italic || italic2) into.append(nested(italic || italic2, "em", depth));
    else if (strike) into.append(nested(strike, "del", depth));
    else into.append(link(target ?? bare, label ?? bare, match[0], depth));
  }
  append(into, text.slice(from));
  return into;
}

const nested = (text, tag, depth) => (depth > 4 ? text : inline(text, element(tag), depth + 1));

function link(target, label, source, depth) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return source;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return source;
  const made = element("a", { href: url.href, rel: "noopener noreferrer nofollow", target: "_blank" });
  if (depth > 0 || label === target) made.append(label);
  else inline(label, made, 5);
  return made;
}

function append(into, text) {
  if (text) into.append(text);
}
