// Charts as SVG, drawn at the width they have, so that their text keeps its size: curves over steps, and memory.
function draw(figure, paint) {
  const holder = figure.querySelector(".holder");
  const again = () => { const width = holder.clientWidth; if (width > 40) { holder.textContent = ""; paint(holder, width); } };
  new ResizeObserver(again).observe(holder);
  repaint.push(again);
}

const short = text => text.replace(/\.0+ /, " ");

function axes(svg, box, x, y) {
  // box: left, top, right, bottom in pixels; x, y: {from, to, format, ticks}.
  const sx = v => box.left + (v - x.from) / (x.to - x.from || 1) * (box.right - box.left);
  const sy = v => box.bottom - (v - y.from) / (y.to - y.from || 1) * (box.bottom - box.top);
  for (const v of y.ticks) {
    element("line", { x1: box.left, x2: box.right, y1: sy(v), y2: sy(v), class: "grid-line" }, svg);
    element("text", { x: box.left - 6, y: sy(v) + 4, "text-anchor": "end" }, svg, short(y.format(v)));
  }
  element("line", { x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom, class: "axis-line" }, svg);
  x.ticks.forEach((v, k) => {
    const anchor = sx(v) > box.right - 18 ? "end" : k === 0 && sx(v) < box.left + 8 ? "start" : "middle";
    element("text", { x: sx(v), y: box.bottom + 15, "text-anchor": anchor }, svg, short(x.format(v)));
  });
  return [sx, sy];
}
function ticks(from, to, most) {
  const step = niceStep(to - from || 1, most), found = [];
  for (let k = Math.ceil(from / step - 1e-9); k * step <= to + 1e-9 * step; k++) found.push(k * step);
  return found;
}
const path = points => points.map(([x, y], k) => (k ? "L" : "M") + x.toFixed(1) + " " + y.toFixed(1)).join("");

const k0 = v => v >= 10000 ? v / 1000 + "k" : String(v);

function curveChart(figure, { steps, values, marks = [], level = null, unit, format, describe }) {
  draw(figure, (holder, width) => {
    const height = 210, box = { left: 56, top: 10, right: width - 10, bottom: height - 38 };
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": describe }, holder);
    const all = [...values, ...marks.map(m => m[1]), ...(level === null ? [] : [level])].filter(v => v !== null);
    let low = Math.min(...all), high = Math.max(...all);
    if (unit === "s") low = 0;
    const room = (high - low || Math.abs(high) || 1) * 0.06;
    const x = { from: steps[0], to: steps[steps.length - 1], ticks: ticks(steps[0], steps[steps.length - 1], width / 90).filter(Number.isInteger), format: v => k0(v) };
    const y = { from: unit === "s" ? 0 : low - room, to: high + room, format };
    y.ticks = ticks(y.from, y.to, 5);
    const [sx, sy] = axes(svg, box, x, y);
    element("text", { x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, svg, "step");
    let run = [];
    const runs = [run];
    steps.forEach((step, k) => { if (values[k] === null) runs.push(run = []); else run.push([sx(step), sy(values[k])]); });
    for (const points of runs) if (points.length) element("path", { d: path(points), class: "series-a" }, svg);
    if (level !== null) element("line", { x1: box.left, x2: box.right, y1: sy(level), y2: sy(level), class: "series-b" }, svg);
    for (const [step, value] of marks) if (value !== null) element("circle", { cx: sx(step), cy: sy(value), r: 4, class: "mark-b" }, svg);
    cursor(figure, svg, box, steps, sx, k => `Step ${steps[k]}: ${values[k] === null ? "not a number" : format(values[k])}` + marks.filter(m => m[0] === steps[k]).map(m => `; held-out ${format(m[1])}`).join("") + (level === null ? "" : `; predicted ${format(level)}`));
  });
}

function cursor(figure, svg, box, steps, sx, words) {
  const line = element("line", { y1: box.top, y2: box.bottom, class: "cursor", visibility: "hidden" }, svg), out = figure.querySelector("output"), rest = out.textContent;
  const leave = () => { line.setAttribute("visibility", "hidden"); out.textContent = rest; };
  const move = event => {
    const at = event.clientX - svg.getBoundingClientRect().left;
    const k = steps.reduce((best, step, index) => Math.abs(sx(step) - at) < Math.abs(sx(steps[best]) - at) ? index : best, 0);
    line.setAttribute("x1", sx(steps[k])); line.setAttribute("x2", sx(steps[k])); line.setAttribute("visibility", "visible");
    out.textContent = words(k);
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerdown", move);
  svg.addEventListener("pointerleave", leave);
}

function memoryChart(figure, lane, horizon, state, small) {
  draw(figure, (holder, width) => {
    const height = small ? 92 : 170, box = { left: small ? 0 : 58, top: 8, right: small ? width : width - 6, bottom: height - (small ? 6 : 22) };
    const svg = element("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": figure.querySelector("figcaption").textContent }, holder);
    const top = (state.toLimit ? Math.max(lane.limit, state.most) : state.most) * 1.06 || 1;
    const step = 2 ** Math.ceil(Math.log2(top / (small ? 2 : 4.5)));
    const y = { from: 0, to: top, ticks: small ? [] : Array.from({ length: Math.floor(top / step) + 1 }, (_, k) => k * step), format: v => v ? bytes(v) : "0" };
    const x = { from: 0, to: horizon, ticks: small ? [] : ticks(0, horizon, width / 90), format: seconds };
    const [sx, sy] = axes(svg, box, x, y), points = [], count = lane.bytes.length;
    lane.bytes.forEach((value, k) => points.push([sx(horizon * k / count), sy(value)], [sx(horizon * (k + 1) / count), sy(value)]));
    element("path", { d: path([[sx(0), sy(0)], ...points, [sx(horizon), sy(0)]]) + "Z", class: "area-a" }, svg);
    element("rect", { x: box.left, y: sy(lane.static), width: box.right - box.left, height: sy(0) - sy(lane.static), class: "area-static" }, svg);
    element("path", { d: path(points), class: "series-a" }, svg);
    if (lane.limit <= top) element("line", { x1: box.left, x2: box.right, y1: sy(lane.limit), y2: sy(lane.limit), class: "limit-line" }, svg);
    for (const [, value] of lane.measured) element("line", { x1: box.left, x2: box.right, y1: sy(value), y2: sy(value), class: "measured-line" }, svg);
  });
}

function memory(data) {
  const figures = [...document.querySelectorAll("[data-memory]")], small = data.lanes.length > 12;
  const most = Math.max(...data.lanes.flatMap(lane => [lane.peak, ...lane.measured.map(m => m[1])]));
  const state = { most, toLimit: most > 0.35 * Math.max(...data.lanes.map(lane => lane.limit)) };
  figures.forEach((figure, k) => memoryChart(figure, data.lanes[k], data.horizon_s, state, small));
  for (const choice of document.querySelectorAll("input[name=memory-scale]")) {
    choice.checked = (choice.value === "limit") === state.toLimit;
    choice.addEventListener("change", () => { state.toLimit = choice.value === "limit"; repaint.forEach(again => again()); });
  }
}

function training(data) {
  const loss = document.getElementById("loss-chart"), time = document.getElementById("time-chart");
  curveChart(loss, { steps: data.step, values: data.loss, marks: data.evaluations, unit: "", format: v => v.toFixed(Math.abs(v) < 10 ? 3 : 1), describe: loss.querySelector("figcaption").textContent });
  curveChart(time, { steps: data.step, values: data.step_s, level: data.predicted_s, unit: "s", format: seconds, describe: time.querySelector("figcaption").textContent });
}
