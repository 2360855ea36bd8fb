// Sends a conversation or a text to the server and shows the answer as it comes: batched once a frame, so that
// twenty thousand tokens stay smooth. Hands each token's trace to the X-ray and each block report to the memory view.

import { ServerError, stream } from "./api.js";
import { MarkdownView } from "./markdown.js";

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

// Puts text on the page at most once a frame, whatever the number of chunks.
class FrameQueue {
  constructor(write) {
    this.write = write;
    this.text = "";
    this.booked = false;
  }

  push(text) {
    this.text += text;
    if (this.booked) return;
    this.booked = true;
    requestAnimationFrame(() => this.flush());
  }

  flush() {
    this.booked = false;
    const { text } = this;
    this.text = "";
    this.write(text);
  }
}

export function message(role, content) {
  const body = make("div", { className: "body" });
  const box = make("article", { className: `message ${role}` }, make("h2", { textContent: role === "user" ? "You" : role === "system" ? "System" : "Model" }), body);
  if (role === "user" || role === "system") body.textContent = content;
  else if (content) {
    const view = new MarkdownView(body);
    view.push(content);
    view.finish();
  }
  return { box, body };
}

// One answer on its way. `views`: {xray, memory, progress}; `target`: where text goes, {push, finish, reason}.
export class Answer {
  constructor(target, views) {
    this.target = target;
    this.views = views;
    this.abort = new AbortController();
    this.text = "";
    this.tokens = 0;
    this.finish = "";
    this.usage = null;
    this.queue = new FrameQueue((text) => {
      if (text) target.push(text);
      views.xray.draw();
      views.memory.draw();
      views.progress(this.tokens, performance.now() - this.start, this.usage);
    });
  }

  stop() {
    this.abort.abort();
  }

  // Runs to the end; returns "" or the sentence to show.
  async run(path, body) {
    this.start = performance.now();
    this.views.xray.clear();
    this.views.memory.clear();
    try {
      for await (const chunk of stream(path, body, this.abort.signal)) this.#take(chunk);
    } catch (error) {
      if (error.name === "AbortError") this.finish = "stopped";
      else return this.#failed(error);
    } finally {
      this.queue.flush();
      this.target.finish();
    }
    return "";
  }

  #failed(error) {
    this.finish = "error";
    if (error instanceof ServerError) return error.message;
    return "The connection to the server was lost: check that it runs, then send again.";
  }

  #take(chunk) {
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.everstream) this.views.memory.update(chunk.everstream);
    const choice = chunk.choices?.[0];
    if (choice) {
      if (choice.finish_reason) this.finish = choice.finish_reason;
      if (choice.trace) {
        this.views.xray.push(choice.trace);
        this.tokens += choice.trace.length;
      }
      const reason = choice.delta?.reasoning_content;
      if (reason) this.target.reason(reason);
      const text = choice.delta?.content ?? choice.text ?? "";
      this.text += text;
      if (!choice.trace && text) this.tokens += 1;
      this.queue.push(text);
    } else this.queue.push("");
  }
}

export function footer(answer, elapsed) {
  const used = answer.usage;
  const tokens = used?.completion_tokens ?? answer.tokens;
  const parts = [`${tokens} tokens`, `${(tokens / Math.max(elapsed, 1) * 1000).toFixed(0)} a second`];
  const cached = used?.prompt_tokens_details?.cached_tokens;
  if (used) parts.push(`${used.prompt_tokens} in the prompt${cached ? `, ${cached} from the cache` : ""}`);
  if (used?.tokens_evicted) parts.push(`${used.tokens_evicted} evicted`);
  parts.push({ stop: "ended by itself", length: "ended at max_tokens or the context", stopped: "stopped by you", error: "ended by an error" }[answer.finish] ?? answer.finish);
  return parts.join(" · ");
}

export function chatTarget(list) {
  const { box, body } = message("assistant", "");
  list.append(box);
  const view = new MarkdownView(body);
  const near = () => list.scrollHeight - list.scrollTop - list.clientHeight < 120;
  let thoughts = null;
  return {
    box,
    push(text) {
      const follow = near();
      view.push(text);
      if (follow) list.scrollTop = list.scrollHeight;
    },
    reason(text) {
      if (!thoughts) {
        thoughts = make("p", { className: "reasoning" });
        body.before(thoughts);
      }
      thoughts.append(text);
    },
    finish: () => view.finish(),
  };
}

export function textTarget(element) {
  const node = document.createTextNode("");
  element.replaceChildren(node);
  return {
    push(text) {
      const follow = element.scrollHeight - element.scrollTop - element.clientHeight < 120;
      node.appendData(text);
      if (follow) element.scrollTop = element.scrollHeight;
    },
    reason: () => undefined,
    finish: () => undefined,
  };
}
