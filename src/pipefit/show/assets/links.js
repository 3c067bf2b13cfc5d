// The link heat-map: who sends how much to whom, between devices or between hosts.
class Links {
  constructor(data) {
    this.data = data;
    this.holder = document.getElementById("links-map");
    this.metric = "bytes";
    this.level = data.hosts.length > 1 && data.devices.length > 16 ? "hosts" : "devices";
    if (data.devices.length > 128) for (const choice of document.querySelectorAll("input[name=links-level][value=devices]")) choice.disabled = true;
    for (const name of ["metric", "level"]) for (const choice of document.querySelectorAll(`input[name=links-${name}]`)) {
      choice.checked = choice.value === this[name];
      choice.addEventListener("change", () => { this[name] = choice.value; this.paint(); });
    }
    new ResizeObserver(() => this.paint()).observe(this.holder.parentElement);
    repaint.push(() => this.paint());
  }

  cells() {
    // (row, column) -> {bytes, time, bandwidth, latency, reasons}; hosts add up their devices, the slowest link counts.
    const found = new Map(), hosts = this.level === "hosts", names = hosts ? this.data.hosts : this.data.devices;
    for (const [from, to, reasons, rate, latency] of this.data.pairs) {
      const a = hosts ? this.data.host[from] : from, b = hosts ? this.data.host[to] : to, key = a * names.length + b;
      const cell = found.get(key) || { a, b, bytes: 0, time: 0, bandwidth: Infinity, latency: 0, reasons: {} };
      const sum = reasons.reduce((total, value) => total + value, 0);
      cell.bytes += sum;
      cell.time += rate ? sum / rate : 0;
      cell.bandwidth = Math.min(cell.bandwidth, rate || Infinity);
      cell.latency = Math.max(cell.latency, latency);
      reasons.forEach((value, k) => { const name = this.data.reasons[k]; cell.reasons[name] = (cell.reasons[name] || 0) + value; });
      found.set(key, cell);
    }
    return [names, found];
  }

  paint() {
    const width = this.holder.parentElement.clientWidth;
    if (!width) return;
    const [names, cells] = this.cells(), n = names.length, format = { bytes, time: seconds, bandwidth }[this.metric];
    const label = Math.min(130, 14 + 6.4 * Math.max(...names.map(name => name.length)));
    const size = Math.max(n > 96 ? 4 : n > 32 ? 7 : 16, Math.min(62, (width - label - 6) / n)), every = Math.max(1, Math.ceil(15 / size));
    const turned = size < 6.6 * Math.max(...names.map(name => name.length)) + 4, head = turned ? label : 22;
    const all = [...cells.values()].map(cell => cell[this.metric]).filter(v => v > 0 && isFinite(v));
    const low = Math.min(...all), high = Math.max(...all);
    this.holder.textContent = "";
    const svg = element("svg", { width: label + n * size + 4, height: head + n * size + 4, role: "img", "aria-label": "Traffic from each row to each column; the table below has the busiest links" }, this.holder);
    names.forEach((name, k) => {
      if (k % every) return;
      element("text", { x: label - 6, y: head + (k + 0.5) * size + 4, "text-anchor": "end" }, svg, name);
      const x = label + (k + 0.5) * size;
      element("text", turned ? { transform: `translate(${x + 4} ${head - 6}) rotate(-90)` } : { x, y: head - 7, "text-anchor": "middle" }, svg, name);
    });
    if (n > 32) element("rect", { x: label, y: head, width: n * size, height: n * size, class: "self" }, svg);
    for (let a = 0; a < n; a++) for (let b = 0; b < n; b++) {
      const cell = cells.get(a * n + b), place = { x: label + b * size, y: head + a * size, width: size, height: size };
      if (!cell) { if (n <= 32) element("rect", { ...place, class: a === b ? "self" : "cell none" }, svg); continue; }
      const value = cell[this.metric], share = high > low ? Math.log(value / low) / Math.log(high / low) : 1, [fill, dark] = this.shade(isFinite(share) ? share : 1);
      const rect = element("rect", { ...place, class: "cell", fill, "data-from": a, "data-to": b }, svg);
      const words = this.words(names, cell);
      element("title", {}, rect, words);
      rect.addEventListener("pointerenter", () => { document.getElementById("links-status").textContent = words; });
      rect.addEventListener("pointerdown", () => { document.getElementById("links-status").textContent = words; });
      if (size >= 48) element("text", { x: place.x + size / 2, y: place.y + size / 2 + 4, class: "value", style: `fill:${dark ? "#fff" : "#111"}` }, svg, format(value).replace(" ", "\u202f"));
    }
    document.getElementById("links-low").textContent = all.length ? format(low) : "";
    document.getElementById("links-high").textContent = all.length && high > low ? format(high) : "";
    this.holder.dataset.metric = this.metric;
    this.holder.dataset.level = this.level;
  }

  shade(share) {
    const stops = [0, 1, 2, 3, 4].map(k => colour(`--heat-${k}`).match(/[0-9a-f]{2}/gi).map(v => parseInt(v, 16)));
    const at = Math.min(3.999, Math.max(0, share * 4)), k = Math.floor(at), mix = stops[k].map((v, c) => Math.round(v + (stops[k + 1][c] - v) * (at - k)));
    return [`rgb(${mix.join(",")})`, 0.299 * mix[0] + 0.587 * mix[1] + 0.114 * mix[2] < 140];
  }

  words(names, cell) {
    const why = Object.entries(cell.reasons).filter(([, value]) => value > 0).map(([name, value]) => `${name} ${bytes(value)}`).join(", ");
    return `${names[cell.a]} to ${names[cell.b]}: ${bytes(cell.bytes)} a step (${why}); at least ${seconds(cell.time)} on ${this.level === "hosts" ? "links of" : "a link of"} ${bandwidth(cell.bandwidth)}, ${seconds(cell.latency)} latency.`;
  }
}
