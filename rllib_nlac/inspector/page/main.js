// Views, links and keys.

const VIEWS = [["run", "Run"], ["transitions", "Transitions"], ["states", "States"], ["critic", "Calibration"], ["episodes", "Episodes"], ["compare", "Compare"]];

class App {
  constructor(bundle) {
    this.filters = { ...EMPTY };
    this.open = null;
    this.view = null;
    this.runs = bundle.runs.map((each) => new Run(each, bundle.texts));
    this.which = 0;
    this.frame();
    this.list = new TransitionList(this);
    this.pane = h("div", { class: "detailpane", id: "pane" });
    this.split = h("div", { class: "split" }, this.list.element, this.pane);
    addEventListener("hashchange", () => { if (location.hash !== this.routed) this.route(); });
    addEventListener("keydown", (event) => this.pressed(event));
    this.route();
  }

  get run() { return this.runs[this.which]; }

  frame() {
    document.getElementById("title").replaceChildren(inline(this.runs.map((each) => each.facts.env ? `${each.facts.algorithm || "run"} · ${each.facts.env}` : each.name)[0], 60));
    const has = (name) => name !== "compare" || this.runs.length > 1;
    replace(document.getElementById("tabs"), VIEWS.filter(([name]) => has(name)).map(([name, label]) => h("a", { href: this.viewLink(name), "data-view": name, "aria-current": this.view === name ? "page" : null }, label)));
    const tools = [];
    if (this.runs.length > 1) tools.push(h("select", { id: "which", "aria-label": "Run", onchange: (event) => { this.which = Number(event.target.value); this.open = null; location.hash = this.viewLink(this.view || "run"); this.list.sync(); this.draw(); } }, this.runs.map((each, at) => h("option", { value: String(at), selected: at === this.which }, `${"AB"[at]} · ${each.name}`))));
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
}

(async () => {
  try {
    const element = document.getElementById("data");
    const bundle = await unpack(element.textContent);
    element.remove();
    window.app = new App(bundle);
    document.documentElement.dataset.ready = performance.now().toFixed(0);
  } catch (error) {
    document.getElementById("main").replaceChildren(h("p", { class: "pad" }, "This page could not be shown: ", String(error), ". It needs a browser of 2023 or later."));
    throw error;
  }
})();
