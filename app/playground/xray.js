// Token X-ray: each token a chip coloured by its probability; a panel compares the candidates before and after
// the sampling controls and says which control cut what; a strip shows the entropy along the text.
// Takes the `trace` entries of the API as they are and computes no probability of its own.

const STAGES = ["model", "penalties and bias", "temperature", "top_k", "top_p", "min_p", "other filters"];
const GROUP = 200; // chips a container, so that the browser lays out only those in sight
const BANDS = [[0.9, "90 % and more"], [0.6, "60 to 90 %"], [0.3, "30 to 60 %"], [0.1, "10 to 30 %"], [0.01, "1 to 10 %"], [0, "under 1 %"]];

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

export function shown(text, bytes) {
  if (text === "" || text.includes("\ufffd")) return bytes.map((b) => `<${b.toString(16).padStart(2, "0")}>`).join("");
  return text.replaceAll("\n", "⏎\n").replaceAll("\t", "⇥").replaceAll(/[\u202a-\u202e\u2066-\u2069\u200e\u200f]/g, "◇");
}

const percent = (p) => (p >= 0.0995 ? `${(p * 100).toFixed(1)} %` : p >= 0.0001 ? `${(p * 100).toFixed(2)} %` : p === 0 ? "0" : p.toExponential(1));

export function band(probability) {
  return 5 - BANDS.findIndex(([least]) => probability >= least);
}

// The control that cut a candidate: the first stage at which its probability fell to nothing.
export function cutBy(stages) {
  const at = stages.findIndex((p, i) => i > 0 && p === 0 && stages[i - 1] > 0);
  return at === -1 ? "" : STAGES[at];
}

export class Xray {
  constructor(section) {
    this.entries = [];
    this.waiting = [];
    this.selected = -1;
    this.legend = make("ul", { className: "legend" }, ...BANDS.map(([, label], i) => make("li", {}, this.#sample(5 - i, label))));
    this.hint = make("p", { className: "hint", textContent: "Send something in Chat or Complete: every token appears here, coloured by how likely the model found it. Point at a token, or move with the arrow keys, to see what else it could have been and what each control cut." });
    this.canvas = make("canvas", { className: "entropy", width: 1200, height: 72 });
    this.canvas.setAttribute("role", "img");
    this.chips = make("div", { className: "chips", id: "chips" });
    this.chips.setAttribute("role", "group");
    this.chips.setAttribute("aria-label", "Tokens of the last answer");
    this.panel = make("div", { className: "inspector", id: "inspector", hidden: true, tabIndex: 0 });
    this.panel.setAttribute("role", "region");
    this.panel.setAttribute("aria-label", "The token pointed at");
    this.panel.setAttribute("aria-live", "polite");
    section.append(this.hint, this.legend, this.canvas, this.chips, this.panel);
    const pick = (event) => {
      const chip = event.target.closest(".chip");
      if (chip) this.select(Number(chip.dataset.index));
    };
    for (const kind of ["mouseover", "focusin", "click"]) this.chips.addEventListener(kind, pick);
    this.chips.addEventListener("keydown", (event) => this.#key(event));
    this.clear();
  }

  #sample(level, label) {
    const chip = make("span", { className: "chip", textContent: label });
    chip.dataset.band = level;
    return chip;
  }

  clear() {
    this.entries = [];
    this.waiting = [];
    this.selected = -1;
    this.chips.replaceChildren();
    this.panel.hidden = true;
    this.canvas.hidden = true;
    this.hint.hidden = false;
  }

  push(entries) {
    if (!entries.length) return;
    this.hint.hidden = true;
    for (const entry of entries) this.waiting.push(entry);
  }

  // Called once a frame: puts the waiting chips on the page.
  draw() {
    if (!this.waiting.length) return;
    let group = this.chips.lastElementChild;
    for (const entry of this.waiting) {
      const index = this.entries.push(entry) - 1;
      if (!group || index % GROUP === 0) {
        group = make("div", { className: "chip-group" });
        this.chips.append(group);
      }
      group.append(this.#chip(entry, index));
    }
    this.waiting = [];
    this.#entropy();
  }

  #chip(entry, index) {
    const chip = make("button", { type: "button", className: "chip", textContent: shown(entry.token, entry.bytes), tabIndex: index === 0 ? 0 : -1 });
    chip.dataset.index = index;
    chip.dataset.band = band(Math.exp(entry.logprob));
    chip.setAttribute("aria-pressed", "false");
    return chip;
  }

  #at(index) {
    return this.chips.children[Math.floor(index / GROUP)]?.children[index % GROUP];
  }

  #key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    const target = event.key === "Home" ? 0 : event.key === "End" ? this.entries.length - 1 : move ? this.selected + move : null;
    if (target === null) return;
    event.preventDefault();
    this.#at(Math.max(0, Math.min(this.entries.length - 1, target)))?.focus();
  }

  select(index) {
    const entry = this.entries[index];
    if (!entry || index === this.selected) return;
    const before = this.#at(this.selected);
    before?.setAttribute("aria-pressed", "false");
    if (before) before.tabIndex = -1;
    this.selected = index;
    const chip = this.#at(index);
    chip.setAttribute("aria-pressed", "true");
    chip.tabIndex = 0;
    this.#inspect(entry, index);
  }

  #inspect(entry, index) {
    const chance = Math.exp(entry.logprob);
    const bytes = entry.bytes.map((b) => b.toString(16).padStart(2, "0")).join(" ");
    const head = make("h2", {}, "Token ", make("bdi", { textContent: `“${shown(entry.token, entry.bytes)}”` }), ` · number ${index + 1}`);
    const facts = make("p", { className: "hint", textContent: `id ${entry.id} · ${entry.bytes.length} ${entry.bytes.length === 1 ? "byte" : "bytes"} (${bytes}) · the model gave it ${percent(chance)}, log-probability ${entry.logprob.toFixed(4)}, rank ${entry.rank + 1}${entry.entropy === undefined ? "" : ` · entropy ${entry.entropy.toFixed(2)} nats`}` });
    facts.dataset.logprob = entry.logprob;
    const body = make("tbody");
    const rows = entry.candidates.map((c) => ({ ...c, chosen: c.id === entry.id }));
    if (!rows.some((row) => row.chosen)) rows.push({ ...entry, chosen: true });
    for (const row of rows) body.append(this.#row(row));
    const columns = ["candidate", "before: the model", "after: all controls", "what happened"];
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...columns.map((name) => make("th", { textContent: name, scope: "col" })))), body);
    this.panel.replaceChildren(head, facts, table);
    this.panel.hidden = false;
  }

  #row(row) {
    const stages = row.stages?.length ? row.stages : [Math.exp(row.logprob)];
    const first = stages[0];
    const last = stages.at(-1);
    const cut = cutBy(stages);
    const bar = (p, kind) => {
      const stroke = make("span", { className: `bar ${kind}` });
      stroke.style.width = `${(p * 6).toFixed(3)}rem`;
      return make("td", { className: "bar-cell" }, stroke, ` ${percent(p)}`);
    };
    const told = cut ? `cut by ${cut}` : row.chosen ? "chosen" : last > first * 1.001 ? "more likely" : last < first * 0.999 ? "less likely" : "unchanged";
    const tr = make("tr", {}, make("td", { className: "token", textContent: shown(row.token, row.bytes) }), bar(first, "before"), bar(last, "after"), make("td", { textContent: told, title: stages.map((p, i) => `${STAGES[i] ?? i}: ${percent(p)}`).join("\n") }));
    tr.dataset.chosen = row.chosen;
    tr.dataset.cut = cut !== "";
    tr.dataset.id = row.id;
    return tr;
  }

  #entropy() {
    const values = this.entries.map((entry) => entry.entropy ?? 0);
    this.canvas.hidden = values.every((v) => v === 0);
    if (this.canvas.hidden) return;
    const { width, height } = this.canvas;
    const pen = this.canvas.getContext("2d");
    const top = Math.max(4, ...values.slice(-4096));
    const visible = values.slice(-width);
    pen.clearRect(0, 0, width, height);
    pen.fillStyle = getComputedStyle(this.canvas).getPropertyValue("--accent");
    const step = width / Math.max(visible.length, 60);
    visible.forEach((value, i) => pen.fillRect(i * step, height - (value / top) * (height - 4), Math.max(1, step - 1), (value / top) * (height - 4)));
    const mean = values.reduce((sum, v) => sum + v, 0) / values.length;
    this.canvas.setAttribute("aria-label", `Entropy along the text: ${values.length} tokens, mean ${mean.toFixed(2)} nats, highest ${Math.max(...visible).toFixed(2)}.`);
  }
}
