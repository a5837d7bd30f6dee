// One transition in full: the dialogue, what the critic thought of the action, and what really came.

const ROLES = { __proto__: null, tools: "tools on offer", system: "system", user: "environment", assistant: "agent", tool: "tool" };
const KEPT = 6;

function dialogueView(messages) {
  const box = h("div", { class: "dialogue" });
  const one = (message) => h("div", { class: `message ${message.role in ROLES ? message.role : "user"}` }, h("span", { class: "role" }, ROLES[message.role] || inline(message.role, 20)), words(message.content));
  const first = messages.findIndex((message) => message.role !== "tools" && message.role !== "system");
  const opening = first + 1, hidden = messages.length - opening - KEPT;
  const draw = (all) => replace(box, hidden > 1 && !all
    ? [messages.slice(0, opening).map(one), h("button", { class: "more", type: "button", onclick: () => draw(true) }, `… ${hidden} messages between`), messages.slice(opening + hidden).map(one)]
    : messages.map(one));
  draw(false);
  return box;
}

function step(title, by, extra, ...children) {
  return h("section", { class: `step ${extra}` }, h("header", null, h("h3", null, title), by), ...children);
}

function futuresView(futures) {
  if (!futures.length) return h("p", { class: "quiet" }, "none parsed");
  return h("ol", { class: "futures" }, futures.map((each) => h("li", null, outcome(each.success), words(each.text))));
}

function critiqueView(critique) {
  if (!critique) return h("p", { class: "quiet" }, "none, or it did not parse");
  const parts = [h("p", { class: "verdictline" }, h("b", null, critique.optimal ? "● optimal" : "○ not optimal"))];
  if (critique.reason) parts.push(h("div", { class: "labelled" }, h("span", { class: "quiet" }, "why"), words(critique.reason)));
  if (critique.fix) parts.push(h("div", { class: "labelled" }, h("span", { class: "quiet" }, "instead"), words(critique.fix)));
  if (!critique.reason && !critique.fix) parts.push(words(critique.text));
  else parts.push(h("details", null, h("summary", null, "as it was written"), words(critique.text, "mono")));
  return parts;
}

function refinedView(action, refined, reason) {
  if (refined === null) return h("p", { class: "quiet" }, "none");
  if (refined.trim() === (action || "").trim()) return [h("p", { class: "quiet" }, "the same as the action"), words(refined)];
  return [differenceView(action || "", refined), h("details", null, h("summary", null, "without marks"), words(refined))];
}

// What came of it all, in a sentence or two.
function summaryOf(run, i) {
  const rows = run.rows, futures = run.futures(i), critique = run.critique(i), reason = run.text("reason", i), won = rows.success[i] === 1;
  const parts = [];
  if (futures.length) {
    const wins = futures.filter((each) => each.success).length;
    const foresees = wins * 2 >= futures.length;
    parts.push(futures.length === 1 ? `The critic foresaw ${foresees ? "success" : "failure"}` : `${wins} of ${futures.length} futures end in success`);
    parts.push(` and the episode ended in ${won ? "success" : "failure"}: ${foresees === won ? "as foreseen" : "a surprise"}. `);
  } else parts.push(`The episode ended in ${won ? "success" : "failure"}. `);
  if (critique) parts.push(critique.optimal ? "The action was found optimal. " : "The action was found wanting. ");
  if (reason) parts.push((REASONS[reason] || reason).replace(/^(refined|kept|not judged): /, "").replace(/^./, (c) => c.toUpperCase()), ".");
  return h("p", { class: "summary" }, parts);
}

function transitionView(app, i) {
  const run = app.run, rows = run.rows, action = run.text("action", i) || "", reason = run.text("reason", i), refined = run.text("refined", i), critique = run.critique(i), target = run.target(i);
  const judged = run.text("judged", i), ended = run.text("ended", i);
  const loss = (value) => (rows.stopped[i] ? "stopped" : number(value));
  const same = (run.byTurn.get(run.turn(i)) || []).filter((each) => each !== i);
  const head = h("header", { class: "dhead" },
    h("div", { class: "dtitle" },
      h("button", { class: "plain back", type: "button", onclick: () => app.close(), "aria-label": "back to the list" }, "‹ list"),
      h("h2", { tabindex: "-1" }, `Iteration ${number(rows.iteration[i])}, turn ${number(rows.turn[i] + 1)}`),
      h("span", { class: "quiet" }, inline(run.text("env", i), 40), " · ", inline(run.text("episode", i), 24)),
      h("span", { class: "actions" },
        h("button", { type: "button", id: "copy-link", title: "a link to this transition in this file", onclick: () => copy(location.href.split("#")[0] + app.link(i), "link") }, "link"),
        h("button", { type: "button", id: "copy-chat", title: "the dialogue and the action as chat JSON", onclick: () => copy(chatOf(run, i), "chat JSON") }, "chat JSON"),
        h("button", { type: "button", id: "copy-play", title: "the command that plays this task yourself", disabled: rows.task_seed[i] === null, onclick: () => copy(playCommand(run, i), "command") }, "play it"))),
    h("div", { class: "chips" }, outcome(rows.success[i] === 1),
      rows.reason[i] !== null ? chip("", inline((reason || "").replaceAll("_", " "), 40), REASONS[reason]) : null,
      chip("priority", number(rows.priority[i]), "replay priority before the exponent: L1 + L2, clipped"),
      chip("L1", loss(rows.critic_loss[i]), "critic loss: nats a token of the Bellman target"),
      chip("L2", loss(rows.policy_loss[i]), "policy loss: nats a token of what the policy learns"),
      chip("surprise", number(run.surprise[i]), "distance of the predicted chance of success and what came"),
      chip("age", number(rows.age[i]), "versions of the weights since the action was played"),
      rows.importance[i] !== null ? chip("weight", number(rows.importance[i] * (rows.weight[i] ?? 1)), "importance weight times the refinement's own") : null,
      run.parse[i] ? h("span", { class: "chip warn" }, "⚠ a text did not parse") : null),
    summaryOf(run, i));
  const left = [
    step("Dialogue", null, "said", dialogueView(run.messages(rows.state[i]))),
    step("Action", who(run.by(i, "action")), "act", words(action), judged !== null ? h("div", { class: "labelled" }, h("span", { class: "quiet" }, "judged in its place"), words(judged)) : null),
    step("What really came", null, "came", words(run.text("observation", i)),
      h("p", { class: "quiet" }, `reward ${number(rows.reward[i])} · from here to the end ${number(rows.return_to_go[i])} · `, ended ? h("b", null, `the episode ${ended === "terminated" ? "ended" : "was cut off"} here`) : "the episode went on", " and came to ", outcome(rows.success[i] === 1))),
  ];
  const right = [
    step("Futures", who(run.by(i, "future")), "think", h("p", { class: "hint" }, "what the critic expects to follow this action"), futuresView(run.futures(i))),
    step("Critique", who(run.by(i, "critique")), "think", critiqueView(critique)),
    step("Refined action", who(run.by(i, "refinement")), "think", refinedView(judged ?? action, refined, reason), h("p", { class: "quiet" }, REASONS[reason] || inline(reason || ""))),
    step("Bellman target", who(run.by(i, "target")), "backup",
      run.text("next_action", i) === null ? h("p", { class: "quiet" }, ended ? "nothing follows: it rests on the last observation and the reward" : "no next action") : [
        h("div", { class: "labelled" }, h("span", { class: "quiet" }, "a′ next action ", who(run.by(i, "next_action"))), words(run.text("next_action", i))),
        h("div", { class: "labelled" }, h("span", { class: "quiet" }, "d′ its future ", who(run.by(i, "next_future"))), words(run.text("next_future", i)))],
      h("div", { class: "labelled strong" }, h("span", { class: "quiet" }, "y what the critic is taught"), target ? [outcome(target.success), words(target.text)] : h("p", { class: "quiet" }, "did not parse: the critic learns nothing here"))),
  ];
  const raw = rows.unparsed[i], lost = [];
  for (let at = 0; at < raw.length; at += 2) lost.push(h("div", { class: "labelled" }, h("span", { class: "quiet" }, inline(run.at(raw[at]), 20)), words(run.at(raw[at + 1]), "mono")));
  if (lost.length) right.push(step("Did not parse", null, "lost", h("p", { class: "hint" }, "as it came"), lost));
  const below = [];
  if (rows.tokens[i]) below.push(tokenView(run, i));
  if (same.length) below.push(step("The same turn in other iterations", null, "again", h("p", { class: "chips" },
    [...same, i].sort((a, b) => rows.iteration[a] - rows.iteration[b]).map((each) => h("a", { class: `chip${each === i ? " here" : ""}`, href: app.link(each) }, `it ${number(rows.iteration[each])} `, { 1: "●", 0: "○", "-1": "·" }[run.verdict[each]])))));
  return h("article", { class: "detail", id: "detail" }, head,
    h("div", { class: `columns${right.length ? "" : " single"}` }, h("div", null, left), right.length ? h("div", null, right) : null), below);
}

const MEASURES = {
  share: ["share of the loss", "what each token adds to the text's loss under θ"],
  policy: ["surprise under θ", "−log p of each token under θ, in nats, before this update"],
  target: ["surprise under θ̄", "−log p of each token under θ̄, in nats"],
  gap: ["θ̄ against θ", "log p under θ minus log p under θ̄, in nats: above 0 θ likes the token more"],
  played: ["surprise as it was played", "−log p of each token when it was sampled, in nats"],
};
const TEXTS = { target: "Bellman target", refined: "refined action", action: "action" };

function tokenView(run, i) {
  const strips = run.rows.tokens[i], reason = run.text("reason", i), trained = { target: true, refined: true, action: reason === "yes_success" || reason === "kept" };
  let text = ["target", "refined", "action"].find((each) => strips[each]), measure = null;
  const body = h("div", null);
  const draw = () => {
    const strip = strips[text], own = values(strip);
    if (!own[measure]) measure = Object.keys(own)[0];
    const row = own[measure] || strip.text.map(() => null), most = Math.max(...row.map((each) => Math.abs(each ?? 0)), measure === "share" ? 0.01 : 0.1);
    const readout = h("p", { class: "quiet readout" }, trained[text] ? `${strip.text.length} tokens, all of them trained on; the prompt before them is masked` : "dimmed: the policy is not trained on this text here");
    replace(body,
      h("div", { class: "line" },
        h("select", { "aria-label": "Text", id: "token-text", onchange: (event) => { text = event.target.value; draw(); } }, ["target", "refined", "action"].filter((each) => strips[each]).map((each) => h("option", { value: each, selected: each === text }, TEXTS[each]))),
        h("select", { "aria-label": "Measure", id: "token-measure", onchange: (event) => { measure = event.target.value; draw(); } }, Object.keys(own).map((each) => h("option", { value: each, selected: each === measure }, MEASURES[each][0])))),
      h("p", { class: "hint" }, MEASURES[measure] ? MEASURES[measure][1] : "nothing is known of these tokens"),
      h("div", { class: `strip${trained[text] ? "" : " masked"}`, role: "list" }, strip.text.map((number_, at) => {
        const value = row[at], shown = run.at(number_), size = value === null ? 0 : Math.abs(value) / most;
        const tell = () => { readout.textContent = `token ${at + 1}: ${Object.entries(own).map(([name, each]) => `${MEASURES[name][0]} ${name === "share" ? percent(each[at]) : number(each[at])}`).join(" · ")}`; };
        return h("span", { class: `token${value < 0 ? " below" : ""}`, role: "listitem", tabindex: "0", onpointerenter: tell, onfocus: tell, style: { "--size": size.toFixed(3) } }, h("bdi", null, shown === "\n" ? "⏎" : shown), h("i", { "aria-hidden": "true" }));
      })), readout);
  };
  draw();
  return step("Token by token", null, "tokens", body);
}

function values(strip) {
  const found = {}, length = strip.text.length, known = (name) => Array.isArray(strip[name]) && strip[name].length === length && strip[name].some((each) => each !== null);
  const minus = (row) => row.map((each) => (each === null ? null : -each));
  if (known("policy")) {
    const all = minus(strip.policy), sum = all.reduce((a, b) => a + (b ?? 0), 0) || 1;
    found.share = all.map((each) => (each === null ? null : each / sum));
    found.policy = all;
  }
  if (known("target")) found.target = minus(strip.target);
  if (known("policy") && known("target")) found.gap = strip.policy.map((each, at) => (each === null || strip.target[at] === null ? null : each - strip.target[at]));
  if (known("played")) found.played = minus(strip.played);
  return found;
}

function chatOf(run, i) {
  return JSON.stringify([...run.messages(run.rows.state[i]), { role: "assistant", content: run.text("action", i) }], null, 1);
}

function playCommand(run, i) {
  const quoted = (text) => `'${String(text).replaceAll("'", "'\\''")}'`;
  const config = run.facts.env_config && Object.keys(run.facts.env_config).length ? ` --config ${quoted(JSON.stringify(run.facts.env_config))}` : "";
  return `rllib env play ${quoted(run.facts.env || run.text("env", i))}${config} --seed ${run.rows.task_seed[i]}`;
}
