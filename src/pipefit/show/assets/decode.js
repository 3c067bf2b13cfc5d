// The data of the report, unpacked: the inverse of show/encode.py.
const DATA = JSON.parse(document.getElementById("data").textContent);
const ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const DIGITS = new Map([...ALPHABET].map((letter, value) => [letter, value]));

function decodeNumbers(text) {
  const values = [];
  let value = 0, place = 1;
  for (const letter of text) {
    const digit = DIGITS.get(letter);
    value += (digit & 31) * place;
    if (digit & 32) { place *= 32; continue; }
    values.push(value % 2 ? -(value - 1) / 2 : value / 2);
    value = 0; place = 1;
  }
  return values;
}

function decodeActions(packed, slices) {
  const pairs = packed.places.map(place => typeof place === "string" ? decodeNumbers(place) : place);
  const used = packed.words.map(() => 0);
  return decodeNumbers(packed.order).map(index => {
    const [kind, stage, peer, what] = packed.words[index];
    const k = used[index]++;
    let microbatch, slice;
    if (typeof pairs[index] === "number") {
      microbatch = Math.floor(k / slices);
      slice = pairs[index] ? slices - 1 - k % slices : k % slices;
    } else {
      microbatch = pairs[index][2 * k];
      slice = pairs[index][2 * k + 1];
    }
    return { kind, stage, peer, what, microbatch, slice };
  });
}

function decodeRows(timeline) {
  const sequences = timeline.sequences.map(packed => decodeActions(packed, timeline.slices));
  return timeline.rows.map(row => {
    const actions = sequences[row.sequence], numbers = decodeNumbers(row.times);
    const waits = row.waits === undefined ? null : decodeNumbers(row.waits);
    let clock = 0;
    const spans = actions.map((action, index) => {
      const start = clock + numbers[2 * index];
      clock = start + numbers[2 * index + 1];
      return {
        action, index, start: start * timeline.tick_s, stop: clock * timeline.tick_s,
        wait: waits ? waits[index] * timeline.tick_s : 0,
      };
    });
    return { trace: row.trace, lane: row.lane, device: row.device, spans };
  });
}

// Numbers as people read them: the same rules as pipefit.units.
function three(value) { return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2); }
function scaled(value, units) {
  for (const [unit, scale] of units) if (Math.abs(value) >= scale) return (value < 0 ? "-" : "") + three(Math.abs(value) / scale) + " " + unit;
  const [unit, scale] = units[units.length - 1];
  return value === 0 ? "0" : three(value / scale) + " " + unit;
}
const seconds = value => scaled(value, [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]]);
const bytes = value => scaled(value, [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 1024], ["B", 1]]);
const bandwidth = value => scaled(value, [["TB/s", 1e12], ["GB/s", 1e9], ["MB/s", 1e6], ["kB/s", 1e3], ["B/s", 1]]);
const percent = value => (100 * value).toFixed(Math.abs(value) < 0.0995 ? 1 : 0) + " %";

function niceStep(span, most) {
  const rough = span / Math.max(1, most), power = 10 ** Math.floor(Math.log10(rough));
  return power * [1, 2, 5, 10].find(factor => factor * power >= rough * 0.999);
}
function element(name, attributes = {}, parent = null, text = "") {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== "") made.textContent = text;
  if (parent) parent.appendChild(made);
  return made;
}

// The colours of the style sheet, asked once a theme; `repaint` is what is drawn anew when the theme changes.
const colours = new Map();
function colour(name) {
  let found = colours.get(name);
  if (found === undefined) colours.set(name, found = getComputedStyle(document.documentElement).getPropertyValue(name).trim());
  return found;
}
const repaint = [() => colours.clear()];
