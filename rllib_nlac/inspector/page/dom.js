// Elements. Text goes in as text nodes and nothing else: what a model or an environment wrote is never markup.

function h(tag, properties, ...children) {
  const element = document.createElement(tag);
  put(element, properties, children);
  return element;
}

function s(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes || {})) if (value !== null && value !== undefined) element.setAttribute(name, value);
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) element.append(child);
  return element;
}

const ATTRIBUTES = new Set(["role", "for", "type", "min", "max", "step", "placeholder", "href", "tabindex", "open", "dir", "lang", "list", "inputmode", "scope", "download"]);

function put(element, properties, children) {
  for (const [name, value] of Object.entries(properties || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") element.className = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name.startsWith("aria-") || name.startsWith("data-") || ATTRIBUTES.has(name)) element.setAttribute(name, value === true ? "" : value);
    else if (name === "style") for (const [key, each] of Object.entries(value)) element.style.setProperty(key, each);
    else element[name] = value;
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

function replace(element, ...children) {
  element.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
}

const LONG = 2400;

// Somebody's text: its own direction, kept apart from what stands around it, folded where it is long.
function words(text, extra = "") {
  const element = h("div", { class: `words ${extra}`, dir: "auto" });
  if (text === null || text === undefined) return h("div", { class: `words quiet ${extra}` }, "—");
  if (text.length <= LONG) {
    element.textContent = text;
    return element;
  }
  let cut = LONG - 400;
  if (/[\uD800-\uDBFF]/.test(text[cut - 1])) cut -= 1;
  const head = h("span", null, text.slice(0, cut));
  const more = h("button", { class: "more", type: "button", onclick: () => { element.textContent = text; } }, `… show all ${count(text.length)} characters`);
  element.append(head, more);
  return element;
}

// The beginning of a text for one line, apart from its surroundings.
function inline(text, length = 220) {
  const own = h("bdi", null);
  own.textContent = text === null || text === undefined ? "" : text.length > length ? text.slice(0, length) + "…" : text;
  return own;
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return count(value);
  if (size >= 1e6) return value.toExponential(2);
  if (size >= 1000) return count(Math.round(value));
  if (size !== 0 && size < 0.001) return value.toExponential(1);
  return String(Number(value.toPrecision(digits))).replace("-", "−");
}

function count(value) { return String(value).replace("-", "−").replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f"); }

function percent(value) { return value === null || value === undefined || Number.isNaN(value) ? "–" : `${Math.round(value * 100)} %`; }

function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 90) return `${number(seconds, 2)} s`;
  if (seconds < 5400) return `${Math.round(seconds / 60)} min`;
  return `${number(seconds / 3600, 3)} h`;
}

function outcome(success, label = true) {
  return h("span", { class: `mark ${success ? "good" : "bad"}` }, success ? "✓" : "✗", label ? (success ? " success" : " failure") : null);
}

function chip(label, value, title, extra = "") {
  return h("span", { class: `chip ${extra}`, title: title || null }, h("span", { class: "quiet" }, label), " ", value);
}

function who(own) {
  if (!own) return null;
  const [weights, version] = own;
  const meaning = {
    __proto__: null,
    policy: "θ: the weights that are trained, as they were synced to the engine",
    target: "θ̄: the target weights, a moving average of θ",
    initial: "the weights that the run began with",
    input: "nobody here: read from a log",
    package: "no model: put together from the reply and d′",
  }[weights] || "";
  return h("span", { class: "who", title: meaning }, "by ", h("b", null, inline(String(weights), 20)), ["initial", "input", "package"].includes(weights) ? null : ` v${number(version)}`);
}

function card(title, extra, ...children) {
  return h("section", { class: "card" }, h("header", null, h("h3", null, title), extra || null), ...children);
}

function table(head, rows, extra = "") {
  return h("div", { class: "scroll" }, h("table", { class: extra },
    h("thead", null, h("tr", null, head.map((each) => h("th", { scope: "col" }, each)))),
    h("tbody", null, rows.map((row) => h("tr", null, row.map((each) => h("td", null, each)))))));
}

let saidTimer = 0;
function say(text) {
  const element = document.getElementById("said");
  element.textContent = text;
  element.classList.add("shown");
  clearTimeout(saidTimer);
  saidTimer = setTimeout(() => element.classList.remove("shown"), 2400);
}

async function copy(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    const area = h("textarea", { value: text, class: "offscreen" });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) { say("the browser does not let the page copy"); return; }
  }
  document.documentElement.dataset.copied = text;  // also for those who cannot read the clipboard
  say(`${what} copied`);
}
