"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);

const restore = (deltas, unit) => {
  const values = new Float64Array(deltas.length);
  let sum = 0;
  for (let i = 0; i < deltas.length; i++) values[i] = (sum += deltas[i]) * unit;
  return values;
};
const bytes = (deltas) => restore(deltas, data.unit);
const count = data.moments.length;
const moments = restore(data.moments, 1);
const seconds = restore(data.times_us, 1e-6);
const allocated = bytes(data.allocated), reserved = bytes(data.reserved), lowest = bytes(data.lowest);
const modes = {
  category: data.by_category.map((one) => ({ ...one, values: bytes(one.values) })),
  stack: data.by_stack.map((one) => ({ ...one, values: bytes(one.values) })),
};
const shapes = data.shapes;
const colours = data.colours;

const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
const formatBytes = (value) => {
  for (const [size, unit] of UNITS) {
    if (Math.abs(value) >= size * 0.9765625) {
      const number = value / size;
      return number.toFixed(number < 10 ? 3 : number < 100 ? 2 : 1) + " " + unit;
    }
  }
  return value + " B";
};
const formatTime = (value) => value >= 1 ? value.toFixed(3) + " s" : value >= 1e-3 ? (value * 1e3).toFixed(3) + " ms" : (value * 1e6).toFixed(0) + " µs";
const formatSpan = (us) => formatTime(us / 1e6);

// Each shape's lower edge at every sample of its life; the oldest lie lowest, so that few edges move.
const layOut = () => {
  const heights = new Float64Array(count);
  const births = shapes.map(() => null);
  shapes.forEach((shape, at) => { births[at] = new Float64Array(shape.end - shape.first); });
  const starts = new Map();
  shapes.forEach((shape, at) => { (starts.get(shape.first) || starts.set(shape.first, []).get(shape.first)).push(at); });
  let live = [];
  for (let i = 0; i < count; i++) {
    live = live.filter((at) => shapes[at].end > i);
    if (starts.has(i)) live.push(...starts.get(i));
    let height = 0;
    for (const at of live) {
      births[at][i - shapes[at].first] = height;
      height += shapes[at].bytes;
    }
    heights[i] = height;
  }
  return { edges: births, heights };
};
let layout = null;

const state = { mode: data.mode, axis: data.has_times && !data.prefers_events ? "time" : "events", hot: -1, shape: -1 };
let plot = null;
const timing = { draws: [], ready: 0 };
window.profkit = { timing, get plot() { return plot; }, state, data };

const xs = () => (state.axis === "time" ? seconds : moments);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (mode, at) => mode === "category" ? colours.categories[modes.category[at].name] : colours.stacks[at % colours.stacks.length];

let layers = [];
const cumulated = (series) => {
  const layers = [];
  let below = new Float64Array(count);
  for (const one of series) {
    const layer = new Float64Array(count);
    for (let i = 0; i < count; i++) layer[i] = below[i] + one.values[i];
    layers.push(layer);
    below = layer;
  }
  return layers;
};

const position = (u, i) => u.valToPos(xs()[i], "x", true);

const phaseEdges = (phase) => state.axis === "time" ? [phase.start_us / 1e6, phase.end_us / 1e6] : [phase.first, phase.last];

const clipped = (u, draw) => {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  draw(ctx, bbox);
  ctx.restore();
};

const visiblePhases = (u, draw) => clipped(u, (ctx, bbox) => {
  for (const phase of data.phases) {
    const [from, to] = phaseEdges(phase);
    if (to < u.scales.x.min || from > u.scales.x.max) continue;
    const left = Math.max(u.valToPos(from, "x", true), bbox.left), right = Math.min(u.valToPos(to, "x", true), bbox.left + bbox.width);
    ctx.fillStyle = colours.phases[phase.name] || colours.phase;
    draw(ctx, bbox, phase, left, Math.max(right - left, 1));
  }
});

const shadePhases = (u) => visiblePhases(u, (ctx, bbox, phase, left, width) => {
  ctx.globalAlpha = 0.1;
  ctx.fillRect(left, bbox.top, width, bbox.height);
});

const namePhases = (u) => visiblePhases(u, (ctx, bbox, phase, left, width) => {
  const strip = 15 * devicePixelRatio;
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textBaseline = "middle";
  ctx.textAlign = "left";
  ctx.globalAlpha = 1;
  ctx.fillRect(left, bbox.top, width, strip);
  if (width > ctx.measureText(phase.name).width + 8) {
    ctx.fillStyle = "#ffffff";
    ctx.fillText(phase.name, left + 4, bbox.top + strip / 2);
  }
});

// One sample a pixel column at most, the one at which most was allocated: nothing more could be seen.
const columns = (u) => {
  const first = Math.max(u.valToIdx(u.scales.x.min) - 1, 0), last = Math.min(u.valToIdx(u.scales.x.max) + 1, count - 1);
  const picked = [], places = [];
  for (let i = first; i <= last; i++) {
    const place = Math.round(position(u, i));
    const at = picked.length - 1;
    if (at >= 0 && places[at] === place) {
      if (allocated[i] > allocated[picked[at]]) picked[at] = i;
    } else {
      picked.push(i);
      places.push(place);
    }
  }
  places.push(places[places.length - 1]);
  return { picked, places };
};

const trace = (ctx, u, { picked, places }, values) => {
  let y = u.valToPos(values[picked[0]], "y", true);
  ctx.moveTo(places[0], y);
  for (let at = 0; at < picked.length; at++) {
    const next = u.valToPos(values[picked[at]], "y", true);
    if (next !== y) { ctx.lineTo(places[at], y); ctx.lineTo(places[at], next); y = next; }
  }
  ctx.lineTo(places[places.length - 1], y);
};

const drawLayers = (u) => clipped(u, (ctx, bbox) => {
  const seen = columns(u), floor = u.valToPos(0, "y", true);
  if (!seen.picked.length) return;
  const fill = (values, colour) => {
    ctx.beginPath();
    trace(ctx, u, seen, values);
    ctx.lineTo(seen.places[seen.places.length - 1], floor);
    ctx.lineTo(seen.places[0], floor);
    ctx.fillStyle = colour;
    ctx.fill();
  };
  if (state.mode === "allocation") fill(allocated, colours.rest);
  else for (let at = layers.length - 1; at >= 0; at--) fill(layers[at], colourOf(state.mode, at));
});

const drawLines = (u) => clipped(u, (ctx) => {
  const seen = columns(u);
  if (!seen.picked.length) return;
  ctx.strokeStyle = css("--text");
  ctx.lineJoin = "round";
  for (const [values, width, dash] of [[allocated, 1, []], [reserved, 1.5, [2, 3]]]) {
    ctx.lineWidth = width * devicePixelRatio;
    ctx.setLineDash(dash.map((one) => one * devicePixelRatio));
    ctx.beginPath();
    trace(ctx, u, seen, values);
    ctx.stroke();
  }
});

const drawShapes = (u) => {
  if (state.mode !== "allocation") return;
  layout = layout || layOut();
  const { ctx, bbox } = u;
  const first = Math.max(u.valToIdx(u.scales.x.min) - 1, 0), last = Math.min(u.valToIdx(u.scales.x.max) + 2, count);
  const places = new Float64Array(last - first + 1);
  for (let i = first; i <= last; i++) places[i - first] = position(u, Math.min(i, count - 1));
  const high = (value) => u.valToPos(value, "y", true);
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  ctx.lineWidth = 0.5 * devicePixelRatio;
  ctx.strokeStyle = css("--back");
  shapes.forEach((shape, at) => {
    const begin = Math.max(shape.first, first), end = Math.min(shape.end, last);
    if (begin >= end) return;
    const edges = layout.edges[at], offset = shape.first;
    const steps = [];
    let edge = edges[begin - offset], from = begin;
    for (let i = begin + 1; i < end; i++) {
      if (edges[i - offset] !== edge) {
        steps.push([from, i, edge]);
        edge = edges[i - offset];
        from = i;
      }
    }
    steps.push([from, end, edge]);
    ctx.beginPath();
    for (const [a, b, low] of steps) { ctx.lineTo(places[a - first], high(low + shape.bytes)); ctx.lineTo(places[b - first], high(low + shape.bytes)); }
    for (const [a, b, low] of steps.reverse()) { ctx.lineTo(places[b - first], high(low)); ctx.lineTo(places[a - first], high(low)); }
    ctx.closePath();
    ctx.fillStyle = colours.categories[shape.category];
    ctx.globalAlpha = state.shape < 0 || state.shape === at ? 1 : 0.55;
    ctx.fill();
    ctx.stroke();
  });
  ctx.restore();
};

const drawPeak = (u) => {
  const { ctx, bbox } = u;
  const x = position(u, data.peak), y = u.valToPos(allocated[data.peak], "y", true);
  if (x < bbox.left - 1 || x > bbox.left + bbox.width + 1) return;
  ctx.save();
  ctx.strokeStyle = ctx.fillStyle = css("--text");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(x, y);
  ctx.lineTo(x, bbox.top + bbox.height);
  ctx.stroke();
  ctx.beginPath();
  ctx.arc(x, y, 3.5 * devicePixelRatio, 0, 2 * Math.PI);
  ctx.fill();
  ctx.font = `600 ${12 * devicePixelRatio}px system-ui, sans-serif`;
  const text = "peak " + formatBytes(allocated[data.peak]), width = ctx.measureText(text).width + 10 * devicePixelRatio;
  const left = x + width > bbox.left + bbox.width ? x - width : x + 6 * devicePixelRatio;
  ctx.textBaseline = "bottom";
  ctx.textAlign = "left";
  ctx.lineWidth = 3 * devicePixelRatio;
  ctx.setLineDash([]);
  ctx.strokeStyle = css("--back");
  ctx.strokeText(text, left, y - 4 * devicePixelRatio);
  ctx.fillText(text, left, y - 4 * devicePixelRatio);
  ctx.restore();
};

const build = (keep) => {
  const host = byId("chart");
  const range = keep && plot ? [plot.valToIdx(plot.scales.x.min), plot.valToIdx(plot.scales.x.max)] : null;
  if (plot) plot.destroy();
  layers = state.mode === "allocation" ? [] : cumulated(modes[state.mode]);
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
      draw: [drawPeak, () => { timing.draws.push(performance.now() - timing.began); }],
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

const rows = () => state.mode === "allocation" ? data.by_category.map((one, at) => ({ name: one.name, colour: colours.categories[one.name], values: modes.category[at].values }))
  : modes[state.mode].map((one, at) => ({ name: one.name, colour: colourOf(state.mode, at), values: one.values }));

const element = (kind, text, className) => {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
};

let legendRows = [];
const showLegend = () => {
  const list = byId("legend");
  list.replaceChildren();
  legendRows = rows().map((row) => {
    const item = element("li"), swatch = element("span", "", "swatch"), value = element("span", "", "value");
    swatch.style.background = row.colour;
    item.append(swatch, element("span", row.name, "name"), value);
    item.title = row.name;
    return { item, value, row };
  });
  list.append(...legendRows.map((one) => one.item).reverse());
  showMoment(data.peak, -1);
  showDetail(null);
};

const showMoment = (at, hot) => {
  const when = data.has_times ? formatTime(seconds[at]) + ", " : "";
  const phase = data.phases.find((one) => moments[at] > one.first && moments[at] <= one.last);
  byId("moment").textContent = `${at === data.peak ? "Peak: " : ""}${when}event ${moments[at].toLocaleString("en")}${phase ? ", " + phase.name : ""} — ${formatBytes(allocated[at])} of ${formatBytes(reserved[at])} reserved`;
  legendRows.forEach((one, number) => {
    one.value.textContent = formatBytes(one.row.values[at]);
    one.item.classList.toggle("hot", number === hot);
  });
};

const stackList = (stack) => {
  const list = element("ol", undefined, "stack");
  for (const frame of stack.slice(0, 9)) list.append(element("li", frame));
  return list;
};

const showDetail = (content) => {
  const panel = byId("detail");
  panel.replaceChildren();
  if (!content) {
    panel.append(element("div", "Point at the chart to see what it is, its size, its lifetime and its stack."));
    return;
  }
  panel.append(element("strong", content.title));
  for (const line of content.lines) panel.append(element("div", line));
  if (content.stack.length) panel.append(stackList(content.stack));
};

const describeShape = (shape) => {
  const born = shape.born_us === null ? "allocated before the first event" : `from ${formatSpan(shape.born_us)}`;
  const life = shape.freed_us !== null && shape.born_us !== null ? ` for ${formatSpan(shape.freed_us - shape.born_us)}`
    : shape.freed_event === null ? " to the end" : "";
  return {
    title: shape.owner || data.labels[shape.label],
    lines: [`${formatBytes(shape.bytes)} (${shape.bytes.toLocaleString("en")} B, ${shape.requested_bytes.toLocaleString("en")} B requested)`,
      `${shape.category} (${shape.evidence})`,
      `${born}${life}; events ${shape.born_event < 0 ? "…" : shape.born_event.toLocaleString("en")} – ${shape.freed_event === null ? "…" : shape.freed_event.toLocaleString("en")}`],
    stack: data.stacks[shape.label],
  };
};

const shapeAt = (at, value) => {
  layout = layout || layOut();
  return shapes.findIndex((shape, number) => shape.first <= at && at < shape.end
    && layout.edges[number][at - shape.first] <= value && value < layout.edges[number][at - shape.first] + shape.bytes);
};

function hover(u) {
  const { idx, left, top } = u.cursor;
  if (idx == null || left < 0) { showMoment(data.peak, -1); showDetail(null); return; }
  // A step holds from its own sample to the next.
  const at = idx > 0 && xs()[idx] > u.posToVal(left, "x") ? idx - 1 : idx;
  const value = u.posToVal(top, "y");
  if (state.mode === "allocation") {
    const found = shapeAt(at, value);
    showMoment(at, found < 0 ? -1 : modes.category.findIndex((one) => one.name === shapes[found].category));
    showDetail(found < 0 ? (value < allocated[at] ? { title: "smaller allocations", lines: [formatBytes(allocated[at] - layout.heights[at])], stack: [] } : null) : describeShape(shapes[found]));
    if (found !== state.shape) { state.shape = found; u.redraw(false); }
    return;
  }
  let below = 0;
  const series = modes[state.mode];
  const hot = series.findIndex((one) => { below += one.values[at]; return value < below; });
  showMoment(at, hot);
  if (hot < 0) { showDetail(null); return; }
  const one = series[hot], size = one.values[at];
  let from = at, to = at;
  while (from > 0 && one.values[from - 1] > 0) from--;
  while (to < count - 1 && one.values[to + 1] > 0) to++;
  const span = data.has_times ? `present from ${formatTime(seconds[from])} to ${formatTime(seconds[to])}` : `present from event ${moments[from]} to ${moments[to]}`;
  showDetail({ title: one.name, lines: [`${formatBytes(size)}, ${(100 * size / allocated[at]).toFixed(1)}% of what is allocated at this moment`, span], stack: one.stack });
}

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
    const button = element("button", label);
    button.type = "button";
    button.dataset.value = value;
    button.addEventListener("click", () => { state[key] = value; press(); state.shape = -1; build(true); });
    return button;
  });
  const press = () => buttons.forEach((one) => one.setAttribute("aria-pressed", String(one.dataset.value === state[key])));
  byId(id).append(...buttons);
  press();
};
choices("mode", "mode", [["category", "Category"], ["stack", "Stack"], ["allocation", "Allocation"]]);
choices("axis", "axis", data.has_times ? [["time", "Time"], ["events", "Events"]] : [["events", "Events"]]);
byId("in").addEventListener("click", () => zoom(0.5));
byId("out").addEventListener("click", () => zoom(2));
byId("all").addEventListener("click", showAll);
byId("peak").addEventListener("click", showPeak);

const facts = byId("facts");
data.facts.forEach((fact, at) => { if (at) facts.append(" · "); facts.append(element(at ? "span" : "strong", fact)); });
for (const name of [...new Set(data.phases.map((phase) => phase.name))].slice(0, 12)) {
  const item = element("span", name), swatch = element("i");
  swatch.style.background = colours.phases[name] || colours.phase;
  item.prepend(swatch);
  byId("phases").append(item);
}
byId("warnings").append(...data.warnings.map((text) => element("li", text)));

const chart = byId("chart");
chart.addEventListener("wheel", (event) => {
  event.preventDefault();
  const { left } = plot.over.getBoundingClientRect();
  if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / plot.over.clientWidth * (plot.scales.x.max - plot.scales.x.min));
  else zoom(event.deltaY > 0 ? 1.25 : 0.8, plot.posToVal(event.clientX - left, "x"));
}, { passive: false });
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
  const does = { ArrowLeft: () => pan(-width / 8), ArrowRight: () => pan(width / 8), "+": () => zoom(0.5), "-": () => zoom(2), 0: showAll, p: showPeak }[event.key];
  if (does) { event.preventDefault(); does(); }
});
new ResizeObserver(() => {
  const size = { width: chart.clientWidth, height: chart.clientHeight };
  if (size.width !== plot.width || size.height !== plot.height) plot.setSize(size);
}).observe(chart);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => build(true));

build(false);
requestAnimationFrame(() => { timing.ready = performance.now(); });
})();
