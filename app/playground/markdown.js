// Markdown of an answer, shown safely and at constant cost: finished blocks are rendered once, the open tail
// as plain text. Everything passes through DOMPurify; nothing here sets innerHTML.

import { marked } from "./vendor/marked.esm.js";

const RULES = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "h1", "h2", "h3", "h4", "h5", "h6", "strong", "em", "del", "code", "pre", "blockquote",
    "ul", "ol", "li", "table", "thead", "tbody", "tr", "th", "td", "a", "sub", "sup",
  ],
  ALLOWED_ATTR: ["href", "title", "start", "align"],
  ALLOWED_URI_REGEXP: /^https?:/i,
  RETURN_DOM_FRAGMENT: true,
};
const LONGEST_BLOCK = 20000; // characters: a longer block stays plain text, parsing it would stall the page

// Raw HTML in an answer is text, not markup: the reader sees the tags.
marked.use({ gfm: true, renderer: { html: ({ text }) => escape(text), image: ({ text }) => escape(text) } });

function escape(text) {
  return text.replace(/[&<>"']/g, (c) => `&#${c.charCodeAt(0)};`);
}

function render(text) {
  const block = document.createElement("div");
  block.className = "block";
  if (text.length > LONGEST_BLOCK) {
    block.classList.add("tail");
    block.textContent = text;
    return block;
  }
  block.append(window.DOMPurify.sanitize(marked.parse(text), RULES));
  for (const link of block.querySelectorAll("a")) Object.assign(link, { target: "_blank", rel: "noopener noreferrer" });
  for (const pre of block.querySelectorAll("pre")) pre.tabIndex = 0;
  return block;
}

// Where the first finished block of `text` ends: after a blank line that is not inside a code fence; -1 if none.
export function blockEnd(text) {
  let fence = "";
  let start = 0;
  for (let end = text.indexOf("\n"); end !== -1; start = end + 1, end = text.indexOf("\n", start)) {
    const line = text.slice(start, end);
    const mark = /^\s{0,3}(```+|~~~+)/.exec(line)?.[1] ?? "";
    if (mark && !fence) fence = mark;
    else if (mark && mark.startsWith(fence)) fence = "";
    else if (!fence && line.trim() === "" && text.slice(0, start).trim() !== "") return end + 1;
  }
  return -1;
}

export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.open = "";
    this.tail = document.createElement("div");
    this.tail.className = "tail";
    this.node = document.createTextNode("");
    this.tail.append(this.node);
    element.append(this.tail);
  }

  push(text) {
    this.open += text;
    this.node.appendData(text);
    if (!text.includes("\n")) return;
    for (let end = blockEnd(this.open); end !== -1; end = blockEnd(this.open)) {
      this.tail.before(render(this.open.slice(0, end)));
      this.open = this.open.slice(end);
      this.node.data = this.open;
    }
  }

  finish() {
    if (this.open.trim() !== "") this.tail.before(render(this.open));
    this.tail.remove();
    this.open = "";
  }
}
