// Plain charts: lines told apart by dash and mark as well as by colour, a table of values under the pointer.

const STYLES = [
  { class: "c1", dash: null, mark: "circle" },
  { class: "c2", dash: "6 3", mark: "square" },
  { class: "c3", dash: "2 3", mark: "diamond" },
  { class: "c4", dash: "9 3 2 3", mark: "cross" },
  { class: "c5", dash: "1 2", mark: "circle" },
  { class: "c6", dash: "12 4", mark: "square" },
];

function ticks(low, high, wanted = 4) {
  const span = high - low || Math.abs(high) || 1, rough = span / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((each) => each * power).find((each) => span / each <= wanted) || 10 * power;
  const first = Math.ceil(low / step - 1e-9), found = new Set();
  for (let i = 0; i <= wanted + 1 && (first + i) * step <= high + step * 1e-6; i++) found.add(Number(((first + i) * step).toPrecision(12)));
  return [...found];
}

function mark(kind, x, y, size, extra) {
  if (kind === "square") return s("rect", { x: x - size, y: y - size, width: 2 * size, height: 2 * size, class: extra });
  if (kind === "diamond") return s("path", { d: `M${x} ${y - size * 1.3}L${x + size * 1.3} ${y}L${x} ${y + size * 1.3}L${x - size * 1.3} ${y}Z`, class: extra });
  if (kind === "cross") return s("path", { d: `M${x - size} ${y - size}L${x + size} ${y + size}M${x + size} ${y - size}L${x - size} ${y + size}`, class: extra + " stroked" });
  return s("circle", { cx: x, cy: y, r: size, class: extra });
}

// series: [{name, xs, ys, low?, high?}]; options: {title, unit, low, high, pick, note, help}
function lineChart(series, options) {
  const W = 340, H = 170, L = 42, R = 10, T = 10, B = 24;
  const known = series.filter((each) => each && each.ys.some((y) => y !== null && Number.isFinite(y)));
  if (!known.length) return null;
  const xs = known.flatMap((each) => each.xs), ys = known.flatMap((each) => [each.ys, each.low || [], each.high || []]).flat().filter((y) => y !== null && Number.isFinite(y));
  const x0 = Math.min(...xs), x1 = Math.max(...xs, x0 + 1);
  let y0 = options.low ?? Math.min(...ys), y1 = options.high ?? Math.max(...ys);
  if (options.low === undefined && y0 > 0 && y0 < y1 * 0.5) y0 = 0;
  if (y0 === y1) { y0 -= Math.abs(y0) * 0.1 || 0.5; y1 += Math.abs(y1) * 0.1 || 0.5; }
  const px = (x) => L + ((x - x0) / (x1 - x0)) * (W - L - R), py = (y) => H - B - ((y - y0) / (y1 - y0)) * (H - T - B);
  const parts = [];
  for (const y of ticks(y0, y1)) parts.push(s("line", { x1: L, x2: W - R, y1: py(y), y2: py(y), class: "grid" }), s("text", { x: L - 6, y: py(y) + 3.5, class: "tick end" }, number(y, 3)));
  for (const x of ticks(x0, x1, 6)) if (Number.isInteger(x)) parts.push(s("text", { x: px(x), y: H - 7, class: "tick middle" }, number(x)));
  known.forEach((each, at) => {
    const style = STYLES[at % STYLES.length];
    const points = each.xs.map((x, i) => [x, each.ys[i], i]).filter(([, y]) => y !== null && Number.isFinite(y));
    if (each.low && each.high) {
      const band = points.filter(([, , i]) => each.low[i] !== null && each.high[i] !== null);
      if (band.length > 1) parts.push(s("path", { class: `band ${style.class}`, d: "M" + band.map(([x, , i]) => `${px(x)} ${py(each.high[i])}`).join("L") + "L" + band.reverse().map(([x, , i]) => `${px(x)} ${py(each.low[i])}`).join("L") + "Z" }));
      for (const [x, , i] of band.length > 40 ? [] : band) parts.push(s("line", { x1: px(x), x2: px(x), y1: py(each.low[i]), y2: py(each.high[i]), class: `whisker ${style.class}` }));
    }
    parts.push(s("path", { class: `line ${style.class}`, "stroke-dasharray": style.dash, d: "M" + points.map(([x, y]) => `${px(x).toFixed(1)} ${py(y).toFixed(1)}`).join("L") }));
    const shown = points.length <= 40 ? points : [points[points.length - 1]];
    for (const [x, y] of shown) parts.push(mark(style.mark, px(x), py(y), 2.6, `dot ${style.class}`));
  });
  const cursor = s("line", { y1: T, y2: H - B, class: "cursor" });
  const svg = s("svg", { viewBox: `0 0 ${W} ${H}`, class: "chart", role: "img", "aria-label": `${options.title}: ${known.map((each) => `${each.name}, last ${number(lastOf(each.ys))}`).join("; ")}` }, parts, cursor);
  const legend = h("div", { class: "legend" });
  const rest = () => replace(legend, known.map((each, at) => entry(each, at, lastOf(each.ys), "")));
  const entry = (each, at, value, when) => h("span", null, key(STYLES[at % STYLES.length]), h("span", null, each.name), " ", h("b", null, number(value)), when);
  const all = [...new Set(xs)].sort((a, b) => a - b);
  const nearest = (event) => {
    const box = svg.getBoundingClientRect(), x = x0 + (((event.clientX - box.left) / box.width) * W - L) / (W - L - R) * (x1 - x0);
    return all.reduce((best, each) => (Math.abs(each - x) < Math.abs(best - x) ? each : best), all[0]);
  };
  svg.addEventListener("pointermove", (event) => {
    const x = nearest(event);
    cursor.setAttribute("x1", px(x));
    cursor.setAttribute("x2", px(x));
    svg.classList.add("hovered");
    replace(legend, h("span", { class: "quiet" }, `${options.x || "iteration"} ${number(x)}`), known.map((each, at) => entry(each, at, each.ys[each.xs.indexOf(x)] ?? null, "")));
  });
  svg.addEventListener("pointerleave", () => { svg.classList.remove("hovered"); rest(); });
  if (options.pick) { svg.classList.add("pickable"); svg.addEventListener("click", (event) => options.pick(nearest(event))); }
  rest();
  return h("figure", { class: "card chartcard", title: options.help || null }, h("figcaption", null, h("h3", null, options.title), options.note ? h("span", { class: "quiet" }, options.note) : null), svg, legend);
}

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && Number.isFinite(values[i])) return values[i];
  return null;
}

function key(style) {
  return s("svg", { viewBox: "0 0 26 10", width: 26, height: 10, "aria-hidden": "true" }, s("line", { x1: 1, x2: 25, y1: 5, y2: 5, class: `line ${style.class}`, "stroke-dasharray": style.dash }), mark(style.mark, 13, 5, 2.8, `dot ${style.class}`));
}

function isReliability(own) {
  return !!own && ["predicted", "came", "count"].every((name) => Array.isArray(own[name]) && own[name].length === own.predicted.length && own[name].every(Number.isFinite)) && own.predicted.length > 0;
}

// What came where so much was predicted; several: [{name, predicted, came, count}]
function reliabilityChart(several, title) {
  const W = 300, P = 36, size = W - P - 12, px = (x) => P + x * size, py = (y) => 12 + (1 - y) * size;
  const parts = [s("rect", { x: P, y: 12, width: size, height: size, class: "frame" })];
  for (const at of [0, 0.25, 0.5, 0.75, 1]) {
    parts.push(s("line", { x1: P, x2: W - 12, y1: py(at), y2: py(at), class: "grid" }), s("text", { x: P - 6, y: py(at) + 3.5, class: "tick end" }, number(at)), s("text", { x: px(at), y: 12 + size + 16, class: "tick middle" }, number(at)));
  }
  parts.push(s("line", { x1: px(0), y1: py(0), x2: px(1), y2: py(1), class: "ideal" }));
  several.forEach((each, place) => {
    const style = STYLES[place % STYLES.length], most = Math.max(...each.count, 1);
    parts.push(s("path", { class: `line ${style.class}`, "stroke-dasharray": style.dash, d: "M" + each.predicted.map((x, i) => `${px(x)} ${py(each.came[i])}`).join("L") }));
    each.predicted.forEach((x, i) => {
      const dot = mark(style.mark, px(x), py(each.came[i]), 2.5 + 6 * Math.sqrt(each.count[i] / most), `dot open ${style.class}`);
      dot.append(s("title", null, `${each.name}: predicted ${number(x)}, came ${number(each.came[i])}, ${number(each.count[i])} turns`));
      parts.push(dot);
    });
  });
  parts.push(s("text", { x: P + size / 2, y: 12 + size + 33, class: "tick middle" }, "predicted chance of success"), s("text", { x: 0, y: 0, class: "tick middle", transform: `translate(9 ${12 + size / 2}) rotate(-90)` }, "came"));
  return h("figure", { class: "card chartcard square" }, h("figcaption", null, h("h3", null, title)),
    s("svg", { viewBox: `0 0 ${W} ${12 + size + 38}`, class: "chart", role: "img", "aria-label": title }, parts),
    h("div", { class: "legend" }, several.map((each, at) => h("span", null, key(STYLES[at % STYLES.length]), each.name)), h("span", { class: "quiet" }, "on the diagonal: as often as predicted; larger marks: more turns")));
}

// A share of something with its interval, as a bar.
function bar(value, low, high, title) {
  const known = value !== null && value !== undefined && Number.isFinite(value), at = (x) => `${Math.max(0, Math.min(1, x)) * 100}%`;
  return h("span", { class: "bar", title: title || null }, known ? h("i", { style: { width: at(value) } }) : null,
    known && Number.isFinite(low) && low !== null && high !== null ? h("u", { style: { left: at(low), width: at(high - low) } }) : null);
}
