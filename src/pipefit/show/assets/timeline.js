// The timeline: rows of lanes and devices on one time axis. Predicted and measured go through the same code.
const KINDS = {
  F: { group: "F", name: "forward", colour: "--f", ink: "--f-ink" },
  I: { group: "I", name: "input gradient", colour: "--i", ink: "--i-ink", pattern: "dotted" },
  W: { group: "W", name: "weight gradient", colour: "--w", ink: "--w-ink", pattern: "striped" },
  B: { group: "B", name: "backward", colour: "--b", ink: "--b-ink", pattern: "back" },
  SEND_F: { group: "T", name: "send of activations", colour: "--t", ink: "--t-ink", link: true },
  SEND_B: { group: "T", name: "send of gradients", colour: "--t", ink: "--t-ink", link: true, pattern: "striped" },
  RECV_F: { group: "T", name: "receive of activations", colour: "--t", ink: "--t-ink", link: true },
  RECV_B: { group: "T", name: "receive of gradients", colour: "--t", ink: "--t-ink", link: true, pattern: "striped" },
  REDUCE: { group: "R", name: "gradient reduction", colour: "--r", ink: "--r-ink", link: true, pattern: "dotted" },
  GATHER: { group: "R", name: "parameter gather", colour: "--r", ink: "--r-ink", link: true, pattern: "dotted" },
  FREE: { group: "O", name: "release", colour: "--o", ink: "--o-ink", pattern: "crossed" },
  NORM: { group: "O", name: "gradient norm", colour: "--o", ink: "--o-ink", pattern: "crossed" },
  STEP: { group: "O", name: "optimizer step", colour: "--o", ink: "--o-ink", pattern: "crossed" },
};
const LIGHTEST = 0.58; // of white, in the last of a lane's stages

class TimelineView {
  constructor(data) {
    this.data = data;
    this.canvas = document.getElementById("timeline");
    this.scroll = document.getElementById("timeline-scroll");
    this.context = this.canvas.getContext("2d");
    this.rows = decodeRows(data).map(row => this.prepare(row));
    this.end = Math.max(data.horizon_s, 1e-9);
    this.view = [0, this.end * 1.01];
    this.hidden = new Set();
    this.sets = { predicted: true, measured: true, all: this.rows.length <= 24, critical: false };
    this.chosen = null;
    this.partners();
    this.spacer = document.getElementById("timeline-spacer");
    this.place();
    repaint.push(() => { this.patterns = {}; this.paint(); });
    new ResizeObserver(() => this.resize()).observe(this.scroll);
    this.resize();
  }

  prepare(row) {
    const link = span => KINDS[span.action.kind].link === true;
    const byStart = (a, b) => a.start - b.start || a.index - b.index;
    row.channels = [row.spans.filter(span => !link(span)), row.spans.filter(link)].map(spans => spans.slice().sort(byStart));
    const held = [...new Set(row.spans.map(span => span.action.stage).filter(stage => stage >= 0))].sort((a, b) => a - b);
    row.several = held.length > 1;
    row.shades = new Map(held.map((stage, k) => [stage, row.several ? k / (held.length - 1) : 0]));
    row.last = row.spans.reduce((most, span) => Math.max(most, span.stop), 0);
    row.longest = row.channels.map(spans => spans.reduce((most, span) => Math.max(most, span.stop - span.start), 0));
    if (row.trace === "predicted") {
      let at = 0;
      for (const step of decodeNumbers(this.data.critical[row.lane] || "")) { at += step; row.spans[at].critical = true; }
    }
    return row;
  }

  partners() {
    // For every lane the other trace's spans by what they are, so that a detail can name both.
    this.index = new Map();
    for (const row of this.rows) for (const span of row.spans) {
      const key = this.key(row.lane, span.action), found = this.index.get(key) || {};
      if (!(row.trace in found)) found[row.trace] = span;
      this.index.set(key, found);
    }
  }
  key(lane, a) { return `${lane} ${a.kind} ${a.stage} ${a.peer} ${a.what} ${a.microbatch} ${a.slice}`; }

  place() {
    // Which rows stand where, from the switches.
    const lanes = [...new Set(this.rows.map(row => row.lane))].sort((a, b) => a - b);
    const measured = this.rows.some(row => row.trace === "measured");
    let y = 30;
    this.placed = [];
    const shown = lanes.map(lane => {
      const own = this.rows.filter(row => row.lane === lane && this.sets[row.trace]);
      let first = true;
      return own.filter(row => row.trace === "predicted" || this.sets.all || (first && !(first = false)));
    });
    const count = shown.flat().length;
    this.height = count > 40 ? 17 : count > 16 ? 22 : 28;
    for (const rows of shown) {
      for (const row of rows) { this.placed.push({ row, y }); y += this.height; }
      if (rows.length) y += measured ? 8 : 3;
    }
    this.full = y + 4;
    this.spacer.style.height = this.full + "px";
    this.resize();
  }

  resize() {
    const width = this.scroll.clientWidth, height = Math.min(this.full, this.scroll.clientHeight || this.full);
    if (!width) return;
    this.width = width;
    this.tall = height;
    this.gutter = width < 560 ? 78 : 158;
    const ratio = Math.min(3, window.devicePixelRatio || 1);
    this.canvas.width = Math.round(width * ratio);
    this.canvas.height = Math.round(height * ratio);
    this.canvas.style.width = width + "px";
    this.canvas.style.height = height + "px";
    this.ratio = ratio;
    this.patterns = {};
    this.draw(); // at once: setting the size has cleared the canvas
  }

  x(time) { return this.gutter + (time - this.view[0]) / (this.view[1] - this.view[0]) * (this.width - this.gutter - 10); }
  time(x) { return this.view[0] + (x - this.gutter) / (this.width - this.gutter - 10) * (this.view[1] - this.view[0]); }

  look(from, to) {
    const whole = this.end * 1.01, least = this.end / 20000;
    let span = Math.min(whole, Math.max(least, to - from));
    from = Math.min(Math.max(0, from), whole - span);
    this.view = [from, from + span];
    this.paint();
  }
  zoom(factor, at = (this.view[0] + this.view[1]) / 2) {
    this.look(at - (at - this.view[0]) * factor, at + (this.view[1] - at) * factor);
  }
  pan(share) { const move = share * (this.view[1] - this.view[0]); this.look(this.view[0] + move, this.view[1] + move); }

  paint() {
    if (!this.width) return;
    if (this.waiting) return;
    this.waiting = requestAnimationFrame(() => { this.waiting = 0; this.draw(); });
  }

  // A lane's stages in the order of the model, from the colour of the kind to a light shade of it.
  shade(row, span) { return KINDS[span.action.kind].link ? 0 : row.shades.get(span.action.stage) || 0; }
  tint(kind, shade) {
    const base = colour(KINDS[kind].colour);
    if (!shade) return base;
    const part = k => Math.round(parseInt(base.slice(1 + 2 * k, 3 + 2 * k), 16) * (1 - LIGHTEST * shade) + 255 * LIGHTEST * shade);
    return `rgb(${part(0)}, ${part(1)}, ${part(2)})`;
  }

  pattern(kind, shade) {
    const key = `${kind} ${shade}`;
    if (this.patterns[key]) return this.patterns[key];
    const base = this.tint(kind, shade), style = KINDS[kind].pattern;
    if (!style) return this.patterns[key] = base;
    const size = 6, tile = document.createElement("canvas"), ratio = this.ratio;
    tile.width = tile.height = size * ratio;
    const c = tile.getContext("2d");
    c.scale(ratio, ratio);
    c.fillStyle = base; c.fillRect(0, 0, size, size);
    c.strokeStyle = c.fillStyle = "rgba(0,0,0,.26)"; c.lineWidth = 1.1;
    c.beginPath();
    if (style === "striped") for (const o of [-size, 0, size]) { c.moveTo(o, size); c.lineTo(o + size, 0); }
    if (style === "back") for (const o of [-size, 0, size]) { c.moveTo(o, 0); c.lineTo(o + size, size); }
    if (style === "crossed") { c.moveTo(1.5, 0); c.lineTo(1.5, size); c.moveTo(4.5, 0); c.lineTo(4.5, size); }
    c.stroke();
    if (style === "dotted") { c.beginPath(); c.arc(1.5, 1.5, 0.9, 0, 7); c.arc(4.5, 4.5, 0.9, 0, 7); c.fill(); }
    const made = this.context.createPattern(tile, "repeat");
    made.setTransform(new DOMMatrix().scale(1 / ratio));
    return this.patterns[key] = made;
  }

  draw() {
    const c = this.context, top = this.scroll.scrollTop;
    this.ink = colour("--ink"); this.soft = colour("--soft");
    c.setTransform(this.ratio, 0, 0, this.ratio, 0, 0);
    c.clearRect(0, 0, this.width, this.tall);
    this.drawn = 0;
    this.grid(c);
    c.save();
    c.beginPath(); c.rect(0, 28, this.width, this.tall - 28); c.clip();
    for (const { row, y } of this.placed) {
      if (y - top > this.tall || y - top + this.height < 24) continue;
      this.drawRow(c, row, y - top);
    }
    c.restore();
    this.ends(c);
    this.thumb();
    this.canvas.dataset.drawn = this.drawn;
    this.canvas.dataset.from = this.view[0];
    this.canvas.dataset.to = this.view[1];
    this.canvas.dataset.rows = this.placed.length;
    if (!this.chosen) this.say(`Shown: ${this.view[0] ? seconds(this.view[0]) : "0"} to ${seconds(Math.min(this.view[1], this.end))}. ` + this.stops());
  }

  grid(c) {
    const span = this.view[1] - this.view[0], step = niceStep(span, (this.width - this.gutter) / 92);
    const unit = [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]].find(([, s]) => this.view[1] >= s) || ["ns", 1e-9];
    const digits = Math.max(0, Math.ceil(-Math.log10(step / unit[1]) - 1e-9));
    c.font = "11.5px system-ui, sans-serif"; c.textBaseline = "middle"; c.textAlign = "center";
    c.fillStyle = colour("--line");
    for (let k = Math.ceil(this.view[0] / step); k * step <= this.view[1]; k++) {
      const x = this.x(k * step);
      if (x < this.gutter - 1) continue;
      c.fillRect(Math.round(x), 24, 1, this.tall);
    }
    c.fillStyle = this.soft;
    for (let k = Math.ceil(this.view[0] / step); k * step <= this.view[1]; k++) {
      const x = this.x(k * step), text = (k * step / unit[1]).toFixed(digits) + " " + unit[0], half = c.measureText(text).width / 2;
      if (x - half < this.gutter - 24 || x + half > this.width) continue;
      c.fillText(text, x, 13);
    }
  }

  drawRow(c, row, y) {
    const measured = row.trace === "measured", h = this.height, narrow = this.gutter < 100;
    const bar = Math.round(h * 0.66), strip = Math.max(3, Math.round(h * 0.16));
    c.textAlign = "left"; c.textBaseline = "middle";
    c.font = `${measured ? "400" : "600"} ${h < 20 ? 11 : 12}px system-ui, sans-serif`;
    c.fillStyle = measured ? this.soft : this.ink;
    const label = measured ? (narrow ? `dev ${row.device}` : `device ${row.device}  measured`) : (narrow ? `lane ${row.lane}` : `lane ${row.lane}  predicted`);
    c.fillText(label, 10, y + h / 2);
    c.save();
    c.beginPath(); c.rect(this.gutter, 0, this.width - this.gutter - 4, this.tall); c.clip();
    c.fillStyle = colour("--idle");
    c.fillRect(this.x(0), y + 1, this.x(row.last) - this.x(0), bar);
    this.spans(c, row, 0, y + 1, bar);
    this.spans(c, row, 1, y + 2 + bar, strip);
    c.restore();
  }

  spans(c, row, channel, y, h) {
    const spans = row.channels[channel], [from, to] = this.view;
    let low = 0, high = spans.length;
    while (low < high) { const m = (low + high) >> 1; if (spans[m].start < from - row.longest[channel]) low = m + 1; else high = m; }
    const seen = {};
    for (let k = low; k < spans.length && spans[k].start <= to; k++) {
      const span = spans[k], kind = KINDS[span.action.kind];
      if (span.stop < from || this.hidden.has(kind.group)) continue;
      // What an action waited for its data is drawn as idle, with a line of its colour below.
      const begin = this.x(span.start), x = this.x(span.start + span.wait), width = Math.max(0.6, this.x(span.stop) - x);
      if (width < 1 && span.action.kind.startsWith("RECV")) continue;
      this.drawn++;
      if (x - begin > 1) { c.fillStyle = colour(kind.colour); c.fillRect(begin + 0.7, y + h - 2, x - begin - 0.7, 2); }
      if (width < 1) { const at = Math.floor(x); if (seen[kind.group] === at) continue; seen[kind.group] = at; }
      const shade = this.shade(row, span);
      c.fillStyle = width > 7 && h > 4 ? this.pattern(span.action.kind, shade) : this.tint(span.action.kind, shade);
      c.fillRect(x, y, width > 3 ? width - 0.7 : width, h);
      if (channel === 0 && width > 12 && h >= 11) this.label(c, row, span, shade, x, y, width, h);
      if (this.sets.critical && span.critical) { c.strokeStyle = colour("--path"); c.lineWidth = 2; c.strokeRect(x + 1, y + 1, Math.max(0.5, width - 2.7), h - 2); }
      if (this.chosen && this.chosen.span === span) { c.strokeStyle = colour("--ink"); c.lineWidth = 2.5; c.strokeRect(x - 1, y - 1, width + 1.4, h + 2); }
    }
  }

  label(c, row, span, shade, x, y, width, h) {
    // As schedules write it, the stage only where the lane holds several; where that does not fit, as papers do: the
    // microbatch alone.
    const a = span.action, kind = KINDS[a.kind], part = this.data.slices > 1 ? "/" + a.slice : "";
    const texts = a.microbatch < 0 ? [a.kind] : [(row.several ? a.stage : "") + a.kind + a.microbatch + part, a.microbatch + part];
    c.font = `600 ${h < 14 ? 10 : 11}px system-ui, sans-serif`;
    const left = Math.max(x, this.gutter), right = Math.min(x + width, this.width - 4);
    const text = texts.find(text => c.measureText(text).width <= right - left - 6);
    if (text === undefined) return;
    const centre = (left + right) / 2, wide = c.measureText(text).width;
    if (kind.pattern) { c.fillStyle = this.tint(a.kind, shade); c.fillRect(centre - wide / 2 - 2.5, y + 1.5, wide + 5, h - 3); }
    c.fillStyle = shade > 0.4 ? "#1b1f24" : colour(kind.ink); c.textAlign = "center";
    c.fillText(text, centre, y + h / 2 + 0.5);
  }

  ends(c) {
    // Where each trace ends.
    c.save();
    c.setLineDash([4, 3]); c.lineWidth = 1.2; c.strokeStyle = this.soft;
    for (const name of ["predicted", "measured"]) {
      const rows = this.placed.filter(({ row }) => row.trace === name);
      if (!rows.length) continue;
      const x = this.x(Math.max(...rows.map(({ row }) => row.last)));
      if (x < this.gutter || x > this.width) continue;
      c.beginPath(); c.moveTo(x, 24); c.lineTo(x, this.tall); c.stroke();
    }
    c.restore();
  }

  stops() {
    const ends = ["predicted", "measured"].map(name => [name, Math.max(0, ...this.rows.filter(row => row.trace === name).map(row => row.last))]).filter(([, stop]) => stop);
    return ends.length > 1 ? `Dashed lines: the ${ends.map(([name, stop]) => `${name} end at ${seconds(stop)}`).join(", the ")}.` : `The step ends at ${seconds(ends[0][1])}.`;
  }

  thumb() {
    const thumb = document.getElementById("timeline-thumb"), whole = this.end * 1.01;
    thumb.style.left = 100 * this.view[0] / whole + "%";
    thumb.style.width = 100 * (this.view[1] - this.view[0]) / whole + "%";
  }

  say(text) { const status = document.getElementById("timeline-status"); if (status.textContent !== text) status.textContent = text; }
}
