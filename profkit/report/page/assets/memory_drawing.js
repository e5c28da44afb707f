"use strict";
// Draws what is stacked, the phases, the peak and the moments compared, onto uPlot's canvas.
profkit.paintMemory = (memory) => {
const { data, state, count, allocated, reserved, modes, shapes, colours, formatBytes, layOut, xs, css, colourOf, isShown } = memory;

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
// A phase in which nothing was allocated, such as a later step of an optimizer, has no width by events: it keeps some.
const NARROWEST = 4;
const needsDarkText = (phase) => phase.name === "loss" || !colours.phases[phase.name];

const shadePhases = (u) => visiblePhases(u, (ctx, bbox, phase, left, width) => {
  ctx.globalAlpha = 0.1;
  ctx.fillRect(left, bbox.top, width, bbox.height);
});

const namePhases = (u) => {
  const strip = 15 * devicePixelRatio, least = NARROWEST * devicePixelRatio;
  for (const isNarrow of [false, true]) visiblePhases(u, (ctx, bbox, phase, left, width) => {
    if (width < least !== isNarrow) return;
    ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.textBaseline = "middle";
    ctx.textAlign = "left";
    ctx.globalAlpha = 1;
    ctx.fillRect(left, bbox.top, Math.max(width, least), strip);
    ctx.strokeStyle = css("--back");
    ctx.lineWidth = devicePixelRatio;
    ctx.strokeRect(left, bbox.top, Math.max(width, least), strip);
    if (width > ctx.measureText(phase.name).width + 8) {
      ctx.fillStyle = needsDarkText(phase) ? "#000000" : "#ffffff";
      ctx.fillText(phase.name, left + 4, bbox.top + strip / 2);
    }
  });
};

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
  else for (let at = state.layers.length - 1; at >= 0; at--) fill(state.layers[at], colourOf(state.mode, at));
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
  state.layout = state.layout || layOut();
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
    if (!isShown(shape)) return;
    const begin = Math.max(shape.first, first), end = Math.min(shape.end, last);
    if (begin >= end) return;
    const edges = state.layout.edges[at], offset = shape.first;
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

const drawMark = (u) => {
  if (state.mark < 0) return;
  const { ctx, bbox } = u;
  ctx.save();
  ctx.strokeStyle = css("--accent");
  ctx.lineWidth = 2 * devicePixelRatio;
  for (const at of [state.mark, state.at]) {
    const x = position(u, at);
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
  }
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

return { shadePhases, namePhases, drawLayers, drawLines, drawShapes, drawMark, drawPeak };
};
