// Conversations kept in this browser: a bounded list in localStorage, exported and imported as JSON.
// A conversation: {id, title, mode: "chat" | "complete", messages: [{role, content}], updated}.

const PLACE = "everstream.conversations";
const LIMIT = 200;
const ROLES = new Set(["system", "user", "assistant"]);

export class Conversations {
  constructor(storage = localStorage) {
    this.storage = storage;
    this.all = this.#load();
    this.current = this.all[0] ?? this.#fresh();
  }

  #fresh() {
    return { id: crypto.randomUUID?.() ?? String(Math.random()).slice(2), title: "New conversation", mode: "chat", messages: [], updated: Date.now() };
  }

  #load() {
    try {
      return clean(JSON.parse(this.storage.getItem(PLACE) ?? "[]"));
    } catch {
      return []; // damaged storage must not lock the page: start empty
    }
  }

  save() {
    const { current } = this;
    current.updated = Date.now();
    const first = current.messages.find((message) => message.role === "user");
    if (first) current.title = first.content.slice(0, 60) || current.title;
    if (!this.all.includes(current) && current.messages.length) this.all.unshift(current);
    this.all.length = Math.min(this.all.length, LIMIT);
    try {
      this.storage.setItem(PLACE, JSON.stringify(this.all));
    } catch {
      return "This browser's storage is full: export and delete some conversations.";
    }
    return "";
  }

  start() {
    this.current = this.#fresh();
    return this.current;
  }

  open(id) {
    this.current = this.all.find((one) => one.id === id) ?? this.current;
    return this.current;
  }

  remove(id) {
    this.all = this.all.filter((one) => one.id !== id);
    if (this.current.id === id) this.current = this.all[0] ?? this.#fresh();
    this.storage.setItem(PLACE, JSON.stringify(this.all));
  }

  exported() {
    return JSON.stringify({ everstream: 1, conversations: this.all }, null, 2);
  }

  // Adds the conversations of an exported file; returns how many; throws Error with a sentence.
  imported(text) {
    let data;
    try {
      data = JSON.parse(text);
    } catch {
      throw new Error("This file is no JSON: choose one that was exported here.");
    }
    const found = clean(data?.conversations);
    if (!found.length) throw new Error("This file holds no conversations: choose one that was exported here.");
    const known = new Set(this.all.map((one) => one.id));
    const added = found.filter((one) => !known.has(one.id));
    this.all = [...added, ...this.all].slice(0, LIMIT);
    this.storage.setItem(PLACE, JSON.stringify(this.all));
    return added.length;
  }
}

// Only what has the right shape gets in; everything else is dropped.
function clean(list) {
  if (!Array.isArray(list)) return [];
  return list.filter((one) => typeof one?.id === "string" && Array.isArray(one.messages)).map((one) => ({
    id: one.id,
    title: String(one.title ?? "Conversation").slice(0, 60),
    mode: one.mode === "complete" ? "complete" : "chat",
    updated: Number(one.updated) || 0,
    messages: one.messages.filter((m) => ROLES.has(m?.role) && typeof m.content === "string").map(({ role, content }) => ({ role, content })),
  })).slice(0, LIMIT);
}
