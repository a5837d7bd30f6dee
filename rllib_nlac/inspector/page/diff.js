// What changed between two texts, word by word.

const MAX_CELLS = 4e6;

function pieces(text) { return text.match(/\s+|[\p{L}\p{N}_]+|[^\s]/gu) || []; }

// [["=", text], ["-", text], ["+", text], ...], by the longest common subsequence of words.
function difference(before, after) {
  let a = pieces(before), b = pieces(after), start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start++;
  let end = 0;
  while (end < a.length - start && end < b.length - start && a[a.length - 1 - end] === b[b.length - 1 - end]) end++;
  const head = a.slice(0, start), tail = a.slice(a.length - end);
  a = a.slice(start, a.length - end);
  b = b.slice(start, b.length - end);
  const parts = [["=", head.join("")]];
  if (a.length * b.length > MAX_CELLS) parts.push(["-", a.join("")], ["+", b.join("")]);
  else parts.push(...byWords(a, b));
  parts.push(["=", tail.join("")]);
  return blocks(joined(parts));
}

// Changes with nothing but space between them become one: whole words are read more easily than a patchwork.
function blocks(parts) {
  const found = [];
  let out = "", put_ = "", space = "";
  const flush = () => {
    if (out) found.push(["-", out]);
    if (put_) found.push(["+", put_]);
    if (space) found.push(["=", space]);
    out = put_ = space = "";
  };
  for (const [kind, text] of parts) {
    if (kind === "=" && (out || put_) && !text.trim()) { space += text; continue; }
    if (kind === "=") { flush(); found.push([kind, text]); continue; }
    if (space) { out += space; put_ += space; space = ""; }
    if (kind === "-") out += text; else put_ += text;
  }
  flush();
  return joined(found);
}

function byWords(a, b) {
  const width = b.length + 1, best = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i--)
    for (let j = b.length - 1; j >= 0; j--)
      best[i * width + j] = a[i] === b[j] ? best[(i + 1) * width + j + 1] + 1 : Math.max(best[(i + 1) * width + j], best[i * width + j + 1]);
  const parts = [];
  let i = 0, j = 0;
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) { parts.push(["=", a[i]]); i++; j++; }
    else if (j >= b.length || (i < a.length && best[(i + 1) * width + j] >= best[i * width + j + 1])) parts.push(["-", a[i++]]);
    else parts.push(["+", b[j++]]);
  }
  return parts;
}

function joined(parts) {
  const found = [];
  for (const [kind, text] of parts) {
    if (!text) continue;
    if (found.length && found[found.length - 1][0] === kind) found[found.length - 1][1] += text;
    else found.push([kind, text]);
  }
  return found;
}

function differenceView(before, after) {
  const parts = difference(before, after);
  return h("div", { class: "words diff", dir: "auto" }, parts.map(([kind, text]) =>
    kind === "=" ? document.createTextNode(text) : h(kind === "-" ? "del" : "ins", { title: kind === "-" ? "taken out" : "put in" }, text)));
}
