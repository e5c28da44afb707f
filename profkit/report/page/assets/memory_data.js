"use strict";
// The data of the chart of memory, what is shown of them, and how bytes and times read.
profkit.readMemory = async () => {
const data = await profkit.unpack("memory-data");
if (!data) return null;

const restore = (deltas, unit) => {
  const values = new Float64Array(deltas.length);
  let sum = 0;
  for (let i = 0; i < deltas.length; i++) values[i] = (sum += deltas[i]) * unit;
  return values;
};
const text = (number) => number < 0 ? null : data.texts[number];
const bytes = (deltas) => restore(deltas, data.unit);
const count = data.moments.length;
const moments = restore(data.moments, 1);
const seconds = restore(data.times_us, 1e-6);
const allocated = bytes(data.allocated), reserved = bytes(data.reserved);
const stackOf = (number) => data.stacks[number].map(text);
const modes = Object.fromEntries(Object.entries(data.series).map(([mode, some]) => [mode,
  some.map((one) => ({ name: text(one.name), values: bytes(one.values), stack: stackOf(one.stack), stackCount: one.stack_count }))]));
const shapes = data.shapes.bytes.map((_, at) => ({
  ...Object.fromEntries(Object.entries(data.shapes).map(([key, column]) => [key, column[at]])),
  category: text(data.shapes.category[at]), owner: text(data.shapes.owner[at]), module: text(data.shapes.module[at]),
  label: text(data.shapes.label[at]), evidence: text(data.shapes.evidence[at]),
}));
for (const phase of data.phases) phase.name = text(phase.name);
const colours = data.colours;

const UNITS = [[2 ** 40, "TiB"], [2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"]];
const { formatBytes, kindOf } = profkit;
const formatTime = (value) => value >= 1 ? value.toFixed(3) + " s" : value >= 1e-3 ? (value * 1e3).toFixed(3) + " ms" : (value * 1e6).toFixed(0) + " µs";
const formatSpan = (us) => formatTime(us / 1e6);

// Each shape's lower edge at every sample of its life; the oldest lie lowest, so that few edges move.
const layOut = () => {
  const heights = new Float64Array(count);
  const births = shapes.map(() => null);
  shapes.forEach((shape, at) => { births[at] = new Float64Array(shape.end - shape.first); });
  const starts = new Map();
  shapes.forEach((shape, at) => { if (isShown(shape)) (starts.get(shape.first) || starts.set(shape.first, []).get(shape.first)).push(at); });
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

const state = {
  layers: [], layout: null,
  mode: "category", axis: data.has_times && !data.prefers_events ? "time" : "events",
  shape: -1, pinned: false, mark: -1, at: data.peak, hidden: new Set(), module: "",
};
const xs = () => (state.axis === "time" ? seconds : moments);
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (mode, at) => mode === "category" ? colours.categories[modes.category[at].name] : colours.stacks[at % colours.stacks.length];
const isHidden = (name) => state.hidden.has(name);
const isShown = (shape) => !isHidden(shape.category) && (!state.module || inModule(shape.module));
// A module's name, or that of one within it; a star stands for any number.
const inModule = (name) => {
  const module = kindOf(state.module);
  return module === "model" ? !name.startsWith("(") : name === module || name.startsWith(`${module}.`);
};

const cumulated = (series) => {
  const layers = [];
  let below = new Float64Array(count);
  for (const one of series) {
    const layer = new Float64Array(count);
    for (let i = 0; i < count; i++) layer[i] = below[i] + (isHidden(one.name) ? 0 : one.values[i]);
    layers.push(layer);
    below = layer;
  }
  return layers;
};

return {
  data, state, count, moments, seconds, allocated, reserved, modes, shapes, colours,
  text, stackOf, formatBytes, formatTime, formatSpan, layOut, xs, css, colourOf, isHidden, isShown, inModule, cumulated, UNITS,
};
};
