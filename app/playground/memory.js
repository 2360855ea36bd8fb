// Memory view: the KV blocks of the running stream as the server reports them: sinks, window, shared, freed.

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const KEEP_FREED = 6; // freed blocks shown as ghosts before they vanish into the gap
const LEGEND = [["sink", "sink: first tokens, kept for ever"], ["window", "window: newest tokens"], ["shared", "shared with other requests by prefix"], ["freed", "freed: fell out of the window"], ["newest", "being filled now"]];

// Sorts a report into cells: [{position, block, references, kind}], oldest first, plus how many positions are gone.
export function cells(report, blockSize) {
  const rows = report.blocks.filter(([choice]) => choice === 0).map(([, position, block, references]) => ({ position, block, references })).sort((a, b) => a.position - b.position);
  let gone = 0;
  rows.forEach((row, i) => {
    const before = i ? rows[i - 1].position + blockSize : 0;
    gone += Math.max(0, row.position - before);
    row.kind = row.position < report.sinks ? "sink" : row.references > 1 ? "shared" : i === rows.length - 1 ? "newest" : "window";
    row.gap = Math.max(0, row.position - before);
  });
  return { rows, gone };
}

export class Memory {
  constructor(section) {
    this.report = null;
    this.drawn = null;
    this.freed = [];
    this.live = new Map();
    this.hint = make("p", { className: "hint", textContent: "Start a stream: its cache appears here, block by block, while it runs. Choose retention “sinks” with a small window and a long max_tokens to watch an endless stream keep its first tokens, forget the middle and stay the same size." });
    this.facts = make("dl", { className: "facts", id: "memory-facts" });
    this.grid = make("div", { className: "blocks", id: "memory-blocks" });
    this.grid.setAttribute("role", "img");
    this.grid.setAttribute("aria-label", "No stream yet.");
    const legend = make("ul", { className: "legend" }, ...LEGEND.map(([kind, label]) => {
      const square = make("span", { className: "kv" });
      square.dataset.kind = kind;
      square.style.width = square.style.height = "1rem";
      return make("li", { className: "row" }, square, label);
    }));
    section.append(this.hint, this.facts, this.grid, legend);
  }

  clear() {
    this.report = this.drawn = null;
    this.freed = [];
    this.live = new Map();
    this.grid.replaceChildren();
    this.facts.replaceChildren();
    this.hint.hidden = false;
  }

  update(report) {
    this.report = { ...this.report, ...report, blocks: report.blocks ?? this.report?.blocks ?? [] };
  }

  draw() {
    if (!this.report || this.report === this.drawn || !this.report.blocks.length) return;
    this.drawn = this.report;
    this.hint.hidden = true;
    const size = this.report.block_size;
    const { rows, gone } = cells(this.report, size);
    const now = new Map(rows.map((row) => [row.position, row]));
    for (const [position, row] of this.live) if (!now.has(position)) this.freed.push(row);
    this.freed = this.freed.slice(-KEEP_FREED);
    this.live = now;
    this.grid.replaceChildren(...rows.flatMap((row) => (row.gap ? [this.#gap(row.gap), ...this.freed.map((f) => this.#cell(f, "freed", size)), this.#cell(row, row.kind, size)] : [this.#cell(row, row.kind, size)])));
    const end = rows.at(-1).position + size;
    const facts = [["position reached", `about ${end.toLocaleString("en")}`], ["blocks held", rows.length], ["tokens held, at most", (rows.length * size).toLocaleString("en")], ["tokens evicted", (this.report.evicted ?? 0).toLocaleString("en")], ["blocks shared", rows.filter((row) => row.references > 1).length]];
    this.facts.replaceChildren(...facts.map(([name, value]) => make("div", {}, make("dt", { textContent: name }), make("dd", { textContent: value }))));
    this.grid.setAttribute("aria-label", `${rows.length} blocks held, ${gone} positions freed, ${this.report.sinks} sink tokens, window ${this.report.window}.`);
  }

  #cell(row, kind, size) {
    const cell = make("div", { className: "kv", textContent: row.block, title: `block ${row.block}: positions ${row.position} to ${row.position + size - 1}, ${row.references} ${row.references === 1 ? "owner" : "owners"}` });
    cell.dataset.kind = kind;
    return cell;
  }

  #gap(count) {
    return make("span", { className: "gap", textContent: `… ${count.toLocaleString("en")} positions freed …` });
  }
}
