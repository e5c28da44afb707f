"use strict";
// One step, thread by thread and stream by stream. Drag adds up an area; the wheel and the keys zoom and move.
profkit.started.push((async () => {
const { byId, element, button, kindOf, formatNs } = profkit;
const data = await profkit.unpack("timeline-data");
if (!data) return;

const HEIGHT = { ranges: 15, calls: 9, kernels: 24, copies: 14 };
const COLOUR = { gemm: "matmul", attention: "attention", communication: "communication" };
const lanes = data.lanes.map((lane) => {
  let at = 0;
  const start = lane.start.map((one) => (at += one));
  return { ...lane, start, end: start.map((one, row) => one + lane.length[row]) };
});
// A thread's name, or a stream's, stands once above its lanes.
let y = 4;
lanes.forEach((lane, at) => {
  lane.isFirst = !at || lanes[at - 1].name !== lane.name;
  if (lane.isFirst) y += 18;
  lane.top = y;
  lane.height = HEIGHT[lane.kind];
  y += lane.height + 1;
});
const total = y + 22;

const state = { from: 0, to: data.span, chosen: null, area: null, module: "" };
const holder = byId("timeline-canvas"), canvas = element("canvas"), detail = byId("timeline-detail");
canvas.tabIndex = 0;
canvas.setAttribute("role", "img");
canvas.setAttribute("aria-label", "Timeline of one step. Arrow keys move, + and − zoom, 0 shows all, comma and full stop step through the slices of a lane, up and down change the lane.");
holder.append(canvas);
holder.hidden = detail.hidden = false;
byId("timeline-picture").style.display = "none";

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const text = (number) => number === undefined || number < 0 ? "" : data.texts[number];
const categoryOf = (lane, row) => lane.category ? text(lane.category[row]) : lane.kind;
const countOf = (lane, row) => lane.count ? lane.count[row] : 1;
const busyOf = (lane, row) => lane.busy ? lane.busy[row] : lane.length[row];
const xOf = (ns) => (ns - state.from) / (state.to - state.from) * canvas.clientWidth;
const nsAt = (x) => state.from + x / canvas.clientWidth * (state.to - state.from);

const firstFrom = (values, wanted) => {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low;
};

const fillOf = (lane, row, colours) => {
  if (lane.kind === "ranges") return colours.range[lane.depth % 2];
  if (lane.kind === "calls") return colours.call;
  if (lane.kind === "copies") return colours.copies;
  return colours[COLOUR[categoryOf(lane, row)] || "other"];
};
const isDimmed = (lane, row) => state.module && !(lane.place && text(lane.place[row]).split("/").includes(state.module))
  && !(lane.kind === "ranges" && kindOf(text(lane.text[row])) === state.module);

const draw = () => {
  const ratio = devicePixelRatio, width = holder.clientWidth;
  if (!width) return;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${total}px`;
  canvas.width = width * ratio;
  canvas.height = total * ratio;
  const ctx = canvas.getContext("2d");
  ctx.scale(ratio, ratio);
  ctx.textBaseline = "middle";
  const ink = css("--text"), soft = css("--soft"), back = css("--back");
  const colours = { range: [css("--line"), css("--range")], call: soft };
  for (const name of ["matmul", "attention", "communication", "other", "copies"]) colours[name] = css(`--${name}`);
  for (const lane of lanes) {
    if (lane.isFirst) {
      ctx.fillStyle = soft;
      ctx.font = "12px system-ui, sans-serif";
      ctx.fillText(lane.name, 4, lane.top - 8);
    }
    ctx.font = "11px system-ui, sans-serif";
    let last = -1;
    for (let row = 0; row < lane.start.length && lane.start[row] < state.to; row++) {
      if (lane.end[row] < state.from) continue;
      const left = Math.max(xOf(lane.start[row]), 0), right = Math.min(xOf(lane.end[row]), width);
      if (right <= last && right - left < 0.5) continue;
      last = right;
      const wide = Math.max(right - left, 0.6);
      ctx.globalAlpha = isDimmed(lane, row) ? 0.15 : 1;
      ctx.fillStyle = fillOf(lane, row, colours);
      ctx.fillRect(left, lane.top, wide, lane.height);
      if (wide > 3) { ctx.fillStyle = back; ctx.fillRect(right - 0.5, lane.top, 0.5, lane.height); }
      if (lane.kind === "ranges" && wide > 34) {
        ctx.save();
        ctx.beginPath();
        ctx.rect(left, lane.top, wide - 3, lane.height);
        ctx.clip();
        ctx.fillStyle = ink;
        ctx.fillText(text(lane.text[row]), left + 3, lane.top + lane.height / 2);
        ctx.restore();
      }
    }
    ctx.globalAlpha = 1;
  }
  drawAxis(ctx, width, soft);
  if (state.area) {
    const [left, right] = state.area.map(xOf);
    ctx.fillStyle = css("--accent");
    ctx.globalAlpha = 0.18;
    ctx.fillRect(left, 0, right - left, total);
    ctx.globalAlpha = 1;
  }
  if (state.chosen) {
    const { lane, row } = state.chosen;
    ctx.strokeStyle = css("--accent");
    ctx.lineWidth = 2;
    ctx.strokeRect(xOf(lane.start[row]), lane.top, Math.max(xOf(lane.end[row]) - xOf(lane.start[row]), 2), lane.height);
  }
};

const drawAxis = (ctx, width, colour) => {
  const rough = (state.to - state.from) / Math.max(width / 110, 1), power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  ctx.fillStyle = colour;
  ctx.font = "11px system-ui, sans-serif";
  for (let tick = Math.ceil(state.from / step) * step; tick <= state.to; tick += step) {
    ctx.fillRect(xOf(tick), total - 18, 1, 5);
    ctx.fillText(tick ? formatNs(tick).replace(/^[\d.]+/, parseFloat) : "0", Math.min(xOf(tick) + 3, width - 52), total - 9);
  }
};

const describe = (lane, row) => {
  const count = countOf(lane, row), lines = [];
  const title = count > 1 ? `${count} merged slices, the first: ${text(lane.text[row])}` : text(lane.text[row]);
  lines.push(`${lane.name}, ${lane.kind}: ${formatNs(busyOf(lane, row))} from ${formatNs(lane.start[row])}${count > 1 ? ` within ${formatNs(lane.length[row])}` : ""}`);
  if (lane.category) lines.push(`category: ${categoryOf(lane, row)}`);
  if (lane.place) {
    lines.push(`launched in: ${text(lane.place[row]) || "no range"} (${text(lane.evidence[row])})`);
    lines.push(lane.gap[row] < 0 ? "launch: not recorded" : `from launch to start: ${formatNs(lane.gap[row])}`);
  }
  return { title, lines };
};

const show = (found) => {
  detail.replaceChildren();
  if (!found) {
    detail.append(element("div", "Point at a slice for its name, module and launch. Drag to add up an area; wheel or + and − to zoom."));
    return;
  }
  detail.append(element("strong", found.title), ...found.lines.map((line) => element("div", line)));
};

const sumArea = (from, to) => {
  const sums = new Map();
  for (const lane of lanes) {
    if (lane.kind !== "kernels" && lane.kind !== "copies") continue;
    for (let row = 0; row < lane.start.length && lane.start[row] < to; row++) {
      const overlap = Math.min(lane.end[row], to) - Math.max(lane.start[row], from);
      if (overlap <= 0) continue;
      const name = categoryOf(lane, row), part = overlap / (lane.length[row] || 1);
      const sum = sums.get(name) || { ns: 0, count: 0 };
      sum.ns += busyOf(lane, row) * part;
      sum.count += countOf(lane, row);
      sums.set(name, sum);
    }
  }
  return [...sums].sort((one, other) => other[1].ns - one[1].ns);
};

const showArea = () => {
  const [from, to] = state.area, sums = sumArea(from, to);
  const lines = sums.map(([name, sum]) => `${name}: ${formatNs(sum.ns)} in ${sum.count.toLocaleString("en")}`);
  const all = sums.reduce((sum, one) => sum + one[1].ns, 0);
  show({ title: `${formatNs(to - from)} from ${formatNs(from)}: ${formatNs(all)} on the GPU`, lines: lines.length ? lines : ["nothing ran on the GPU"] });
  detail.append(button("Zoom to this area", () => { setView(from, to); state.area = null; draw(); }));
};

const setView = (from, to) => {
  const width = Math.min(Math.max(to - from, 200), data.span);
  state.from = Math.min(Math.max(from, 0), data.span - width);
  state.to = state.from + width;
  draw();
};
const zoom = (factor, centre = (state.from + state.to) / 2) => setView(centre - (centre - state.from) * factor, centre + (state.to - centre) * factor);
const pan = (ns) => setView(state.from + ns, state.to + ns);

const sliceAt = (x, y) => {
  const lane = lanes.find((one) => one.top <= y && y < one.top + one.height);
  if (!lane) return null;
  const ns = nsAt(x), slack = (state.to - state.from) / canvas.clientWidth * 2;
  // Kernels of one stream may overlap: the one that began last is on top.
  for (let row = firstFrom(lane.start, ns + slack) - 1, tries = 0; row >= 0 && tries < 50; row--, tries++) {
    if (lane.end[row] + slack >= ns) return { lane, row };
  }
  return null;
};
const choose = (found) => {
  state.chosen = found;
  show(found && describe(found.lane, found.row));
  draw();
};

const stepBy = (rows, laneBy) => {
  const shown = lanes.filter((lane) => lane.start.length);
  let lane = state.chosen ? state.chosen.lane : shown[0], row = state.chosen ? state.chosen.row + rows : 0;
  if (laneBy) {
    const middle = state.chosen ? lane.start[state.chosen.row] : state.from;
    lane = shown[Math.min(Math.max(shown.indexOf(lane) + laneBy, 0), shown.length - 1)];
    row = firstFrom(lane.start, middle);
  }
  row = Math.min(Math.max(row, 0), lane.start.length - 1);
  if (lane.start[row] < state.from || lane.end[row] > state.to) {
    const width = state.to - state.from, middle = (lane.start[row] + lane.end[row]) / 2;
    setView(middle - width / 2, middle + width / 2);
  }
  choose({ lane, row });
};

let pressed = null;
canvas.addEventListener("mousedown", (event) => { pressed = { x: event.offsetX, pans: event.shiftKey, at: nsAt(event.offsetX) }; });
canvas.addEventListener("mousemove", (event) => {
  if (pressed && pressed.pans) { pan(pressed.at - nsAt(event.offsetX)); return; }
  if (pressed && Math.abs(event.offsetX - pressed.x) > 3) {
    const now = nsAt(event.offsetX);
    state.area = [Math.max(Math.min(pressed.at, now), 0), Math.min(Math.max(pressed.at, now), data.span)];
    showArea();
    draw();
    return;
  }
  if (!pressed && !state.area) choose(sliceAt(event.offsetX, event.offsetY));
});
window.addEventListener("mouseup", () => { pressed = null; });
canvas.addEventListener("click", (event) => {
  if (state.area && Math.abs(xOf(state.area[0]) - event.offsetX) > 4 && Math.abs(xOf(state.area[1]) - event.offsetX) > 4) { state.area = null; choose(sliceAt(event.offsetX, event.offsetY)); }
});
canvas.addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.metaKey && !event.shiftKey && document.activeElement !== canvas) return;
  event.preventDefault();
  if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan((event.deltaX || event.deltaY) / canvas.clientWidth * (state.to - state.from));
  else zoom(event.deltaY > 0 ? 1.25 : 0.8, nsAt(event.offsetX));
}, { passive: false });
canvas.addEventListener("keydown", (event) => {
  const width = state.to - state.from;
  const does = {
    ArrowLeft: () => pan(-width / 8), ArrowRight: () => pan(width / 8), "+": () => zoom(0.5), "-": () => zoom(2), 0: () => setView(0, data.span),
    ".": () => stepBy(1), ",": () => stepBy(-1), ArrowDown: () => stepBy(0, 1), ArrowUp: () => stepBy(0, -1), Escape: () => { state.area = null; choose(null); },
  }[event.key];
  if (does) { event.preventDefault(); does(); }
});
byId("timeline-tools").append(
  button("Zoom in", () => zoom(0.5)), button("Zoom out", () => zoom(2)), button("All", () => setView(0, data.span)),
  element("span", "Drag adds up an area. Click the timeline, then wheel, arrows, + and − zoom and move.", "count"));
new ResizeObserver(draw).observe(holder);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
document.addEventListener("profkit:module", (event) => { state.module = event.detail; draw(); });
profkit.timeline = { state, lanes, sumArea, setView, canvas, data };
show(null);
draw();
})());
