// Live service view: small charts over the engine's own counters, from the server's event feed.

import { feed } from "./api.js";

const make = (tag, properties = {}, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};
const LENGTH = 240; // points kept a series: two minutes at two a second, or as many steps
const seconds = (v) => (v === null || v === undefined ? "–" : v < 1 ? `${(v * 1000).toFixed(v < 0.01 ? 1 : 0)} ms` : `${v.toFixed(2)} s`);
const count = (v) => (v ?? 0).toLocaleString("en", { maximumFractionDigits: 1 });
const share = (v) => `${((v ?? 0) * 100).toFixed(1)} %`;

// Each chart: id, title, series [[label, field of the snapshot]], and how to print a value.
export const CHARTS = [
  ["requests", "Requests", [["running", "running"], ["waiting", "waiting"]], count],
  ["tokens", "Tokens a second", [["generated", "generated_per_second"], ["prompt", "prompt_per_second"]], count],
  ["first", "Time to first token", [["median", "first_token_p50"], ["90 %", "first_token_p90"]], seconds],
  ["gap", "Time between tokens", [["median", "inter_token_p50"], ["90 %", "inter_token_p90"]], seconds],
  ["batch", "Batch of each step", [["prefill tokens", "prefill_tokens"], ["decode rows", "decode_rows"]], count],
  ["step", "Time of each step", [["step", "seconds"]], seconds],
  ["cache", "KV cache in use", [["in use", "kv_usage"]], share],
  ["prefix", "Prefix hits, tokens a second", [["hits", "prefix_hits_per_second"]], count],
  ["evicted", "Evicted tokens a second", [["evicted", "evicted_per_second"]], count],
];
export const TOTALS = [["preemptions", "preemptions"], ["worker restarts", "restarts"], ["streams resumed", "resumed"], ["tokens evicted", "tokens_evicted"], ["tokens generated", "tokens_generated"]];
const COLOURS = ["--accent", "--sink"];
const BY_STEP = new Set(["batch", "step"]); // these charts have a point a step, the others a point a snapshot
const SUMS = ["running", "waiting", "blocks_total", "blocks_used", "prefix_hits", "preemptions", "tokens_evicted", "prompt_tokens_computed", "tokens_sampled"];

// One snapshot of the feed as flat numbers: sums over the workers, rates against the snapshot before.
export function flatten(raw, before, elapsed) {
  const flat = { restarts: raw.restarts, resumed: raw.resumed, tokens_generated: raw.tokens };
  for (const name of SUMS) flat[name] = Object.values(raw.workers).reduce((sum, worker) => sum + (worker[name] ?? 0), 0);
  const rate = (name) => (before && elapsed > 0 ? Math.max(0, flat[name] - before[name]) / elapsed : 0);
  flat.generated_per_second = rate("tokens_sampled");
  flat.prompt_per_second = rate("prompt_tokens_computed");
  flat.prefix_hits_per_second = rate("prefix_hits");
  flat.evicted_per_second = rate("tokens_evicted");
  flat.kv_usage = flat.blocks_total ? flat.blocks_used / flat.blocks_total : 0;
  for (const [name, quantiles] of [["first_token", raw.first_token_seconds], ["inter_token", raw.inter_token_seconds]]) {
    flat[`${name}_p50`] = quantiles.p50;
    flat[`${name}_p90`] = quantiles.p90;
  }
  return flat;
}

class Chart {
  constructor(box, [id, title, series, print]) {
    this.unit = BY_STEP.has(id) ? "" : " s";
    this.series = series;
    this.print = print;
    this.data = [[], ...series.map(() => [])];
    this.note = make("p");
    this.root = make("figure", { className: "chart", id: `chart-${id}` }, make("h2", { textContent: title }));
    this.root.setAttribute("role", "group");
    this.root.setAttribute("aria-label", title);
    this.plotBox = make("div");
    this.root.append(this.plotBox, this.note);
    box.append(this.root);
    this.plot = null;
  }

  #build() {
    const style = getComputedStyle(document.documentElement);
    const axis = { stroke: style.getPropertyValue("--quiet"), grid: { stroke: style.getPropertyValue("--line"), width: 1 }, size: 66, font: "11px system-ui" };
    this.plot = new window.uPlot({
      width: Math.max(220, this.root.clientWidth - 22), height: 132, cursor: { show: false }, legend: { show: false },
      scales: { x: { time: false }, y: { range: (_plot, low, high) => [Math.min(0, low ?? 0), Math.max(high ?? 1, 1e-3) * 1.05] } },
      axes: [{ ...axis, size: 32, values: (_plot, ticks) => ticks.map((t) => `${Math.round(t)}${this.unit}`) }, { ...axis, values: (_plot, ticks) => ticks.map((t) => this.print(t)) }],
      series: [{}, ...this.series.map(([label], i) => ({ label, stroke: style.getPropertyValue(COLOURS[i]), width: 2, points: { show: false } }))],
    }, this.data, this.plotBox);
  }

  push(at, snapshot) {
    this.data[0].push(at);
    this.series.forEach(([, name], i) => this.data[i + 1].push(snapshot[name] ?? null));
    for (const values of this.data) if (values.length > LENGTH) values.shift();
    this.note.textContent = this.series.map(([label, name]) => `${label} ${this.print(snapshot[name])}`).join(" · ");
  }

  draw() {
    if (!this.plot) this.#build();
    this.plot.setData(this.data);
  }

  rebuild() {
    this.plot?.destroy();
    this.plot = null;
  }
}

export class Live {
  constructor(section, onStatus) {
    this.section = section;
    this.onStatus = onStatus;
    this.totals = make("dl", { className: "facts", id: "live-totals" });
    const box = make("div", { className: "charts" });
    section.append(this.totals, box);
    this.charts = CHARTS.map((chart) => new Chart(box, chart));
    this.started = performance.now();
    this.taken = 0;
    this.snapshot = null;
    const again = () => this.charts.forEach((chart) => chart.rebuild());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    addEventListener("resize", again);
  }

  // Follows the feed for ever; after a loss tries again with growing pauses, and says so.
  async follow() {
    for (let pause = 500; ; pause = Math.min(pause * 2, 8000)) {
      try {
        for await (const snapshot of feed("live")) {
          pause = 500;
          this.#take(snapshot);
        }
        this.onStatus("lost", "The live feed ended: trying again.");
      } catch (error) {
        if (error.status === 401) this.onStatus("locked", error.message);
        else this.onStatus("lost", "The connection to the server is lost: trying again.");
      }
      await new Promise((resolve) => setTimeout(resolve, pause));
    }
  }

  #take(raw) {
    const at = (performance.now() - this.started) / 1000;
    const snapshot = flatten(raw, this.snapshot, at - this.taken);
    this.taken = at;
    for (const chart of this.charts) {
      if (chart.unit) chart.push(at, snapshot);
      else for (const step of raw.steps) chart.push(step.number, step);
    }
    this.onStatus(raw.ready ? "ready" : "restarting", raw.ready ? "" : "The worker is loading or restarting: open streams go on when it is back.");
    this.snapshot = snapshot;
    if (!this.section.hidden) this.draw();
  }

  draw() {
    if (!this.snapshot) return;
    for (const chart of this.charts) chart.draw();
    this.totals.replaceChildren(...TOTALS.map(([label, name]) => make("div", {}, make("dt", { textContent: label }), make("dd", { textContent: count(this.snapshot[name]) }))));
  }
}
