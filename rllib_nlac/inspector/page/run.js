// The run as a whole: how it went, what to look at, and how it was configured.

const STAGES = ["play", "branches", "replay", "waves", "logprob_gap", "learner", "record", "sync", "evaluation"];
const U = "unparsed_answer_rate", L = "learners/default_policy/", E = "evaluation/env_runners/", C = "evaluation/critic/", S = "language_stages/";
const CURVES = [
  { title: "Success", low: 0, high: 1, lines: [[E + "success_rate", "evaluation", E + "success_low", E + "success_high"], ["env_runners/success_rate", "training"]], note: "95 % interval" },
  { title: "Losses", lines: [[L + "critic_loss", "L1 critic"], [L + "policy_loss", "L2 policy"]], note: "nats a token" },
  { title: "Verdicts", low: 0, high: 1, lines: [[S + "verdict_yes_rate", "found optimal"], [S + "refinement_changed_rate", "action changed"], [S + "policy_trained_rate", "policy learns"]], note: "shares of a batch" },
  { title: "Foreseen and backed up", low: 0, high: 1, lines: [[S + "predicted_success_rate", "futures end well"], [S + "target_success_rate", "targets end well"]], note: "shares" },
  { title: "Does not parse", low: 0, lines: [[S + "future/" + U, "futures"], [S + "critique/" + U, "critiques"], [S + "refinement/" + U, "refined"], [S + "target/" + U, "targets"]], note: "shares of the answers" },
  { title: "Away from the base model", low: 0, lines: [["kl_to_base", "KL to base"]], note: "nats a token" },
  { title: "Engine against learner", lines: [["logprob_gap", "largest gap"]], note: "nats; near 0 when weights agree" },
  { title: "Tokens generated", low: 0, lines: [[S + "num_generated_tokens", "critic and refinement"], ["env_runners/num_generated_tokens", "play"]], note: "an iteration" },
  { title: "Age of what is replayed", low: 0, lines: [["replay_buffer/staleness_mean", "mean"], ["replay_buffer/staleness_max", "oldest"]], note: "versions" },
  { title: "Pass@k", low: 0, high: 1, lines: passes, note: "of the tasks that are attempted several times" },
  { title: "Entropy of the actions", low: 0, lines: [[E + "action_entropy", "of a turn"], [E + "token_entropy", "of a token"]], note: "nats" },
];

// Of the same tasks, for every k that was measured, the largest first.
function passes(run) {
  for (const where of ["evaluation/repeated/", E]) {
    const found = Object.keys(run.curves).filter((name) => name.startsWith(where)).map((name) => [name, /^pass_at_(\d+)$/.exec(name.slice(where.length))]).filter(([, match]) => match);
    if (found.length) return found.map(([name, match]) => [name, `pass@${match[1]}`, +match[1]]).sort((a, b) => b[2] - a[2]).map(([name, label]) => [name, label]);
  }
  return [];
}

function linesOf(chart, run) { return typeof chart.lines === "function" ? chart.lines(run) : chart.lines; }

function series(run, lines, prefix = "") {
  return lines.map(([name, label, low, high]) => run.curve(name) && { name: prefix + label, xs: run.iterations, ys: run.curve(name), low: low && run.curve(low), high: high && run.curve(high) }).filter(Boolean);
}

function stageChart(run) {
  const totals = STAGES.map((name) => [name, run.sums[`seconds/${name}`] || 0]).filter(([, value]) => value > 0);
  const all = totals.reduce((sum, [, value]) => sum + value, 0);
  if (!all) return null;
  return h("figure", { class: "card chartcard" }, h("figcaption", null, h("h3", null, "Where the time went"), h("span", { class: "quiet" }, duration(all))),
    h("div", { class: "bars" }, totals.map(([name, value]) => h("div", null, h("span", null, name.replaceAll("_", " ")), bar(value / all), h("b", null, percent(value / all))))));
}

// What a person should look at, each with where to look.
function findings(run) {
  const found = [], say = (level, title, text, filters) => found.push({ level, title, text, filters });
  const parse = [["future", "futures"], ["critique", "critiques"], ["refinement", "refined actions"], ["target", "Bellman targets"]];
  for (const [role, name] of parse) {
    const rate = run.last(`${S}${role}/${U}`);
    if (rate > 0.1) say(rate > 0.5 ? 2 : 1, `${percent(rate)} of the ${name} do not parse`, `Read what came instead. Cut off: raise the role's token limit; chatter: is the model instruction-tuned, and are the prompts written for it?`, { parse: "1" });
  }
  const yes = run.last(S + "verdict_yes_rate");
  if (yes !== null && yes > 0.95) say(1, `The critic finds ${percent(yes)} of the actions optimal`, "There is little to refine. Is play that good, or is the critic a yes-sayer? Read approved actions of lost episodes.", { verdict: "yes", outcome: "failure" });
  if (yes !== null && yes < 0.05) say(1, `The critic finds ${percent(yes)} of the actions optimal`, "It finds fault with everything. Read what it says of actions in won episodes.", { verdict: "no", outcome: "success" });
  const foreseen = run.last(C + "predicted_success"), came = run.last(C + "success"), error = run.last(C + "bias_error") || 0;
  if (foreseen !== null && came !== null && Math.abs(foreseen - came) > Math.max(0.15, 2 * error)) say(1, `The critic ${foreseen > came ? "hopes too much" : "hopes too little"}: ${percent(foreseen)} foreseen, ${percent(came)} came`, "Old play may mislead it, or it learns too slowly. The most surprising transitions show where.", { sort: "surprise" });
  const auc = run.last(C + "auc");
  if (auc !== null && auc < 0.55) say(1, `The critic hardly tells wins from losses: AUC ${number(auc)}`, "0.5 is chance. See the calibration, and the futures of lost episodes.", { sort: "surprise" });
  const stopped = run.sums[L + "num_stopped_steps"];
  if (stopped) say(2, `${number(stopped)} gradient steps were stopped`, "A loss or a gradient was not finite. Lower lr or grad_clip.", null);
  const gap = run.last("logprob_gap");
  if (gap !== null && gap > 1) say(1, `Engine and learner differ by ${number(gap)} nats`, "Either the precision differs much, or the engine does not serve the weights that are trained.", null);
  const stale = run.last("replay_buffer/staleness_mean");
  if (stale !== null && stale > 50) say(0, `What is replayed is ${number(stale)} versions old on average`, "A smaller replay capacity forgets old play sooner.", { sort: "age" });
  const faults = ["num_engine_restarts", "num_lost_shares", "num_learner_restarts"].map((each) => run.last(`faults/${each}`) || 0).reduce((a, b) => a + b, 0);
  if (faults) say(1, `${number(faults)} processes were lost and made good`, "The logs of the run say why.", null);
  if (run.unread) say(1, `${number(run.unread)} lines of the record could not be read`, "They were left out here.", null);
  for (const [iteration, text] of run.notices.slice(-12)) say(1, `Said in iteration ${number(iteration)}`, text, null);
  return found;
}

function findingsView(app, run) {
  const found = findings(run), signs = [["ℹ", "to know"], ["⚠", "look at it"], ["✖", "wrong"]];
  const body = found.length ? h("ul", { class: "findings" }, found.map((each) => h("li", { class: `level${each.level}` }, h("span", { class: "sign", title: signs[each.level][1] }, signs[each.level][0]),
    h("div", null, h("b", null, inline(each.title, 300)), words(each.text)), each.filters ? h("a", { href: app.listLink(each.filters), class: "look" }, "read them") : null)))
    : h("p", { class: "quiet" }, "Nothing stands out in the figures. That is no proof: read a few transitions.");
  return card("What to look at", null, body);
}

function tiles(run) {
  const success = run.last(E + "success_rate"), low = run.last(E + "success_low"), high = run.last(E + "success_high"), first = (run.curve(E + "success_rate") || []).find((each) => each !== null) ?? null;
  const tile = (value, label, note) => h("div", { class: "tile" }, h("b", null, value), h("span", null, label), note ? h("small", { class: "quiet" }, note) : null);
  return h("div", { class: "tiles" },
    success !== null ? tile(percent(success), "success in evaluation", `${percent(low)} to ${percent(high)}`) : tile(percent(run.last("env_runners/success_rate")), "success in training"),
    first !== null && first !== success ? tile(percent(first), "at the first evaluation") : null,
    tile(number(run.last("evaluation/critic/auc")), "AUC of the critic", "0.5 is chance"),
    tile(count(run.iterations.length ? run.iterations[run.iterations.length - 1] : 0), "iterations", duration(run.last("time_total_s"))),
    tile(count(run.last("env_runners/num_episodes_lifetime") ?? 0), "episodes"),
    tile(count(run.ofKind[KINDS.transition].length), "transitions to read", run.left_out ? `${count(run.left_out)} more are left out here` : null));
}

function configView(run) {
  const entries = Object.entries(run.facts.config || {});
  if (!entries.length) return null;
  const text = (value) => h("code", null, inline(value === null ? "–" : typeof value === "string" ? value : JSON.stringify(value), 400));
  return card("Configuration", h("span", { class: "quiet" }, "what differs from the defaults"),
    table(["key", "here", "default"], entries.sort(([a], [b]) => (a < b ? -1 : 1)).map(([name, pair]) => [h("code", null, inline(name, 80)), text(Array.isArray(pair) ? pair[0] : pair), text(Array.isArray(pair) ? pair[1] : null)]), "config"));
}

function explorer(run) {
  const names = Object.keys(run.curves), place = h("div", null);
  if (!names.length) return null;
  const input = h("select", { "aria-label": "Any metric", id: "any-metric", onchange: () => replace(place, lineChart([{ name: "value", xs: run.iterations, ys: run.curve(input.value) }], { title: input.value }) || h("p", { class: "quiet" }, "no finite number")) },
    h("option", { value: "" }, "choose one of all metrics"), names.map((each) => h("option", { value: each }, each)));
  return card("Any other metric", null, input, place);
}

function runView(app) {
  const run = app.run, pick = (iteration) => { location.hash = app.listLink({ iterationLow: String(iteration), iterationHigh: String(iteration) }); };
  const charts = CURVES.map((each) => lineChart(series(run, linesOf(each, run)), { ...each, pick })).filter(Boolean);
  return h("div", { class: "page", id: "run" },
    h("div", { class: "hero" }, h("h1", null, inline(String(run.facts.algorithm || "Run"), 60), " ", h("span", { class: "quiet" }, "on "), inline(String(run.facts.env || "?"), 80)),
      h("p", { class: "quiet" }, run.facts.language_model ? ["from ", h("code", null, inline(String(run.facts.language_model), 120)), " · "] : null, inline(run.name, 160))),
    tiles(run), findingsView(app, run),
    charts.length ? h("h2", null, "Curves ", h("small", { class: "quiet" }, "click one to read the transitions of that iteration")) : null,
    h("div", { class: "charts" }, charts, stageChart(run)), configView(run), explorer(run));
}
