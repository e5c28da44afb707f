"use strict";
// Memory over time: what is allocated at every sampled moment, by category, module, stack or single allocation.
profkit.started.push((async () => {
const { byId, element, button, copyText } = profkit;
const memory = await profkit.readMemory();
if (!memory) return;
byId("memory-chart").hidden = false;
byId("memory-picture").style.display = "none";
const {
  data, state, count, moments, seconds, allocated, reserved, modes, shapes, colours,
  stackOf, formatBytes, formatTime, formatSpan, layOut, xs, css, colourOf, isHidden, isShown, inModule, cumulated, UNITS,
} = memory;
const { shadePhases, namePhases, drawLayers, drawLines, drawShapes, drawMark, drawPeak } = profkit.paintMemory(memory);

const chart = byId("chart");
let plot = null;
const timing = { draws: [], ready: 0 };
profkit.memory = { timing, get plot() { return plot; }, state, data, modes, shapes, allocated };

const build = (keep) => {
  const host = chart;
  const range = keep && plot ? [plot.valToIdx(plot.scales.x.min), plot.valToIdx(plot.scales.x.max)] : null;
  if (plot) plot.destroy();
  state.layers = state.mode === "allocation" ? [] : cumulated(modes[state.mode]);
  state.layout = null;
  const text = css("--text"), line = css("--line");
  const top = 1.08 * Math.max(reserved.reduce((a, b) => Math.max(a, b), 0), 1);
  const axis = { stroke: text, grid: { stroke: line, width: 1 }, ticks: { stroke: line, width: 1 }, font: "12px system-ui, sans-serif" };
  const options = {
    width: host.clientWidth, height: host.clientHeight,
    legend: { show: false },
    cursor: { drag: { x: true, y: false, setScale: true }, points: { show: false } },
    scales: { x: { time: false }, y: { range: [0, top] } },
    axes: [
      { ...axis, size: 30, space: 84, labelSize: 20, labelFont: "12px system-ui, sans-serif", label: state.axis === "time" ? "time since the first event" : "recorded allocator event", values: (u, ticks) => ticks.map((tick) => state.axis === "time" ? tickTime(tick, ticks) : tick.toLocaleString("en")) },
      { ...axis, size: 74, splits: (u, i, min, max) => byteTicks(max), values: (u, ticks) => ticks.map(formatTick) },
    ],
    // uPlot keeps scales, axes, cursor and zoom; what is stacked is drawn below, a column of pixels at a time.
    series: [{}, { paths: () => null, points: { show: false } }],
    hooks: {
      drawClear: [() => { timing.began = performance.now(); }, shadePhases],
      drawAxes: [drawLayers, drawShapes, drawLines, namePhases],
      draw: [drawMark, drawPeak, () => { timing.draws.push(performance.now() - timing.began); }],
      setCursor: [hover],
    },
  };
  plot = new uPlot(options, [xs(), allocated], host);
  if (range) plot.setScale("x", { min: xs()[range[0]], max: xs()[range[1]] });
  showLegend();
};

const tickTime = (tick, ticks) => {
  const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1;
  const largest = Math.max(...ticks.filter((one) => one != null));
  return largest >= 1 ? tick.toFixed(Math.max(Math.ceil(-Math.log10(step) - 1e-9), 0)) + " s" : (tick * 1e3).toFixed(Math.max(Math.ceil(-Math.log10(step * 1e3) - 1e-9), 0)) + " ms";
};
const byteTicks = (max) => {
  let step = 2 ** Math.floor(Math.log2(Math.max(max, 1) / 4));
  if (max / step > 7) step *= 2;
  const found = [];
  for (let tick = 0; tick <= max; tick += step) found.push(tick);
  return found;
};
const formatTick = (value) => {
  for (const [size, unit] of UNITS) if (value >= size) return +(value / size).toFixed(3) + " " + unit;
  return value ? value + " B" : "0";
};

const rows = () => {
  const mode = state.mode === "allocation" ? "category" : state.mode;
  return modes[mode].map((one, at) => ({ name: one.name, colour: colourOf(mode, at), values: one.values }));
};

let legendRows = [];
const showLegend = () => {
  legendRows = rows().map((row) => {
    const item = element("li"), swatch = element("span", "", "swatch"), value = element("span", "", "value");
    const toggle = button("", () => {
      if (!state.hidden.delete(row.name)) state.hidden.add(row.name);
      build(true);
    });
    swatch.style.background = row.colour;
    toggle.append(swatch, element("span", row.name, "name"), value);
    toggle.title = row.name;
    toggle.setAttribute("aria-pressed", String(!isHidden(row.name)));
    item.append(toggle);
    return { item, toggle, value, row };
  });
  byId("legend").replaceChildren(...legendRows.map((one) => one.item).reverse());
  showMoment(state.pinned ? state.at : data.peak, -1);
  if (!state.pinned) showDetail(null);
};

const when = (at) => `${data.has_times ? formatTime(seconds[at]) + ", " : ""}event ${moments[at].toLocaleString("en")}`;
const signed = (value) => value > 0 ? `+${formatBytes(value)}` : value < 0 ? `−${formatBytes(-value)}` : "0 B";
const showMoment = (at, hot) => {
  state.at = at;
  const phase = data.phases.find((one) => moments[at] > one.first && moments[at] <= one.last);
  const compared = state.mark >= 0 && state.mark !== at;
  byId("moment").textContent = compared
    ? `From ${when(state.mark)} to ${when(at)}: ${signed(allocated[at] - allocated[state.mark])}`
    : `${at === data.peak ? "Peak: " : ""}${when(at)}${phase ? ", " + phase.name : ""} — ${formatBytes(allocated[at])} of ${formatBytes(reserved[at])} reserved`;
  legendRows.forEach((one, number) => {
    one.value.textContent = compared ? signed(one.row.values[at] - one.row.values[state.mark]) : formatBytes(one.row.values[at]);
    one.toggle.classList.toggle("hot", number === hot);
  });
};

// Which of the largest allocations live at one moment and not at the other, equal ones as one line.
const listChange = (there, missing) => {
  const found = new Map();
  for (const shape of shapes) {
    const lives = (at) => shape.first <= at && at < shape.end;
    if (!lives(there) || lives(missing) || !isShown(shape)) continue;
    const key = `${shape.bytes} ${shape.category} ${shape.owner || shape.label}`;
    found.set(key, { shape, times: (found.get(key) || { times: 0 }).times + 1 });
  }
  return [...found.values()].sort((one, other) => other.times * other.shape.bytes - one.times * one.shape.bytes).slice(0, 8)
    .map(({ shape, times }) => `${times > 1 ? `${times} × ` : ""}${formatBytes(shape.bytes)} ${shape.category}, ${shape.owner || shape.label}`);
};
const showChange = (at) => {
  const panel = byId("detail");
  panel.replaceChildren();
  for (const [title, lines] of [["Came", listChange(at, state.mark)], ["Went", listChange(state.mark, at)]]) {
    panel.append(element("strong", title), ...(lines.length ? lines : ["none of the largest allocations"]).map((line) => element("div", line)));
  }
};

const STACK_SHOWN = 9;
const showDetail = (content) => {
  const panel = byId("detail");
  panel.replaceChildren();
  if (!content) {
    panel.append(element("div", "Point at the chart to see what it is, its size, its lifetime and its stack; click to pin it."));
    return;
  }
  panel.append(element("strong", content.title), ...content.lines.map((line) => element("div", line)));
  if (!content.stack.length) return;
  const list = element("ol", undefined, "stack");
  list.append(...content.stack.slice(0, state.pinned ? undefined : STACK_SHOWN).map((frame) => element("li", frame)));
  panel.append(list);
  if (state.pinned) {
    const copy = button("Copy this stack", () => copyText(content.stack.join("\n"), copy));
    panel.append(copy);
  }
};

const describeShape = (shape) => {
  const born = shape.born_us === null ? "allocated before the first event" : `from ${formatSpan(shape.born_us)}`;
  const life = shape.freed_us !== null && shape.born_us !== null ? ` for ${formatSpan(shape.freed_us - shape.born_us)}`
    : shape.freed_event === null ? " to the end" : "";
  return {
    title: shape.owner || shape.label,
    lines: [`${formatBytes(shape.bytes)} (${shape.bytes.toLocaleString("en")} B, ${shape.requested_bytes.toLocaleString("en")} B requested)`,
      `${shape.category} (${shape.evidence})${shape.module ? `, module ${shape.module}` : ""}`,
      `${born}${life}; events ${shape.born_event < 0 ? "…" : shape.born_event.toLocaleString("en")} – ${shape.freed_event === null ? "…" : shape.freed_event.toLocaleString("en")}`],
    stack: stackOf(shape.stack),
  };
};

const shapeAt = (at, value) => {
  state.layout = state.layout || layOut();
  return shapes.findIndex((shape, number) => isShown(shape) && shape.first <= at && at < shape.end
    && state.layout.edges[number][at - shape.first] <= value && value < state.layout.edges[number][at - shape.first] + shape.bytes);
};

function hover(u) {
  const { idx, left, top } = u.cursor;
  if (state.pinned) return;
  if (idx == null || left < 0) { showMoment(data.peak, -1); showDetail(null); return; }
  // A step holds from its own sample to the next.
  const at = idx > 0 && xs()[idx] > u.posToVal(left, "x") ? idx - 1 : idx;
  lookAt(u, at, u.posToVal(top, "y"));
}

const lookAt = (u, at, value) => {
  if (state.mark >= 0 && at !== state.mark) {
    showMoment(at, -1);
    showChange(at);
    u.redraw(false);
    return;
  }
  if (state.mode === "allocation") {
    const found = shapeAt(at, value);
    showMoment(at, found < 0 ? -1 : modes.category.findIndex((one) => one.name === shapes[found].category));
    showDetail(found < 0 ? (value < allocated[at] ? { title: "smaller or hidden allocations", lines: [formatBytes(allocated[at] - state.layout.heights[at])], stack: [] } : null) : describeShape(shapes[found]));
    if (found !== state.shape) { state.shape = found; u.redraw(false); }
    return;
  }
  let below = 0;
  const series = modes[state.mode];
  const hot = series.findIndex((one) => { below += isHidden(one.name) ? 0 : one.values[at]; return value < below; });
  showMoment(at, hot);
  if (hot < 0) { showDetail(null); return; }
  const one = series[hot], size = one.values[at];
  let from = at, to = at;
  while (from > 0 && one.values[from - 1] > 0) from--;
  while (to < count - 1 && one.values[to + 1] > 0) to++;
  const span = data.has_times ? `present from ${formatTime(seconds[from])} to ${formatTime(seconds[to])}` : `present from event ${moments[from]} to ${moments[to]}`;
  const lines = [`${formatBytes(size)}, ${(100 * size / allocated[at]).toFixed(1)}% of what is allocated at this moment`, span];
  if (one.stackCount > 1) lines.push(`${one.stackCount} different stacks; what they share:`);
  showDetail({ title: one.name, lines, stack: one.stack });
};

const pin = (wanted) => {
  state.pinned = wanted;
  chart.classList.toggle("pinned", wanted);
};
const mark = () => {
  state.mark = state.mark < 0 ? state.at : -1;
  byId("mark").setAttribute("aria-pressed", String(state.mark >= 0));
  byId("mark").textContent = state.mark < 0 ? "Compare moments" : "Stop comparing";
  pin(false);
  showMoment(state.at, -1);
  showDetail(null);
  plot.redraw(false);
};

const limits = () => [xs()[0], xs()[count - 1]];
const zoom = (factor, centre) => {
  const { min, max } = plot.scales.x, [low, high] = limits();
  const middle = centre === undefined ? (min + max) / 2 : centre;
  let from = middle - (middle - min) * factor, to = middle + (max - middle) * factor;
  if (to - from >= high - low) [from, to] = [low, high];
  plot.setScale("x", { min: Math.max(from, low), max: Math.min(to, high) });
};
const pan = (distance) => {
  const { min, max } = plot.scales.x, [low, high] = limits();
  const moved = Math.min(Math.max(distance, low - min), high - max);
  plot.setScale("x", { min: min + moved, max: max + moved });
};
const showAll = () => plot.setScale("x", { min: limits()[0], max: limits()[1] });
const showPeak = () => {
  const reach = Math.max(Math.round(count / 40), 10);
  plot.setScale("x", { min: xs()[Math.max(data.peak - reach, 0)], max: xs()[Math.min(data.peak + reach, count - 1)] });
};

const choices = (id, key, values) => {
  const buttons = values.map(([value, label]) => {
    const made = button(label, () => { state[key] = value; press(); state.shape = -1; state.hidden.clear(); pin(false); build(true); });
    made.dataset.value = value;
    return made;
  });
  const press = () => buttons.forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.value === state[key])));
  byId(id).append(...buttons);
  press();
};
choices("mode", "mode", [["category", "Category"], ["module", "Module"], ["stack", "Stack"], ["allocation", "Allocation"]].filter(([mode]) => modes[mode] || mode === "allocation"));
choices("axis", "axis", data.has_times ? [["time", "Time"], ["events", "Events"]] : [["events", "Events"]]);
byId("in").addEventListener("click", () => zoom(0.5));
byId("out").addEventListener("click", () => zoom(2));
byId("all").addEventListener("click", showAll);
byId("peak").addEventListener("click", showPeak);

for (const name of [...new Set(data.phases.map((phase) => phase.name))].slice(0, 12)) {
  const item = element("span", name), swatch = element("i");
  swatch.style.background = colours.phases[name] || colours.phase;
  item.prepend(swatch);
  byId("phases").append(item);
}

chart.addEventListener("wheel", (event) => {
  // Without the focus the wheel scrolls the page.
  if (document.activeElement !== chart && !event.ctrlKey && !event.metaKey && !event.shiftKey) return;
  event.preventDefault();
  const { left } = plot.over.getBoundingClientRect();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / plot.over.clientWidth * (plot.scales.x.max - plot.scales.x.min));
  else zoom(event.deltaY > 0 ? 1.25 : 0.8, plot.posToVal(event.clientX - left, "x"));
}, { passive: false });
let pressedAt = null;
chart.addEventListener("mousedown", (event) => { pressedAt = [event.clientX, event.clientY]; }, true);
chart.addEventListener("click", (event) => {
  if (!pressedAt || Math.hypot(event.clientX - pressedAt[0], event.clientY - pressedAt[1]) > 3) return;
  const { idx, left, top } = plot.cursor;
  pin(idx != null && left >= 0);
  if (state.pinned) lookAt(plot, idx > 0 && xs()[idx] > plot.posToVal(left, "x") ? idx - 1 : idx, plot.posToVal(top, "y"));
});
let dragged = null;
chart.addEventListener("mousedown", (event) => {
  if (!event.shiftKey) return;
  event.stopPropagation();
  dragged = event.clientX;
}, true);
window.addEventListener("mousemove", (event) => {
  if (dragged === null) return;
  pan((dragged - event.clientX) / plot.over.clientWidth * (plot.scales.x.max - plot.scales.x.min));
  dragged = event.clientX;
});
window.addEventListener("mouseup", () => { dragged = null; });
const touch = (event) => {
  const { left, top } = plot.over.getBoundingClientRect();
  plot.setCursor({ left: event.touches[0].clientX - left, top: event.touches[0].clientY - top });
};
chart.addEventListener("touchstart", touch, { passive: true });
chart.addEventListener("touchmove", touch, { passive: true });
chart.addEventListener("keydown", (event) => {
  const width = plot.scales.x.max - plot.scales.x.min;
  const does = { ArrowLeft: () => pan(-width / 8), ArrowRight: () => pan(width / 8), "+": () => zoom(0.5), "-": () => zoom(2), 0: showAll, p: showPeak, m: mark, Escape: () => { pin(false); showDetail(null); } }[event.key];
  if (does) { event.preventDefault(); does(); }
});
new ResizeObserver(() => {
  const size = { width: chart.clientWidth, height: chart.clientHeight };
  if (size.width !== plot.width || size.height !== plot.height) plot.setSize(size);
}).observe(chart);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => build(true));

byId("mark").addEventListener("click", mark);
document.addEventListener("profkit:module", (event) => {
  state.module = event.detail;
  state.hidden.clear();
  if (modes.module && state.mode !== "allocation") {
    byId("mode").querySelector("[data-value=module]").click();
    if (state.module) modes.module.forEach((one) => { if (!inModule(one.name)) state.hidden.add(one.name); });
  }
  build(true);
});

build(false);
await new Promise((drawn) => requestAnimationFrame(drawn));
timing.ready = performance.now();
})());
