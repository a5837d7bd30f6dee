// Views, links, keys, and news of a run that goes on.

const VIEWS = [["run", "Run"], ["transitions", "Transitions"], ["states", "States"], ["critic", "Calibration"], ["episodes", "Episodes"], ["compare", "Compare"]];

// What the reader has set and opened in a view, by names that outlast its being made anew.
function standing(main) {
  const name = (each) => each.dataset.key || each.id, named = (selector) => [...main.querySelectorAll(selector)].filter(name);
  return {
    fields: named("select, input").map((each) => [name(each), each.type === "checkbox" ? each.checked : each.value]),
    open: new Set(named("details[open]").map(name)),
  };
}

function restore(main, kept) {
  const fields = new Map(kept.fields), name = (each) => each.dataset.key || each.id;
  for (const each of main.querySelectorAll("select, input")) {
    const value = fields.get(name(each));
    if (value === undefined || (each.tagName === "SELECT" && ![...each.options].some((option) => option.value === value))) continue;
    if (each.type === "checkbox") each.checked = value; else each.value = value;
    each.dispatchEvent(new Event("change"));
  }
  for (const each of main.querySelectorAll("details")) if (kept.open.has(name(each))) each.open = true;
}

class App {
  constructor(bundle) {
    this.filters = { ...EMPTY };
    this.open = null;
    this.view = null;
    this.take(bundle);
    this.list = new TransitionList(this);
    this.pane = h("div", { class: "detailpane", id: "pane" });
    this.split = h("div", { class: "split" }, this.list.element, this.pane);
    addEventListener("hashchange", () => { if (location.hash !== this.routed) this.route(); });
    addEventListener("keydown", (event) => this.pressed(event));
    document.getElementById("main").addEventListener("change", () => { this.touched = true; });
    this.route();
  }

  take(bundle) {
    this.runs = bundle.runs.map((each) => new Run(each, bundle.texts));
    this.which = Math.min(this.which || 0, this.runs.length - 1);
    this.frame();
  }

  get run() { return this.runs[this.which]; }

  frame() {
    document.getElementById("title").replaceChildren(inline(this.runs.map((each) => each.facts.env ? `${each.facts.algorithm || "run"} · ${each.facts.env}` : each.name)[0], 60));
    const has = (name) => name !== "compare" || this.runs.length > 1;
    replace(document.getElementById("tabs"), VIEWS.filter(([name]) => has(name)).map(([name, label]) => h("a", { href: this.viewLink(name), "data-view": name, "aria-current": this.view === name ? "page" : null }, label)));
    const tools = [];
    if (this.runs.length > 1) tools.push(h("select", { id: "which", "aria-label": "Run", onchange: (event) => { this.which = Number(event.target.value); this.open = null; location.hash = this.viewLink(this.view || "run"); this.list.sync(); this.draw(); } }, this.runs.map((each, at) => h("option", { value: String(at), selected: at === this.which }, `${"AB"[at]} · ${each.name}`))));
    if (document.documentElement.dataset.follows) tools.push(h("span", { id: "live", class: "live", title: "this page follows the run" }, "● live"));
    tools.push(h("button", { type: "button", id: "theme", class: "plain", "aria-label": "dark or light", title: "dark or light (t)", onclick: () => this.theme() }, "◐"), h("button", { type: "button", id: "help", class: "plain", "aria-label": "keys", title: "keys (?)", onclick: () => this.help() }, "?"));
    replace(document.getElementById("tools"), tools);
  }

  suffix() { return this.which ? "&r=1" : ""; }
  viewLink(name) { return `#view=${name}${this.suffix()}`; }
  link(i) { return `#t=${this.run.key(i)}${this.suffix()}`; }
  listLink(filters) { return `#view=transitions&${new URLSearchParams(filters)}${this.suffix()}`; }

  // At once, so that a key that follows finds the new view; the browser tells of the change later.
  go(link) { location.hash = link; this.route(); }

  route() {
    this.routed = location.hash;
    const asked = new URLSearchParams(location.hash.slice(1));
    const which = asked.get("r") === "1" && this.runs.length > 1 ? 1 : 0;
    if (which !== this.which) { this.which = which; this.open = null; this.list.sync(); }
    const wanted = asked.get("t");
    if (wanted !== null) {
      const i = this.run.byKey.get(wanted);
      this.open = i === undefined ? null : i;
      this.show("transitions", i === undefined ? wanted : null);
      return;
    }
    this.open = null;
    const given = [...asked].filter(([name]) => name in EMPTY);
    if (given.length) { Object.assign(this.filters, EMPTY, Object.fromEntries(given)); }
    const view = asked.get("view");
    const names = VIEWS.map(([name]) => name);
    this.show(names.includes(view) && (view !== "compare" || this.runs.length > 1) ? view : this.runs[0].iterations.length ? "run" : "transitions", null);
  }

  show(view, missing) {
    const main = document.getElementById("main"), fresh = view !== this.view;
    this.view = view;
    this.touched = false;
    document.documentElement.dataset.view = view;
    this.frame();
    if (view !== "transitions") {
      replace(main, { run: runView, states: statesView, critic: calibrationView, episodes: episodesView, compare: compareView }[view](this));
      main.scrollTop = 0;
      return;
    }
    if (fresh || !this.split.isConnected) { replace(main, this.split); this.list.sync(); this.list.apply(); }
    else if (this.open === null) { this.list.sync(); this.list.apply(); }
    this.detail(missing);
  }

  detail(missing) {
    this.split.classList.toggle("opened", this.open !== null || Boolean(missing));
    if (this.open !== null) {
      replace(this.pane, transitionView(this, this.open));
      this.pane.scrollTop = 0;
      this.list.show(this.open);
    } else {
      replace(this.pane, h("div", { class: "blank" }, missing ? h("p", null, "There is no transition ", h("code", null, inline(missing, 60)), " here.", h("br", null), "A record thins out as it grows, and this file may hold a part of it.") : [h("p", null, "Choose a transition."), h("p", { class: "quiet" }, h("kbd", null, "j"), " ", h("kbd", null, "k"), " step through the list, ", h("kbd", null, "/"), " searches, ", h("kbd", null, "?"), " shows all keys.")]));
      this.list.draw();
    }
  }

  draw() { this.view = null; this.route(); }

  filtered() { this.list.apply(); this.list.box.scrollTop = 0; if (this.open !== null) this.list.show(this.open); }

  reset() { this.filters = { ...EMPTY }; this.list.sync(); this.filtered(); }

  close() { this.go(this.viewLink("transitions")); }

  theme() {
    const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  }

  help() {
    const keys = [["j / k", "next, previous transition"], ["/", "search"], ["Esc", "leave the search; back to the list"], ["1 … 6", "views"], ["l / c / p", "copy link, chat JSON, play command"], ["x", "clear the filters"], ["t", "dark or light"], ["?", "this"]];
    const dialog = h("dialog", { id: "keys" }, h("h3", null, "Keys"), table(["", ""], keys.map(([name, what]) => [h("kbd", null, name), what])), h("form", { method: "dialog" }, h("button", null, "close")));
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  }

  pressed(event) {
    const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") { if (typing) event.target.blur(); else if (this.view === "transitions" && this.open !== null) this.close(); return; }
    if (typing) { if (event.key === "Enter" && event.target.type === "search") { event.target.blur(); this.list.step(1); } return; }
    const click = (id) => { const found = document.getElementById(id); if (found) found.click(); };
    const done = {
      j: () => this.stepping(1), k: () => this.stepping(-1), t: () => this.theme(), "?": () => this.help(), x: () => this.reset(),
      l: () => click("copy-link"), c: () => click("copy-chat"), p: () => click("copy-play"),
      "/": () => { if (this.view !== "transitions") this.go(this.viewLink("transitions")); setTimeout(() => this.list.inputs.text.focus(), 30); },
    }[event.key] || (/^[1-6]$/.test(event.key) && VIEWS[event.key - 1] && (() => this.go(this.viewLink(VIEWS[event.key - 1][0]))));
    if (done) { event.preventDefault(); done(); }
  }

  stepping(by) {
    if (this.view !== "transitions") { this.go(this.viewLink("transitions")); return; }
    this.list.step(by);
  }

  // Takes news without disturbing the reader: what is open, filtered and scrolled to stays.
  renew(bundle) {
    const kept = this.open === null ? null : this.run.key(this.open), top = this.list.box.scrollTop, main = document.getElementById("main"), scrolled = main.scrollTop;
    this.take(bundle);
    this.open = kept === null ? null : this.run.byKey.get(kept) ?? null;
    if (this.view === "transitions") { this.list.sync(); this.list.apply(); this.list.box.scrollTop = top; this.list.draw(); }
    else {
      // A view that nobody has touched goes on to the latest evaluation.
      const own = standing(main), touched = this.touched || own.open.size > 0;
      this.show(this.view, null);
      if (touched) { restore(main, own); this.touched = true; }
      main.scrollTop = scrolled;
    }
  }

  async follow() {
    let stamp = null;
    const live = (text) => { const own = document.getElementById("live"); if (own) own.textContent = text; };
    for (;;) {
      try {
        const now = await (await fetch("stamp", { cache: "no-store" })).text();
        if (stamp !== null && now !== stamp) { this.renew(await (await fetch("data", { cache: "no-store" })).json()); document.documentElement.dataset.renewed = String(Number(document.documentElement.dataset.renewed || 0) + 1); }
        stamp = stamp === null ? document.documentElement.dataset.stamp || now : now;
        live("● live");
      } catch { live("○ the server is gone"); }
      await new Promise((resolve) => setTimeout(resolve, 1500));
    }
  }
}

(async () => {
  try {
    const element = document.getElementById("data");
    const bundle = await unpack(element.textContent);
    element.remove();
    window.app = new App(bundle);
    document.documentElement.dataset.ready = performance.now().toFixed(0);
    if (document.documentElement.dataset.follows) window.app.follow();
  } catch (error) {
    document.getElementById("main").replaceChildren(h("p", { class: "pad" }, "This page could not be shown: ", String(error), ". It needs a browser of 2023 or later."));
    throw error;
  }
})();
