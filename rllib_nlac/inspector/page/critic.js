// The critic over training: the same states at every evaluation, how well it is calibrated, and two runs side by side.

// Fixed states by dialogue and action, each with what was said of it, in order.
function statesOf(run) {
  const groups = new Map();
  for (const i of run.ofKind[KINDS.state]) {
    const key = JSON.stringify([run.messages(run.rows.state[i]), run.text("action", i)]);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(i);
  }
  return groups;
}

function momentView(run, i, marked) {
  const rows = run.rows, futures = run.futures(i), critique = run.critique(i), refined = run.text("refined", i), action = run.text("action", i) || "", wins = futures.filter((each) => each.success).length;
  const before = marked === null ? null : run.critique(marked), same = (now, then) => (marked === null || then === null || now === null ? words(now) : differenceView(then, now));
  return h("li", { class: "moment" },
    h("div", { class: "when" }, h("b", null, `iteration ${number(rows.iteration[i])}`), who([...(run.by(i, "future") || ["policy"])].slice(0, 1).concat(rows.version[i]))),
    h("div", { class: "what" },
      h("div", { class: "labelled" }, h("span", { class: "quiet" }, "foresees"), futures.length ? h("div", null, h("p", { class: "wins" }, futures.map((each) => outcome(each.success, false)), ` ${wins} of ${futures.length} end in success`), same(futures[0].text, marked === null || !run.futures(marked).length ? null : run.futures(marked)[0].text)) : words(null)),
      h("div", { class: "labelled" }, h("span", { class: "quiet" }, "says"), critique ? h("div", null, h("b", null, critique.optimal ? "● optimal" : "○ not optimal"), same([critique.reason, critique.fix].filter(Boolean).join("\n") || critique.text, before && ([before.reason, before.fix].filter(Boolean).join("\n") || before.text))) : words(null)),
      h("div", { class: "labelled" }, h("span", { class: "quiet" }, "would rather"), refined === null ? words(null) : refined.trim() === action.trim() ? h("p", { class: "quiet" }, "do the same") : differenceView(action, refined))));
}

function stateCard(run, rows_, title, options) {
  const first = rows_[0], list = h("ol", { class: "moments" });
  const draw = (marks) => replace(list, rows_.map((i, at) => momentView(run, i, marks && at ? rows_[at - 1] : null)));
  draw(false);
  return card(title, h("span", { class: "line" }, outcome(run.rows.success[first] === 1), h("label", { class: "check" }, h("input", { type: "checkbox", class: "marks", onchange: (event) => draw(event.target.checked) }), "mark changes")),
    options && options.bare ? null : h("div", { class: "columns" }, h("div", null, dialogueView(run.messages(run.rows.state[first]))), h("div", null, step("Action", null, "act", words(run.text("action", first))), step("What came", null, "came", words(run.text("observation", first))))),
    list);
}

function statesView(app) {
  const groups = [...statesOf(app.run).values()];
  return h("div", { class: "page", id: "states" }, h("h2", null, "The same states at every evaluation"),
    h("p", { class: "quiet" }, "The first evaluation chose a few turns. Every later one asks the critic about them again: what changes is the critic alone."),
    groups.length ? groups.map((own, at) => stateCard(app.run, own, `State ${at + 1}`)) : h("p", { class: "quiet" }, "No evaluation has asked about fixed states (evaluation_interval, evaluation_critic: fixed_states)."));
}

function calibrationView(app) {
  const run = app.run, page = h("div", { class: "page", id: "calibration" }, h("h2", null, "Does the critic foresee what comes?"));
  const known = run.evaluations.filter((each) => each.critic);
  if (!known.length) { put(page, null, [h("p", { class: "quiet" }, "No evaluation has examined the critic (evaluation_interval, evaluation_critic: states).")]); return page; }
  put(page, null, [h("p", { class: "quiet" }, "Turns of fresh evaluation episodes: the share of futures that end well is the predicted chance of success, held against what the episode came to.")]);
  const xs = known.map((each) => each.iteration), of = (path) => known.map((each) => path.split("/").reduce((value, part) => (value === null || value === undefined ? null : value[part] ?? null), each));
  const line = (name, path, low, high) => ({ name, xs, ys: of(path), low: low && of(low), high: high && of(high) });
  const charts = h("div", { class: "charts" });
  const place = h("div", { class: "charts" }), surprises = h("div", null);
  const select = h("select", { "aria-label": "Evaluation", id: "evaluation", onchange: () => draw(known[Number(select.value)]) }, known.map((each, at) => h("option", { value: String(at), selected: at === known.length - 1 }, each.iteration ? `after iteration ${number(each.iteration)}` : "before training")));
  const draw = (each) => {
    const sets = [["fresh episodes", each.critic.reliability], ["replay buffer", each.critic.replayed && each.critic.replayed.reliability]].filter(([, own]) => isReliability(own)).map(([name, own]) => ({ name, ...own }));
    replace(place, sets.length ? reliabilityChart(sets, "Reliability") : null, figuresCard(each.critic), byCard("By turn", each.critic.by_turn), byCard("Replay buffer, by age", each.critic.replayed && each.critic.replayed.by_age), refinementCard(each.critic.refinement));
    replace(surprises, surprisesCard(app, each.iteration));
  };
  replace(charts, lineChart([line("fresh", "critic/auc"), line("replayed", "critic/replayed/auc")], { title: "AUC", low: 0, high: 1, note: "0.5 is chance, 1 perfect" }),
    lineChart([line("Brier", "critic/brier"), line("of the base rate", "critic/brier_of_base_rate"), line("calibration error", "critic/ece")], { title: "Brier score and calibration error", low: 0, note: "0 is perfect" }),
    lineChart([line("foreseen", "critic/predicted_success"), line("came", "critic/success")], { title: "Foreseen and came", low: 0, high: 1 }),
    lineChart([line("win rate", "critic/refinement/win_rate", "critic/refinement/win_low", "critic/refinement/win_high")], { title: "Refined against action", low: 0, high: 1, note: "0.5: refinement is worth nothing" }));
  put(page, null, [charts, h("h2", null, "One evaluation ", select), place, surprises, driftCard(run)]);
  draw(known[known.length - 1]);
  return page;
}

function figuresCard(critic) {
  const names = [["num_states", "turns"], ["auc", "AUC"], ["brier", "Brier score"], ["brier_of_base_rate", "Brier of the base rate"], ["ece", "calibration error"], ["predicted_success", "success foreseen"], ["success", "success came"], ["unparsed_rate", "no future parsed"]];
  return card("Figures", null, table(["", "fresh", "replayed"], names.map(([name, label]) => [label, number(critic[name]), number(critic.replayed ? critic.replayed[name] : null)])));
}

function byCard(title, parts) {
  const names = Object.keys(parts || {}).sort((a, b) => parseInt(a, 10) - parseInt(b, 10));
  if (!names.length) return null;
  return card(title, null, table(["", "turns", "foreseen", "came", "AUC"], names.map((name) => { const own = parts[name] || {}; return [name.replaceAll("_", " "), number(own.num_states), [bar(own.predicted_success), " ", percent(own.predicted_success)], [bar(own.success), " ", percent(own.success)], number(own.auc)]; })));
}

function refinementCard(own) {
  if (!own) return null;
  return card("What refinement is worth", h("span", { class: "quiet" }, "both played to the end from the same state"), table(["", ""], [["states", number(own.num_states)], ["where the two differ", number(own.num_decided)], ["refined wins", [bar(own.win_rate, own.win_low, own.win_high), ` ${percent(own.win_rate)}, ${percent(own.win_low)} to ${percent(own.win_high)}`]], ["success of the action", percent(own.success_of_action)], ["success of the refined one", percent(own.success_of_refined)], ["gain", `${number(own.gain)}, ${number(own.gain_low)} to ${number(own.gain_high)}`]]));
}

// How far targets of the same turn move from one time to the next that it was drawn.
function driftCard(run) {
  const bins = new Map();
  for (const own of run.byTurn.values()) for (let at = 1; at < own.length; at++) {
    const one = run.target(own[at - 1]), two = run.target(own[at]), gap = run.rows.version[own[at]] - run.rows.version[own[at - 1]];
    if (!one || !two || !(gap > 0)) continue;
    const bin = 2 ** Math.floor(Math.log2(gap)), sum = bins.get(bin) || { pairs: 0, flipped: 0, moved: 0 };
    sum.pairs++;
    sum.flipped += one.success !== two.success;
    sum.moved += one.text !== two.text;
    bins.set(bin, sum);
  }
  if (!bins.size) return null;
  return card("How far targets drift", h("span", { class: "quiet" }, "the same turn, backed up at two times"), table(["versions between", "pairs", "other outcome", "other words"], [...bins].sort((a, b) => a[0] - b[0]).map(([bin, sum]) => [bin === 1 ? "1" : `${bin} to ${2 * bin - 1}`, number(sum.pairs), [bar(sum.flipped / sum.pairs), " ", percent(sum.flipped / sum.pairs)], [bar(sum.moved / sum.pairs), " ", percent(sum.moved / sum.pairs)]])));
}

function surprisesCard(app, iteration) {
  const run = app.run, own = run.ofKind[KINDS.prediction].filter((i) => run.rows.iteration[i] === iteration);
  if (!own.length) return null;
  const shown = own.filter((i) => !Number.isNaN(run.surprise[i])).sort((a, b) => run.surprise[b] - run.surprise[a]).slice(0, 12);
  return card("What surprised the critic most", h("span", { class: "quiet" }, `fresh turns of the evaluation after iteration ${number(iteration)}`), h("div", { class: "surprises" }, shown.map((i) => h("details", null,
    h("summary", null, h("b", null, `foresaw ${percent(run.rows.predicted[i])}`), " ", outcome(run.rows.success[i] === 1), " ", inline(run.text("action", i), 120)),
    h("div", { class: "columns" }, h("div", null, dialogueView(run.messages(run.rows.state[i])), step("Action", null, "act", words(run.text("action", i)))), h("div", null, step("Futures", null, "think", futuresView(run.futures(i))), step("What came", null, "came", words(run.text("observation", i)))))))));
}

function episodesView(app) {
  const run = app.run, page = h("div", { class: "page", id: "episodes" }, h("h2", null, "Evaluation episodes"));
  if (!run.episodes.length) { put(page, null, [h("p", { class: "quiet" }, "None were recorded.")]); return page; }
  const iterations = [...new Set(run.episodes.map((each) => each.iteration))].sort((a, b) => b - a), place = h("div", null);
  const select = h("select", { "aria-label": "Evaluation", id: "episodes-of", onchange: () => draw() }, iterations.map((each) => h("option", { value: String(each) }, `after iteration ${number(each)}`)));
  const ending = h("select", { "aria-label": "Outcome", id: "episodes-outcome", onchange: () => draw() }, [["", "any outcome"], ["1", "✓ success"], ["0", "✗ failure"]].map(([value, text]) => h("option", { value }, text)));
  const draw = () => replace(place, run.episodes.filter((each) => String(each.iteration) === select.value).map((each) => ending.value !== "" && each.success !== (ending.value === "1") ? null : h("details", { class: "card episode" },
    h("summary", null, outcome(each.success), ` task ${number(each.task)} · ${number(each.rewards.length)} turns · return ${number(each.rewards.reduce((a, b) => a + b, 0))} · `, inline(run.at(each.ended), 60)), dialogueView(run.messages(each.messages)))));
  put(page, null, [h("p", { class: "line" }, select, ending), place]);
  draw();
  return page;
}

function compareView(app) {
  const [a, b] = app.runs, page = h("div", { class: "page", id: "compare" }, h("h2", null, "Two runs side by side"),
    h("p", { class: "legendline" }, [a, b].map((run, at) => h("span", null, key(STYLES[at]), h("b", null, "AB"[at], " "), inline(run.name, 120)))));
  const charts = CURVES.flatMap((each) => (linesOf(each, a).length ? linesOf(each, a) : linesOf(each, b)).slice(0, each.title === "Losses" ? 2 : 1).map((own) => lineChart([...series(a, [own], "A "), ...series(b, [own], "B ")], { ...each, title: each.title === "Losses" ? own[1] : each.title === "Success" ? "Success in evaluation" : `${each.title}: ${own[1]}` }))).filter(Boolean);
  const auc = lineChart([...series(a, [[C + "auc", "AUC"]], "A "), ...series(b, [[C + "auc", "AUC"]], "B ")], { title: "AUC of the critic", low: 0, high: 1 });
  put(page, null, [h("div", { class: "charts" }, charts, auc)]);
  const reliable = [a, b].map((run, at) => { const last = run.evaluations.filter((each) => each.critic && isReliability(each.critic.reliability)).pop(); return last && { name: `${"AB"[at]}, after iteration ${number(last.iteration)}`, ...last.critic.reliability }; }).filter(Boolean);
  if (reliable.length) page.append(h("div", { class: "charts" }, reliabilityChart(reliable, "Reliability at the last evaluation")));
  const of = (run, name) => { const pair = run.setting(name); return pair === undefined ? undefined : Array.isArray(pair) ? pair[0] : pair; };
  const usual = (name) => [a, b].map((run) => run.setting(name)).filter(Array.isArray).map((pair) => pair[1])[0];
  const told = (run, name) => { const own = of(run, name); return own === undefined ? usual(name) : own; };  // null is a value
  const names = [...new Set([...Object.keys(a.facts.config || {}), ...Object.keys(b.facts.config || {})])].filter((name) => JSON.stringify(told(a, name)) !== JSON.stringify(told(b, name))).sort();
  const text = (value) => h("code", null, inline(value === undefined || value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value), 300));
  put(page, null, [card("Configuration", h("span", { class: "quiet" }, names.length ? "where they differ" : "the same"), names.length ? table(["key", "A", "B"], names.map((name) => [h("code", null, inline(name, 80)), text(told(a, name)), text(told(b, name))]), "config") : null)]);
  const own = statesOf(a), other = statesOf(b), shared = [...own.keys()].filter((each) => other.has(each));
  put(page, null, [h("h2", null, "The same evaluation states"), shared.length ? shared.map((each, at) => h("div", { class: "sidebyside" }, stateCard(a, own.get(each), `A · state ${at + 1}`), stateCard(b, other.get(each), `B · state ${at + 1}`, { bare: true })))
    : h("p", { class: "quiet" }, "The two runs have no evaluation state in common: they were played with other seeds, or another policy played the first evaluation."),
    shared.length || !(own.size && other.size) ? null : h("div", { class: "sidebyside" }, [[a, own, "A"], [b, other, "B"]].map(([run, groups, name]) => h("div", null, [...groups.values()].map((rows_, at) => stateCard(run, rows_, `${name} · state ${at + 1}`)))))]);
  return page;
}
