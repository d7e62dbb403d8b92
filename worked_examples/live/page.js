const $ = id => document.getElementById(id);
const form = $("config");
const glyph = {"<think>": "⟨", "</think>": "⟩", "<eos>": "■", "<pad>": "□"};
const show = ids => ids.map(id => glyph[words[id]] ?? words[id]).join("");
const fixed = (x, digits = 2) => x.toFixed(digits).replace("-", "−");
const color = x => x > 1e-9 ? "up" : x < -1e-9 ? "down" : "soft";
const from_half = h => {                                    // float16: a sign, 5 bits of exponent, 10 of fraction
  const exponent = h >> 10 & 31, fraction = (h & 1023) / 1024;
  return (h >> 15 ? -1 : 1) * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
};
const bytes = Uint8Array.from(atob($("weights").textContent), character => character.charCodeAt());
const weights = Float32Array.from(new Uint16Array(bytes.buffer), from_half);
const held = $("sums").textContent.split(" ");
const code = URL.createObjectURL(new Blob(["maths", "gpt2", "worker"].map(id => $(id).textContent)));
const learner = new Worker(code), evaluator = new Worker(code);
let prompt = "15+87=", verdicts = {}, history = [], changes = [], story = [], running, busy, now, next, waiting;

function config() {                                         // what the reader has chosen, by grpo.py's names
  const chosen = [...new FormData(form)].map(([name, value]) => [name, isNaN(value) ? value : +value]);
  return {...Object.fromEntries(chosen), loss_type: "dapo", prompt, verdicts, shown: now?.shown ?? 0};
}

function go(action, and_on) {
  running = and_on;
  if (action === "start") verdicts = {};
  action ? ask(action) : draw_rest();
}

function ask(action) {                                      // one question at a time; one may wait
  if (busy) next = next === "start" ? next : action;
  else learner.postMessage({action, config: config(), ...(action === "start" && {weights, held})});
  busy = true;
  draw_rest();
}

learner.onmessage = ({data}) => {
  if (data.action === "start") history = changes = [];
  const same_weights = data.action === "sample" && history.pop();
  now = {...data, prompt, shown: 0, held: same_weights?.held};
  history = [...history, now];
  const action = next ?? (running ? "step" : null);
  busy = false;
  next = null;
  evaluate(now);
  draw_group(!running);
  action ? ask(action) : draw_rest();
};

function evaluate(state) {                                  // in the second worker; while it is busy the newest waits
  waiting = state;
  if (evaluator.state) return;
  evaluator.state = state;
  evaluator.postMessage({action: "evaluate", weights: state.weights, held});
}

evaluator.onmessage = ({data: rows}) => {
  const {state} = evaluator, has_carry = ({prompt}) => +prompt[1] + +prompt[4] > 9;
  for (const row of rows) row.right = reward_funcs.accuracy_reward(row.text, row.prompt);
  const accuracy = rows => sum(rows.map(row => row.right)) / rows.length;
  const carry = accuracy(rows.filter(has_carry)), plain = accuracy(rows.filter(row => !has_carry(row)));
  state.held = {rows: rows.slice(0, 4), all: accuracy(rows), carry, plain};
  evaluator.state = null;
  if (waiting !== state) evaluate(waiting);
  draw_rest();
};

// own: −∂loss/∂log π at ρ = 1. added: over the answers that have this beginning and this token. net: on the token's
// logit, added − π·(the sum of added over the tokens after this beginning).
function find_pushes(group, options) {
  const places = {};
  const cells = group.map(({completion_ids: ids, logps, after, advantage}) => ids.map((id, t) => {
    const place = places[ids.slice(0, t)] ??= {beginning: show(ids.slice(0, t)), total: 0, tokens: {}};
    const token = place.tokens[id] ??= {word: show([id]), place, π: Math.exp(logps[t]), added: 0};
    const own = advantage / denominator(ids.length, options);
    if (after) token.after = Math.exp(after[t]);
    place.total += own;
    token.added += own;
    return {token, own};
  }));
  const branches = Object.values(places).map(place => Object.values(place.tokens).sort((a, b) => b.π - a.π));
  for (const token of branches.flat()) token.net = token.added - token.π * token.place.total;
  for (const cell of cells.flat()) Object.assign(cell, {added: cell.token.added, net: cell.token.net});
  const size = tokens => Math.max(...tokens.map(token => Math.abs(token.net)));
  const forks = branches.filter(tokens => tokens.length > 1).sort((a, b) => size(b) - size(a));
  for (const token of forks.flat()) token.kind = "fork";
  return {cells, fork: forks[0]};
}

function draw_group(fresh) {
  const {rows, shown, num_generations: G, moved} = now, options = config(), focus = document.activeElement.dataset.i;
  compute_rewards(rows, {...options, num_generations: G});
  options.num_items_in_batch = sum(rows.map(row => row.completion_ids.length));
  const group = now.group = rows.slice(shown, shown + G), {cells, fork} = find_pushes(group, options);
  const groups = [...rows.keys()].filter(i => i % G === 0);
  const std = i => group_stats(rows.slice(i, i + G).map(row => row.reward))[1], loud = groups.filter(std);
  now.reward = sum(rows.map(row => row.reward)) / rows.length;
  $("many").textContent = G;
  $("group").classList.toggle("fresh", fresh);
  $("group").innerHTML = group.map((row, i) => row_html(row, i, cells)).join("");
  $("group").querySelector(`[data-i="${focus}"]`)?.focus();
  $("loud").hidden = options.scale_rewards === "no mean";
  $("loud").innerHTML = `Silent groups (all rewards of a sum are equal, so A = 0, no push): ${groups.length -
    loud.length} of ${groups.length}. ` + (std(shown) > 0 ? "" : !loud.length ? "No weight moves." :
    `This is one. <button data-first="${loud[0]}">Show ${rows[loud[0]].prompt}</button>`);
  const list = (fork, text, push) => `<code>${fork[0].place.beginning}</code> ` + fork.map(token =>
    `<span><code class="${color(push(token))}">${token.word}</code> ${text(token)}</span>`).join(", ");
  const past = moved && find_pushes(moved, options).fork;
  const before = ({π}) => `π = ${fixed(π, 3)}`, change = ({π, after}) => `π = ${fixed(π, 3)} → ${fixed(after, 3)}`;
  $("forks").innerHTML = past ? `The last step: after ${list(past, change, ({π, after}) => after - π)}.` :
    fork ? `They part after ${list(fork, before, ({net}) => net)}.` : "All answers are alike.";
  if (now.metrics?.clipped > 0) $("forks").innerHTML += ` Clipped in the last step: ${
    fixed(100 * now.metrics.clipped, 1)} % of the tokens (gone far enough, they push no more).`;
}

function row_html({prompt, text, reward, advantage}, i, cells) {
  const name = ({1: "✓ 1", 0: "✗ 0"}[reward] ?? fixed(reward)) + (prompt + text in verdicts ? " ✎" : "");
  const peak = view => Math.max(1e-9, ...cells.flat().map(cell => Math.abs(cell[view])));
  const tokens = cells[i].map((cell, t) => {
    const sizes = ["own", "added", "net"].map(view => `--${view}: ${(9 * cell[view] / peak(view)).toFixed(2)}px`);
    return `<span class="token ${cell.token.kind}" style="--t: ${t}; ${sizes.join("; ")}">${cell.token.word}</span>`;
  });
  return `<div class="row">
    <button data-i="${i}" aria-label="answer ${i + 1}, reward ${fixed(reward)}: overrule">${name}</button>
    <span class="A ${color(advantage)}">${advantage > 0 ? "+" : ""}${fixed(advantage)}</span>
    <span class="mono">${tokens.join("")}</span></div>`;
}

const lines = {
  c1: ["held-out sums with a carry", state => state.held?.carry],
  c2: ["held-out sums without a carry", state => state.held?.plain],
  c3: ["π of the carry", state => state.prompt === prompt ? state.carry.probability : undefined],
  c4: ["mean reward", state => state.reward]};

const latest = (points, value, state = points.at(-1)) =>    // "…" until that of this step is known
  !state ? "…" : state === now ? fixed(value(state)) : `… (step ${state.step}: ${fixed(value(state))})`;

function draw_rest() {
  if (!now) return;
  const end = Math.max(20, now.step), evaluated = history.filter(state => state.held), legend = [];
  const drawn = Object.entries(lines).map(([name, [text, value]]) => {
    const points = history.filter(state => value(state) !== undefined);
    const path = points.map(state => `${100 * state.step / end} ${100 - 100 * Math.min(1, Math.max(0, value(state)))}`);
    const {digit, before} = now.carry, where = `<code>${digit}</code> after <code>${show(encode(before))}</code>`;
    legend.push(`<span><svg class="${name}" viewBox="0 0 28 8"><path d="M0 4H28"/></svg>${text}
      ${name === "c3" ? where : ""} <b>${latest(points, value)}</b></span>`);
    if (!points.length) return "";
    return `<path class="${name}" d="M${path.join("L")}"/><path class="${name} dot" d="M${path.at(-1)}h0"/>`;
  });
  const grid = changes.map(({step}) => `M${100 * step / end} 0V100`).join("");
  $("chart").innerHTML = `<path class="grid" d="M0 50H100${grid}"/>` + drawn.join("");
  $("legend").innerHTML = legend.join("");
  $("end").textContent = end;
  $("changes").textContent = changes.slice(-4).map(({step, text}) => `Step ${step}: ${text}.`).join(" ");
  const answer = ({completion_ids: ids, right}) => `<code>${show(ids.filter(id => id !== eos))}</code>
    <b class="${right ? "up" : "down"}">${right ? "✓" : "✗"}</b>`;
  $("held").innerHTML = (evaluated.at(-1)?.held.rows ?? []).map((row, i) => `<tr><td><code>${row.prompt}</code>
    <td><small>at first<br>now</small><td>${answer(evaluated[0].held.rows[i])}<br>${answer(row)}`).join("");
  $("run").textContent = running ? "❚❚ Pause" : "▶ Run";
  $("bar").className = busy ? "busy" : "";
  const π = history.slice(-2).map(lines.c3[1]).filter(Number.isFinite).map(x => fixed(x)).join(" → ") || "…";
  $("said").innerHTML = `step <b>${now.step}</b> · probability π of the carry <b>${π}</b> · held-out sums right:
    <b>${latest(evaluated, state => state.held.all)}</b>`;
}

function changed(text) {                                    // the chart notes it; another G or B takes other answers
  const {num_generations, generation_batch_size} = config();
  changes = [...changes, {step: now.step, text}];
  draw_group();
  if (now.num_generations !== num_generations || now.rows.length !== generation_batch_size) ask("sample");
  else draw_rest();
}

function view(name) {
  const radio = document.querySelector(`[name=view][value=${name}]`);
  radio.checked = true;
  $("group").dataset.view = name;
  $("hint").textContent = radio.dataset.hint;
}

const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
view(calm ? "net" : "own");
if (!calm) onscroll = onpointerdown = tell_the_story;

function tell_the_story() {                                 // the three views, one after the other
  onscroll = onpointerdown = null;
  story.forEach(clearTimeout);
  story = ["own", "added", "net"].map((name, k) => setTimeout(view, 5000 * k, name));
}

$("story").onclick = tell_the_story;
$("views").onchange = ({target}) => {
  story.forEach(clearTimeout);
  view(target.value);
};
$("step").onclick = () => go("step", false);
$("run").onclick = () => go(running ? null : "step", !running);
$("again").onclick = () => go("start", false);
$("group").onclick = ({target: {dataset: {i}}}) => {
  if (!i) return;
  const row = now.group[i], verdict = row.reward > 0.5 ? 0 : 1;
  verdicts[row.prompt + row.text] = verdict;
  changed(`${row.prompt}${show(row.completion_ids)} earns ${verdict}`);
};
$("loud").onclick = ({target: {dataset: {first}}}) => {
  if (!first) return;
  now.shown = +first;
  prompt = now.rows[first].prompt;                          // now.carry is still that of the old sum
  $("sum").value = prompt.slice(0, -1);
  draw_group();
  draw_rest();
};
$("sum").onchange = ({target}) => {
  target.value = target.value.replace(/\s/g, "");
  target.setCustomValidity(held.includes(target.value + "=") ? "Held out, not to be trained on: choose another sum." :
    /^[1-9]{2}\+[1-9]{2}$/.test(target.value) ? "" : "Two numbers of two digits, no digit 0: 15+87.");
  if (!target.reportValidity()) return;
  prompt = target.value + "=";
  target.blur();
  ask("sample");
};
$("sum").onblur = ({target}) => { target.value = prompt.slice(0, -1); };
form.onchange = ({target: {name, parentNode: label, selectedOptions: [option]}}) => {
  if (name === "seed") return go("start", false);
  changed(`${label.firstChild.data.trim()} is ${option.text}`);
};
$("first_rules").onclick = () => { form.reset(); changed("the first rules"); };
$("try").onclick = ({target: {dataset: {rules}, parentNode}}) => {
  if (rules === undefined) return;
  form.reset();
  prompt = ($("sum").value = "15+87") + "=";
  $("trying").textContent = parentNode.nextElementSibling.textContent;
  for (const [name, value] of new URLSearchParams(rules)) form.elements[name].value = value;
  go("start", false);
  $("step").focus();
  scrollTo(0, 0);
};
ask("start");
