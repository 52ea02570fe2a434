// The status of the server: charts and tables of what changes, and tables of what stays.

import { bar, drawBar, LineChart } from "./charts.js";

const GAP_SECONDS = 5; // between two samples, after which a line is interrupted
const PARTS = [
  ["schedule", "four"],
  ["inputs", "two"],
  ["forward", "one"],
  ["sample", "three"],
];
const byId = (id) => document.getElementById(id);
const number = (value, digits = 0) =>
  value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });
const percent = (value) => `${number(value * 100, 1)} %`;

export function bytes(count) {
  const gib = count / 2 ** 30;
  return gib >= 1 ? `${number(gib, 2)} GiB` : `${number(count / 2 ** 20)} MiB`;
}

// Shows rows of a label, a value, and the class of the line that has this value in the chart.
function fill(id, rows) {
  const body = byId(id).tBodies[0];
  body.replaceChildren(
    ...rows.map(([label, value, line]) => {
      const row = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      if (line) {
        const swatch = document.createElement("span");
        swatch.className = `swatch ${line}`;
        head.append(swatch);
      }
      head.append(label);
      row.append(head, cell(value));
      return row;
    }),
  );
}

function cell(value) {
  const made = document.createElement("td");
  made.textContent = String(value);
  return made;
}

export class Status {
  constructor() {
    const chart = (id, ...more) => new LineChart(byId(`${id}-chart`), byId(`${id}-scale`), ...more);
    this.speed = chart("speed", ["one", "two"], number);
    this.load = chart("load", ["one", "two"], number);
    this.cache = chart("cache", ["one"], (share) => `${number(share * 100)} %`, 1);
    this.charts = [this.speed, this.load, this.cache];
    this.before = null;
    this.beforeSteps = null;
    this.broken = false;
  }

  // Interrupts the lines at the next sample: nothing was measured meanwhile.
  interrupt() {
    this.broken = true;
  }

  show(live, facts) {
    const before = this.before;
    if (before && live.at === before.at) return; // the server takes at most two samples a second
    const seconds = before ? live.at - before.at : 0;
    if (this.broken || seconds < 0 || seconds > GAP_SECONDS) {
      if (before) this.charts.forEach((chart) => chart.push(null));
      this.broken = false;
      this.before = null;
    }
    this.showRequests(live.requests, this.before?.requests, seconds, facts);
    this.showSteps(live.steps);
    this.showMemory(live.memory, facts);
    this.before = live;
  }

  showRequests(now, before, seconds, facts) {
    for (const id of ["speed", "load", "cache"]) byId(`${id}-chart`).toggleAttribute("hidden", !now);
    if (!now) {
      const why = facts.metrics?.on === false ? "off (--disable-log-stats)" : "none so far";
      for (const id of ["speed", "load", "cache"]) fill(id, [["Metrics of vLLM", why]]);
      return;
    }
    const perSecond = (name) => (before && seconds > 0 ? Math.max(now[name] - before[name], 0) / seconds : null);
    const [generated, prompts] = [perSecond("generated_tokens"), perSecond("prompt_tokens")];
    this.speed.push([generated, prompts]);
    this.load.push([now.running, now.waiting]);
    this.cache.push([now.kv_cache_usage]);
    const shown = (value) => (value === null ? "–" : number(value, value < 100 ? 1 : 0));
    fill("speed", [
      ["Generated", shown(generated), "one"],
      ["Prompts", shown(prompts), "two"],
      ["Generated since the start", number(now.generated_tokens)],
    ]);
    fill("load", [
      ["Running", number(now.running), "one"],
      ["Waiting", number(now.waiting), "two"],
    ]);
    fill("cache", [
      ["In use", percent(now.kv_cache_usage), "one"],
      ["Prefix hits", now.prefix_queries ? percent(now.prefix_hits / now.prefix_queries) : "none looked up"],
    ]);
  }

  // Shows the mean of the steps since the last sample with steps.
  showSteps(now) {
    byId("step-bar").toggleAttribute("hidden", !now);
    if (!now) {
      fill("step", []);
      byId("step-note").textContent = "This server does not measure the parts of its steps.";
      return;
    }
    const before = this.beforeSteps;
    if (before && now.count === before.count) {
      byId("step-note").textContent = "No steps at the moment: these are the last ones.";
      return;
    }
    this.beforeSteps = now;
    const count = now.count - (before?.count ?? 0);
    if (!(count > 0)) {
      byId("step-note").textContent = "No steps so far.";
      return;
    }
    const parts = PARTS.map(([part, line]) => {
      const seconds = (now.seconds[part] ?? 0) - (before?.seconds[part] ?? 0);
      // An engine with several ranks has one scheduler.
      const steps = part === "schedule" ? now.scheduled - (before?.scheduled ?? 0) : count;
      return [part, line, steps > 0 ? (Math.max(seconds, 0) / steps) * 1000 : 0];
    });
    const whole = parts.reduce((sum, [, , milliseconds]) => sum + milliseconds, 0);
    drawBar(byId("step-bar"), parts.map(([, line, milliseconds]) => [line, milliseconds]), whole);
    fill("step", [
      ...parts.map(([part, line, milliseconds]) => [part, `${number(milliseconds, 2)} ms`, line]),
      ["together", `${number(whole, 2)} ms`],
      ["replayed from a graph, of all steps", percent(now.count ? now.replayed / now.count : 0)],
      ...Object.entries(now.eager).filter(([, steps]) => steps > 0)
        .map(([reason, steps]) => [`eager: ${reason || "no reason given"}`, number(steps)]),
    ]);
    byId("step-note").textContent = "";
  }

  showMemory(ranks, facts) {
    const place = byId("memory");
    const measured = ranks.length > 0;
    if (!measured && this.memoryShown) return; // what was measured at the start does not change
    const shown = measured ? ranks : (facts.ranks ?? []).map((rank) => ({ rank: rank.rank, ...rank.memory }));
    place.replaceChildren(
      ...shown.flatMap((rank) => {
        const of = shown.length > 1 ? `Rank ${rank.rank}: ` : "";
        return measured ? usedOf(rank, of) : [budgetOf(rank, of)];
      }),
    );
    byId("memory-note").textContent = measured
      ? ""
      : "Measured at the start. This server does not measure the memory in use while it runs.";
    this.memoryShown = !measured;
  }

  // Shows what stays the same while the server runs.
  describe(facts) {
    const { model, device, versions = {}, ranks = [], options = [], configuration = [] } = facts;
    byId("served-model").textContent = model ? model.names.join(", ") : "";
    byId("served-device").textContent = device ? ` on ${device.name}` : "";
    document.title = model ? `${model.names[0]} – Backplane` : "Backplane";
    fill("server", [
      ...(model
        ? [
            ["Model", model.names.join(", ")],
            ["Format", model.bytes ? `${model.format}, ${bytes(model.bytes)}` : model.format],
            ["Computes in", model.dtype],
            ["Context", `${number(model.context)} tokens`],
          ]
        : []),
      ...(device ? [["Device", device.name], ["Chosen because", device.reason]] : []),
      ...ranks.map((rank) => [ranks.length > 1 ? `Card of rank ${rank.rank}` : "Card", rank.card]),
      ...Object.entries(versions),
      ...facts.unknown.map((name) => [name, "not known; the log has the reason"]),
    ]);
    const operators = ranks[0]?.operators ?? [];
    const kernels = operators.filter((line) => line.implementation === "kernel").length;
    byId("operators-summary").textContent = `${kernels} by kernel, ${operators.length - kernels} by reference`;
    byId("operators").tBodies[0].replaceChildren(
      ...operators.map((line) => {
        const row = document.createElement("tr");
        row.append(...["operator", "family", "implementation", "provider", "reason"].map((key) => cell(line[key])));
        return row;
      }),
    );
    const patches = ranks[0]?.patches ?? [];
    const off = Object.entries(ranks[0]?.switched_off ?? {});
    byId("patches-summary").textContent = `${patches.length} of vLLM, ${off.length} fast paths switched off`;
    fill("patches", [
      ...patches.map(({ name, state }) => [name, state]),
      ...off.map(([name, why]) => [`fast path ${name}`, `switched off: ${why}`]),
    ]);
    byId("options-summary").textContent = options.length ? `${options.length} set` : "all at their defaults";
    fill("options", options.map(({ name, value, source }) => [name, `${value} (${source})`]));
    fill("configuration", configuration);
  }
}

function usedOf({ total, used, peak }, of) {
  const drawn = bar();
  drawBar(drawn, [["one", used ?? 0]], total ?? used ?? 0);
  return [drawn, table([[`${of}In use`, used], [`${of}Peak`, peak], [`${of}Total`, total]])];
}

function budgetOf({ total, free_at_start: free, allowed }, of) {
  return table([[`${of}Total`, total], [`${of}Free before the start`, free], [`${of}For weights and KV cache`, allowed]]);
}

function table(rows) {
  const made = document.createElement("table");
  const body = made.createTBody();
  for (const [label, count] of rows) {
    if (count === null || count === undefined) continue;
    const row = body.insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = label;
    row.append(head, cell(bytes(count)));
  }
  return made;
}
