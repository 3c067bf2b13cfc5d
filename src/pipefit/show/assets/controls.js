// What a person does with the timeline: pointing, dragging, zooming, keys and switches.
class Timeline extends TimelineView {
  constructor(data) {
    super(data);
    this.tip = document.getElementById("timeline-tip");
    this.listen();
  }

  hit(x, y) {
    if (x < this.gutter) return null;
    const down = y + this.scroll.scrollTop, found = this.placed.find(p => down >= p.y && down < p.y + this.height);
    if (!found || y < 28) return null;
    const time = this.time(x), near = 3 * (this.view[1] - this.view[0]) / this.width;
    const order = down - found.y > this.height * 0.7 ? [1, 0] : [0, 1];
    for (const channel of order) {
      let best = null, gap = near;
      for (const span of found.row.channels[channel]) {
        if (span.start > time + near) break;
        if (this.hidden.has(KINDS[span.action.kind].group)) continue;
        const away = Math.max(span.start - time, time - span.stop, 0);
        if (away <= gap) { best = span; gap = away; }
      }
      if (best) return { row: found.row, span: best };
    }
    return null;
  }

  words({ row, span }) {
    const a = span.action, kind = KINDS[a.kind], pair = this.index.get(this.key(row.lane, a)) || {};
    const name = kind.name[0].toUpperCase() + kind.name.slice(1);
    const title = name + (a.stage >= 0 ? `, stage ${a.stage}` : "") + (a.peer >= 0 ? ` ${a.kind.startsWith("SEND") ? "to" : "from"} stage ${a.peer}` : "")
      + (a.microbatch >= 0 ? `, microbatch ${a.microbatch}` : "") + (this.data.slices > 1 && a.microbatch >= 0 ? `, slice ${a.slice}` : "") + (a.what ? ` (${a.what})` : "");
    const time = s => s.stop - s.start - s.wait;
    const lines = [`${row.trace === "predicted" ? "Predicted for lane " + row.lane : "Measured on device " + row.device}: ${seconds(time(span))}, from ${seconds(span.start + span.wait)}`];
    if (span.wait > 0) lines.push(`Waited ${seconds(span.wait)} ${a.kind === "NORM" ? "for the last device" : "for its data"} before`);
    const other = row.trace === "predicted" ? pair.measured : pair.predicted;
    if (other) {
      const [p, m] = row.trace === "predicted" ? [span, other] : [other, span];
      const off = time(m) > 0 ? ` (prediction ${time(p) < time(m) ? "−" : "+"}${percent(Math.abs(time(p) / time(m) - 1))})` : "";
      lines.push(`${row.trace === "predicted" ? "Measured" : "Predicted"}: ${seconds(time(other))}${off}`);
    }
    if (span.critical) lines.push("On the predicted critical path");
    return [title, ...lines];
  }

  show(hit, x, y) {
    if (!hit) { this.tip.hidden = true; return; }
    this.tip.textContent = "";
    this.words(hit).forEach((line, k) => {
      const part = document.createElement(k ? "div" : "b");
      part.textContent = line;
      this.tip.appendChild(part);
    });
    this.tip.hidden = false;
    const wide = this.tip.offsetWidth, tall = this.tip.offsetHeight, box = this.scroll.clientHeight;
    this.tip.style.left = Math.max(6, Math.min(x + 14, this.width - wide - 6)) + "px";
    this.tip.style.top = (y + 20 + tall > box ? Math.max(4, y - tall - 12) : y + 20) + "px";
  }

  choose(hit) {
    this.chosen = hit;
    if (hit) {
      this.say(this.words(hit).join(". ") + ".");
      const { start, stop } = hit.span, [from, to] = this.view, placed = this.placed.find(p => p.row === hit.row);
      if (stop < from || start > to) this.look((start + stop - (to - from)) / 2, (start + stop + (to - from)) / 2);
      if (placed.y - this.scroll.scrollTop < 30) this.scroll.scrollTop = placed.y - 30;
      if (placed.y + this.height > this.scroll.scrollTop + this.tall) this.scroll.scrollTop = placed.y + this.height - this.tall;
    }
    this.paint();
  }

  step(sideways, down) {
    const open = row => row.spans.filter(span => !this.hidden.has(KINDS[span.action.kind].group));
    if (!this.placed.length) return;
    if (!this.chosen || !this.placed.some(p => p.row === this.chosen.row)) {
      const first = open(this.placed[0].row);
      return this.choose(first.length ? { row: this.placed[0].row, span: first[0] } : null);
    }
    const at = this.placed.findIndex(p => p.row === this.chosen.row), next = this.placed[Math.min(this.placed.length - 1, Math.max(0, at + down))].row;
    const spans = open(next);
    if (!spans.length) return;
    let index;
    if (down) index = spans.reduce((best, span, k) => Math.abs(span.start - this.chosen.span.start) < Math.abs(spans[best].start - this.chosen.span.start) ? k : best, 0);
    else index = Math.min(spans.length - 1, Math.max(0, spans.indexOf(this.chosen.span) + sideways));
    this.choose({ row: next, span: spans[index] });
  }

  listen() {
    const canvas = this.canvas, pointers = new Map();
    const where = event => { const box = canvas.getBoundingClientRect(); return [event.clientX - box.left, event.clientY - box.top]; };
    this.scroll.addEventListener("scroll", () => { this.tip.hidden = true; this.paint(); });
    canvas.addEventListener("wheel", event => {
      const sideways = Math.abs(event.deltaX) > Math.abs(event.deltaY) ? event.deltaX : event.shiftKey ? event.deltaY : 0;
      if (event.ctrlKey || event.metaKey) this.zoom(Math.exp(event.deltaY * 0.004), this.time(where(event)[0]));
      else if (sideways) this.pan(sideways / this.width);
      else return;
      event.preventDefault();
    }, { passive: false });
    canvas.addEventListener("pointerdown", event => {
      pointers.set(event.pointerId, where(event));
      if (event.pointerType === "mouse") canvas.setPointerCapture(event.pointerId);
      this.moved = 0;
    });
    canvas.addEventListener("pointermove", event => {
      const [x, y] = where(event), old = pointers.get(event.pointerId);
      if (!old) { this.show(this.hit(x, y), x, y); return; }
      if (pointers.size === 1) {
        this.moved += Math.abs(x - old[0]);
        this.pan((old[0] - x) / (this.width - this.gutter));
      } else {
        const [other] = [...pointers].filter(([id]) => id !== event.pointerId).map(([, place]) => place);
        const before = Math.abs(old[0] - other[0]), after = Math.abs(x - other[0]);
        if (before > 8 && after > 8) this.zoom(before / after, this.time((x + other[0]) / 2));
        this.moved = 99;
      }
      this.tip.hidden = true;
      pointers.set(event.pointerId, [x, y]);
    });
    const leave = event => {
      if (pointers.delete(event.pointerId) && event.type === "pointerup" && this.moved < 5) {
        const [x, y] = where(event), hit = this.hit(x, y);
        this.choose(hit);
        this.show(hit, x, y);
      }
    };
    for (const name of ["pointerup", "pointercancel"]) canvas.addEventListener(name, leave);
    canvas.addEventListener("pointerleave", () => { this.tip.hidden = true; });
    canvas.addEventListener("dblclick", event => this.zoom(0.4, this.time(where(event)[0])));
    canvas.addEventListener("keydown", event => this.pressed(event));
    this.buttons();
    const overview = document.getElementById("timeline-overview");
    const jump = event => {
      const box = overview.getBoundingClientRect(), centre = (event.clientX - box.left) / box.width * this.end * 1.01, half = (this.view[1] - this.view[0]) / 2;
      this.look(centre - half, centre + half);
    };
    overview.addEventListener("pointerdown", event => { overview.setPointerCapture(event.pointerId); jump(event); });
    overview.addEventListener("pointermove", event => { if (event.buttons) jump(event); });
  }

  pressed(event) {
    const keys = {
      ArrowLeft: () => this.step(-1, 0), ArrowRight: () => this.step(1, 0), ArrowUp: () => this.step(0, -1), ArrowDown: () => this.step(0, 1),
      "+": () => this.zoom(0.5, this.middle()), "=": () => this.zoom(0.5, this.middle()), "-": () => this.zoom(2, this.middle()),
      "0": () => this.look(0, this.end * 1.01), Escape: () => { this.tip.hidden = true; this.choose(null); },
    };
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.key in keys)) return;
    keys[event.key]();
    event.preventDefault();
  }
  middle() { return this.chosen ? (this.chosen.span.start + this.chosen.span.stop) / 2 : (this.view[0] + this.view[1]) / 2; }

  buttons() {
    const acts = {
      in: () => this.zoom(0.5), out: () => this.zoom(2), left: () => this.pan(-0.4), right: () => this.pan(0.4), fit: () => this.look(0, this.end * 1.01),
    };
    for (const button of document.querySelectorAll("[data-view]")) button.addEventListener("click", () => { this.chosen = null; acts[button.dataset.view](); });
    const flip = button => { const on = button.getAttribute("aria-pressed") !== "true"; button.setAttribute("aria-pressed", on); return on; };
    for (const button of document.querySelectorAll("[data-kind]")) button.addEventListener("click", () => {
      if (flip(button)) this.hidden.delete(button.dataset.kind); else this.hidden.add(button.dataset.kind);
      this.tip.hidden = true;
      this.paint();
    });
    for (const button of document.querySelectorAll("[data-set]")) {
      button.setAttribute("aria-pressed", this.sets[button.dataset.set]);
      button.addEventListener("click", () => { this.sets[button.dataset.set] = flip(button); this.chosen = null; this.place(); });
    }
  }
}
