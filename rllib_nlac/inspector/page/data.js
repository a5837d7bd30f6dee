"use strict";
// What the page knows: runs as columns, and every text once.

const KINDS = { transition: 0, state: 1, prediction: 2 };

async function unpack(base64) {
  let bytes;
  if (Uint8Array.fromBase64) bytes = Uint8Array.fromBase64(base64.trim());
  else {
    const text = atob(base64.trim());
    bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  }
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// One run: its rows (transitions, states, predictions) as columns, with what is asked of them often in typed arrays.
class Run {
  constructor(data, texts) {
    Object.assign(this, data);
    this.texts = texts;
    const rows = this.rows, count = rows.kind.length;
    this.count = count;
    this.surprise = new Float64Array(count);
    this.verdict = new Int8Array(count);
    this.parse = new Uint8Array(count);
    this.ofKind = [[], [], []];
    for (let i = 0; i < count; i++) {
      const predicted = rows.predicted[i], success = rows.success[i];
      this.surprise[i] = predicted === null || success === null ? NaN : Math.abs(predicted - success);
      this.verdict[i] = rows.critique[i] ? rows.critique[i][1] : -1;
      const reason = this.text("reason", i) || "";
      this.parse[i] = rows.unparsed[i].length > 0 || reason.startsWith("unparsed") ? 1 : 0;
      this.ofKind[rows.kind[i]].push(i);
    }
    this.byKey = new Map();
    this.byTurn = new Map();
    for (const i of this.ofKind[KINDS.transition]) {
      this.byKey.set(this.key(i), i);
      const turn = this.turn(i);
      if (!this.byTurn.has(turn)) this.byTurn.set(turn, []);
      this.byTurn.get(turn).push(i);
    }
  }

  // The turn that was played, whenever it is drawn. Ids alone begin anew where a run goes on with another buffer.
  turn(i) { return `${this.rows.id[i]}|${this.rows.action[i]}|${this.rows.state[i]}`; }

  key(i) { return `${this.rows.iteration[i] ?? 0}.${this.rows.id[i]}`; }

  text(column, i) { return this.at(this.rows[column][i]); }

  at(number) { return number === null || number === undefined ? null : this.texts[number]; }

  messages(numbers) {
    const found = [];
    for (let i = 0; i < numbers.length; i += 2) found.push({ role: this.at(numbers[i]), content: this.at(numbers[i + 1]) });
    return found;
  }

  futures(i) {
    const flat = this.rows.futures[i], found = [];
    for (let at = 0; at < flat.length; at += 2) found.push({ text: this.at(flat[at]), success: flat[at + 1] === 1 });
    return found;
  }

  critique(i) {
    const own = this.rows.critique[i];
    return own && { text: this.at(own[0]), optimal: own[1] === 1, reason: this.at(own[2]), fix: this.at(own[3]) };
  }

  target(i) {
    const own = this.rows.target[i];
    return own && { text: this.at(own[0]), success: own[1] === 1 };
  }

  by(i, role) {
    if (!this.whoCache) this.whoCache = new Map();
    const number = this.rows.by[i];
    if (number === null) return null;
    if (!this.whoCache.has(number)) {
      let value = {};
      try { value = JSON.parse(this.at(number)) || {}; } catch { /* not ours */ }
      this.whoCache.set(number, value);
    }
    const own = this.whoCache.get(number)[role];
    return Array.isArray(own) && typeof own[0] === "string" && Number.isFinite(own[1]) ? own : null;
  }

  // Which texts a row shows, for the search.
  textsOf(i) {
    if (!this.ownTexts) this.ownTexts = new Array(this.count);
    if (!this.ownTexts[i]) {
      const rows = this.rows, found = [];
      for (const name of ["action", "observation", "judged", "refined", "next_action", "next_future", "episode"]) found.push(rows[name][i]);
      for (let at = 1; at < rows.state[i].length; at += 2) found.push(rows.state[i][at]);
      for (let at = 0; at < rows.futures[i].length; at += 2) found.push(rows.futures[i][at]);
      for (let at = 1; at < rows.unparsed[i].length; at += 2) found.push(rows.unparsed[i][at]);
      if (rows.critique[i]) found.push(rows.critique[i][0]);
      if (rows.target[i]) found.push(rows.target[i][0]);
      this.ownTexts[i] = Uint32Array.from(new Set(found.filter((each) => each !== null)));
    }
    return this.ownTexts[i];
  }

  // Of a key of the configuration; undefined where the run does not tell of it.
  setting(name) {
    const config = this.facts.config || {};
    return Object.hasOwn(config, name) ? config[name] : undefined;
  }

  curve(name) { return this.curves[name] || null; }

  last(name) {
    const own = this.curves[name] || [];
    for (let i = own.length - 1; i >= 0; i--) if (own[i] !== null) return own[i];
    return null;
  }
}

// Which texts contain a word, as one byte a text; the texts in lower case are made once.
const search = {
  lower: null,
  of: null,
  find(texts, wanted) {
    if (this.of !== texts) {
      this.lower = texts.map((text) => text.toLowerCase());
      this.of = texts;
    }
    const word = wanted.toLowerCase(), found = new Uint8Array(texts.length);
    for (let i = 0; i < texts.length; i++) if (this.lower[i].includes(word)) found[i] = 1;
    return found;
  },
};

const EMPTY = {
  text: "", outcome: "", verdict: "", reason: "", parse: "", iterationLow: "", iterationHigh: "",
  turnLow: "", turnHigh: "", ageLow: "", ageHigh: "", priorityLow: "", priorityHigh: "", sort: "newest",
};

// The rows that pass all filters, in the chosen order.
function chosen(run, filters) {
  const rows = run.rows, found = [];
  const bounds = [["iteration", 0], ["turn", 1], ["age", 0], ["priority", 0]].map(([name, shift]) => ({
    column: rows[name], shift,
    low: filters[name + "Low"] === "" ? -Infinity : Number(filters[name + "Low"]),
    high: filters[name + "High"] === "" ? Infinity : Number(filters[name + "High"]),
  })).filter((each) => each.low > -Infinity || each.high < Infinity);
  const hits = filters.text ? search.find(run.texts, filters.text) : null;
  const verdict = { yes: 1, no: 0, none: -1 }[filters.verdict];
  const outcome = { success: 1, failure: 0 }[filters.outcome];
  const reason = filters.reason ? run.texts.indexOf(filters.reason) : null;
  next: for (const i of run.ofKind[KINDS.transition]) {
    if (outcome !== undefined && rows.success[i] !== outcome) continue;
    if (verdict !== undefined && run.verdict[i] !== verdict) continue;
    if (reason !== null && rows.reason[i] !== reason) continue;
    if (filters.parse && !run.parse[i]) continue;
    for (const each of bounds) {
      const value = each.column[i];
      if (value === null || value + each.shift < each.low || value + each.shift > each.high) continue next;
    }
    if (hits && !run.textsOf(i).some((number) => hits[number])) continue;
    found.push(i);
  }
  return ordered(run, found, filters.sort);
}

function ordered(run, found, by) {
  const rows = run.rows;
  if (by === "oldest") return found;
  if (by === "newest") return found.reverse();
  const column = { priority: rows.priority, l1: rows.critic_loss, l2: rows.policy_loss, surprise: run.surprise, age: rows.age }[by];
  const value = (i) => { const own = column[i]; return own === null || Number.isNaN(own) ? -Infinity : own; };
  return found.map((i) => [value(i), i]).sort((a, b) => b[0] - a[0] || b[1] - a[1]).map((pair) => pair[1]);
}
