// The list of transitions: filters above, and only the rows that are seen below.

const ROW = 74;
const REASONS = {
  __proto__: null,  // a record may give "constructor" as its reason
  refined: "refined: the policy learns the refined action",
  kept: "kept: refinement wrote the same action again, and the policy learns it",
  yes_success: "approved, and success is foreseen: the policy learns the action as it is",
  yes_skipped: "approved, but success is not foreseen: the policy learns nothing here",
  not_refined: "no refinement was asked for, or all candidates were worth the same",
  rejected: "the critic did not accept the refined action, which counts less or not at all",
  not_judged: "not judged: the critic alone learns from it",
  unparsed_future: "no future parsed: the policy learns nothing here",
  unparsed_critique: "the critique did not parse: the policy learns nothing here",
  unparsed_action: "the refined action did not parse: the policy learns nothing here",
};

class TransitionList {
  constructor(app) {
    this.app = app;
    this.order = [];
    this.inner = h("div", { class: "rows" });
    this.box = h("div", { class: "listbox", role: "listbox", tabindex: "0", "aria-label": "Transitions", id: "list" }, this.inner);
    this.total = h("span", { class: "quiet", id: "count", role: "status" });
    this.form = this.makeForm();
    this.element = h("div", { class: "listpane" }, this.form, this.box);
    this.box.addEventListener("scroll", () => { if (!this.due) { this.due = true; requestAnimationFrame(() => { this.due = false; this.draw(); }); } }, { passive: true });
    if (window.ResizeObserver) new ResizeObserver(() => this.draw()).observe(this.box);
  }

  makeForm() {
    const filters = this.app.filters;
    this.inputs = {};
    const field = (name, label, input) => { this.inputs[name] = input; input.id = `f-${name}`; input.value = filters[name]; input.setAttribute("aria-label", label); return input; };
    const changed = (name, delay) => (event) => {
      clearTimeout(this.timer);
      const value = event.target.type === "checkbox" ? (event.target.checked ? "1" : "") : event.target.value;
      this.timer = setTimeout(() => { this.app.filters[name] = value; this.app.filtered(); }, delay);
    };
    const choice = (name, label, options) => field(name, label, h("select", { onchange: changed(name, 0) }, options.map(([value, text]) => h("option", { value }, text))));
    const bounds = (name, label, step) => h("label", { class: "bounds" }, h("span", null, label),
      field(`${name}Low`, `${label}, at least`, h("input", { type: "number", step, placeholder: "from", oninput: changed(`${name}Low`, 120) })),
      field(`${name}High`, `${label}, at most`, h("input", { type: "number", step, placeholder: "to", oninput: changed(`${name}High`, 120) })));
    const parse = field("parse", "only parse failures", h("input", { type: "checkbox", onchange: changed("parse", 0) }));
    const reasons = h("select", { onchange: changed("reason", 0) }, h("option", { value: "" }, "any"));
    field("reason", "What the policy learns", reasons);
    this.more = h("details", { class: "morefilters" }, h("summary", null, "more filters"),
      h("div", { class: "grid2" },
        bounds("iteration", "iteration", "1"), bounds("turn", "turn", "1"), bounds("age", "age, versions", "1"), bounds("priority", "priority", "any"),
        h("label", { class: "bounds" }, h("span", null, "policy learns"), reasons),
        h("label", { class: "check" }, parse, "a text did not parse")));
    return h("form", { class: "filters", onsubmit: (event) => event.preventDefault() },
      h("div", { class: "line" }, field("text", "Search in all texts", h("input", { type: "search", placeholder: "Search in all texts  ( / )", oninput: changed("text", 60) }))),
      h("div", { class: "line" },
        choice("outcome", "Outcome of the episode", [["", "any outcome"], ["success", "✓ success"], ["failure", "✗ failure"]]),
        choice("verdict", "Verdict of the critique", [["", "any verdict"], ["yes", "optimal"], ["no", "not optimal"], ["none", "no verdict"]]),
        choice("sort", "Order", [["newest", "newest"], ["oldest", "oldest"], ["priority", "priority ↓"], ["l1", "L1 critic ↓"], ["l2", "L2 policy ↓"], ["surprise", "surprise ↓"], ["age", "age ↓"]])),
      this.more,
      h("div", { class: "line foot" }, this.total, h("button", { type: "button", class: "plain", id: "reset", onclick: () => this.app.reset() }, "clear filters")));
  }

  // Takes the run's reasons and what the filters hold now.
  sync() {
    const run = this.app.run, own = this.inputs.reason;
    const reasons = [...new Set(run.ofKind[KINDS.transition].map((i) => run.text("reason", i)))].filter(Boolean).sort();
    replace(own, h("option", { value: "" }, "any"), reasons.map((each) => h("option", { value: each }, each.replaceAll("_", " "))));
    for (const [name, input] of Object.entries(this.inputs)) {
      const value = this.app.filters[name];
      if (input.type === "checkbox") input.checked = value === "1";
      else if (input.value !== value && document.activeElement !== input) input.value = value;
    }
    if (Object.entries(this.app.filters).some(([name, value]) => value && !["text", "outcome", "verdict", "sort"].includes(name))) this.more.open = true;
  }

  apply() {
    const started = performance.now();
    this.order = chosen(this.app.run, this.app.filters);
    const all = this.app.run.ofKind[KINDS.transition].length;
    this.total.textContent = this.order.length === all ? `${count(all)} transitions` : `${count(this.order.length)} of ${count(all)}`;
    this.inner.style.height = `${this.order.length * ROW}px`;
    if (!this.order.length) replace(this.inner, h("p", { class: "quiet pad" }, all ? "Nothing passes these filters." : "No transitions were recorded."));
    else { this.inner.replaceChildren(); this.draw(); }
    document.documentElement.dataset.filterMs = (performance.now() - started).toFixed(1);
  }

  draw() {
    if (!this.order.length) return;
    const first = Math.max(0, Math.floor(this.box.scrollTop / ROW) - 4), last = Math.min(this.order.length, Math.ceil((this.box.scrollTop + this.box.clientHeight) / ROW) + 4);
    const rows = [];
    for (let at = first; at < last; at++) rows.push(this.row(at));
    this.inner.replaceChildren(...rows);
  }

  row(at) {
    const i = this.order[at], run = this.app.run, rows = run.rows, critique = run.critique(i), refined = run.text("refined", i), action = run.text("action", i) || "";
    const changed = refined !== null && refined.trim() !== action.trim();
    const selected = this.app.open === i;
    const verdict = { 1: ["●", "optimal"], 0: ["○", "not optimal"], "-1": ["·", "no verdict"] }[run.verdict[i]];
    const loss = this.app.filters.sort === "l1" ? ["L1", rows.critic_loss[i]] : this.app.filters.sort === "l2" ? ["L2", rows.policy_loss[i]] : this.app.filters.sort === "surprise" ? ["surprise", run.surprise[i]] : ["priority", rows.priority[i]];
    return h("a", { class: `row${selected ? " selected" : ""}`, role: "option", "aria-selected": String(selected), id: `row-${at}`, href: this.app.link(i), "data-at": at, style: { top: `${at * ROW}px` } },
      h("span", { class: "meta" }, outcome(rows.success[i] === 1, false), h("span", { class: "verdict", title: verdict[1] }, verdict[0], " ", verdict[1]),
        h("span", null, `it ${number(rows.iteration[i])} · turn ${number(rows.turn[i] + 1)}`, rows.age[i] > 0 ? ` · age ${number(rows.age[i])}` : ""),
        run.parse[i] ? h("span", { class: "warn", title: "a text did not parse" }, "⚠") : null,
        h("span", { class: "value", title: loss[0] }, number(loss[1]))),
      h("span", { class: "text" }, inline(action), changed ? h("span", { class: "arrow" }, " → ") : null, changed ? inline(refined) : null),
      h("span", { class: "text quiet" }, inline(critique ? critique.reason || critique.text : run.text("observation", i))));
  }

  show(i) {
    const at = this.order.indexOf(i);
    if (at < 0) { this.draw(); return; }
    const top = at * ROW;
    if (top < this.box.scrollTop || top + ROW > this.box.scrollTop + this.box.clientHeight) this.box.scrollTop = top - this.box.clientHeight / 2 + ROW / 2;
    this.box.setAttribute("aria-activedescendant", `row-${at}`);
    this.draw();
  }

  step(by) {
    if (!this.order.length) return;
    const at = this.order.indexOf(this.app.open);
    const next = at < 0 ? 0 : Math.max(0, Math.min(this.order.length - 1, at + by));
    this.app.go(this.app.link(this.order[next]));
  }
}
