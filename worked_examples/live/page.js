const $ = id => document.getElementById(id);
const form = $("config"), glyph = {"<think>": "⟨", "</think>": "⟩", "<eos>": "■", "<pad>": "□"};
const show = ids => [...ids].map(id => glyph[words[id]] ?? words[id]).join("");
const fixed = (x, digits = 2) => x.toFixed(digits).replace("-", "−");
const signed = x => (x > 0 ? "+" : "") + fixed(x);
const from_half = h => {                                    // float16: a sign, 5 bits of exponent, 10 of fraction
  const exponent = h >> 10 & 31, fraction = (h & 1023) / 1024;
  return (h >> 15 ? -1 : 1) * (exponent ? 2 ** (exponent - 15) * (1 + fraction) : 2 ** -14 * fraction);
};
const bytes = Uint8Array.from(atob($("weights").textContent), character => character.charCodeAt());
const weights = Float32Array.from(new Uint16Array(bytes.buffer), from_half), held = $("sums").textContent.split(" ");
const code = URL.createObjectURL(new Blob(["maths", "gpt2", "worker"].map(id => $(id).textContent)));
const learner = new Worker(code), evaluator = new Worker(code);
let prompt = "15+87=", verdicts = {}, history = [], marks = [], now, first, running = false, busy = false, next, waiting;

function config() {                                         // what the reader has chosen, by grpo.py's names
  const chosen = Object.entries(Object.fromEntries(new FormData(form)));
  const numbers = Object.fromEntries(chosen.map(([name, value]) => [name, isNaN(value) ? value : +value]));
  return {...numbers, prompt, verdicts, shown: now?.shown ?? 0};
}

function ask(action) {                                      // one question at a time; one may wait
  if (busy) return next = next === "start" ? next : action;
  busy = true;
  learner.postMessage({action, config: config(), ...(action === "start" && {weights, held})});
  draw_bar();
}

learner.onmessage = ({data}) => {
  if (data.action === "start") [history, marks, first] = [[], [], null];
  if (data.action === "sample") history.pop();              // new answers, the same weights
  history.push(now = {...data, prompt, shown: 0});
  busy = false;
  evaluate(now);
  draw_group(!running);
  draw_chart();
  const action = next ?? (running ? "step" : null);
  next = null;
  action ? ask(action) : draw_bar();
};

function evaluate(state) {                                  // in a worker of its own; if it is busy, the newest state waits
  waiting = state;
  if (evaluator.state) return;
  evaluator.state = state;
  evaluator.postMessage({action: "evaluate", weights: state.weights, held});
}

evaluator.onmessage = ({data: {rows}}) => {
  const state = evaluator.state, has_carry = ({prompt}) => +prompt[1] + +prompt[4] > 9;
  const accuracy = rows => sum(rows.map(row => reward_funcs.accuracy_reward(row.text, row.prompt))) / rows.length;
  const carry = accuracy(rows.filter(has_carry)), plain = accuracy(rows.filter(row => !has_carry(row)));
  state.held = {rows: rows.slice(0, 4), all: accuracy(rows), carry, plain};
  if (history[0] === state) first = state.held.rows;
  evaluator.state = null;
  if (waiting !== state) evaluate(waiting);
  draw_chart();
  draw_held();
  draw_bar();
};

// own: −∂loss/∂log π at ρ = 1. added: over the answers that share this beginning and token. net: added − π·(the sum of
// added over all tokens after this beginning), the push on the token's logit.
function find_pushes(group, options) {
  const places = {};
  const cells = group.map(({completion_ids: ids, logps, advantage, after}) => ids.map((id, t) => {
    const place = places[ids.slice(0, t)] ??= {before: ids.slice(0, t), total: 0, tokens: {}};
    const token = place.tokens[id] ??= {id, place, π: Math.exp(logps[t]), after: after && Math.exp(after[t]), added: 0};
    const own = advantage / denominator(ids.length, options);
    place.total += own;
    token.added += own;
    return {own, token};
  }));
  for (const {tokens, total} of Object.values(places))
    for (const token of Object.values(tokens)) token.net = token.added - token.π * total;
  const size = tokens => Math.max(...tokens.map(token => Math.abs(token.net)));
  const forks = Object.values(places).map(place => Object.values(place.tokens).sort((a, b) => b.π - a.π));
  return {cells, forks: forks.filter(tokens => tokens.length > 1).sort((a, b) => size(b) - size(a)).slice(0, 2)};
}

function draw_group(fresh) {
  const {rows, shown, num_generations: G} = now, options = {...config(), num_rows_in_batch: rows.length};
  options.num_items_in_batch = sum(rows.map(row => row.completion_ids.length));
  compute_rewards(rows, {...options, num_generations: G});
  const firsts = [...rows.keys()].filter(i => i % G === 0), stats = i => group_stats(rows.slice(i, i + G).map(row => row.reward));
  const group = rows.slice(shown, shown + G), [mean, std] = stats(shown), {cells, forks} = find_pushes(group, options);
  const loud = firsts.filter(i => stats(i)[1] > 0), focus = document.activeElement?.dataset?.i;
  Object.assign(now, {group, reward: sum(rows.map(row => row.reward)) / rows.length, silent: firsts.length - loud.length});
  $("many").textContent = G;
  $("group").classList.toggle("fresh", fresh);
  const peak = view => Math.max(1e-9, ...cells.flat().map(cell => Math.abs(cell[view] ?? cell.token[view])));
  const sizes = Object.fromEntries(["own", "added", "net"].map(view => [view, 9 / peak(view)]));
  $("group").innerHTML = '<div class="row head"><span>reward</span><span class="A">A</span><span>tokens</span></div>' +
    group.map((row, i) => {
      const verdict = {1: "✓ 1", 0: "✗ 0"}[row.reward] ?? fixed(row.reward), mine = row.prompt + row.text in verdicts ? " ✎" : "";
      const color = row.advantage > 0 ? "up" : row.advantage < 0 ? "down" : "soft";
      const tokens = cells[i].map(({own, token}, t) => `<span class="token ${Object.keys(token.place.tokens).length > 1 ? "fork" : ""}"
        title="π ${fixed(token.π, 3)}" style="--t: ${t}; --own: ${own * sizes.own}px; --added: ${token.added * sizes.added}px;
        --net: ${token.net * sizes.net}px">${show([token.id])}</span>`);
      return `<div class="row"><button data-i="${i}" aria-label="answer ${i + 1}, reward ${row.reward}: overrule"
        >${verdict}${mine}</button><span class="A ${color}">${row.advantage ? signed(row.advantage) : 0}</span>
        <span class="mono">${tokens.join("")}</span></div>`;
    }).join("");
  if (focus) $("group").querySelector(`[data-i="${focus}"]`)?.focus();
  const formula = {group: "(r − mean) / std", none: "r − mean", "no mean": "r"}[options.scale_rewards];
  $("stats").innerHTML = std > 0 || options.scale_rewards === "no mean" ?
    `Rewards r: mean ${fixed(mean)}, std ${fixed(std)}. The advantage of an answer is A = ${formula}.` :
    "All eight rewards are equal, a <b>silent group</b>: A = 0, and it pushes nothing. ".replace("eight", G) + (loud.length ?
      `<button data-first="${loud[0]}">Show ${rows[loud[0]].prompt}</button>, whose answers differ.` :
      "So are the others: this step moves no weight.");
  const list = (forks, text) => forks.map(tokens => `after <code>${show(tokens[0].place.before)}</code> ` +
    tokens.map(token => `<span><code><b>${show([token.id])}</b></code> ${text(token)}</span>`).join(" · ")).join("; ");
  const arrow = x => Math.abs(x) < 1e-5 ? "" : x > 0 ? ' <b class="up">▲</b>' : ' <b class="down">▼</b>';
  const moved = now.moved ? find_pushes(now.moved, options).forks : [];
  $("forks").innerHTML = (forks.length ? `<p>The answers part ${list(forks, ({π, net}) => `π ${fixed(π, 3)}${arrow(net)}`)}.</p>` : "") +
    (moved.length ? `<p>The last step moved, ${list(moved, ({π, after}) => `π ${fixed(π, 3)} → ${fixed(after, 3)}`)}.</p>` : "");
}

const lines = [
  ["c1", "held-out sums with a carry", state => state.held?.carry],
  ["c2", "held-out sums without", state => state.held?.plain],
  ["c3", "probability of the carry", state => state.prompt === prompt ? state.carry.probability : undefined],
  ["c4", "mean reward", state => state.reward]];

function draw_chart() {
  const end = Math.max(20, now.step), x = state => 100 * state.step / end, y = value => 100 - 100 * Math.min(1, Math.max(0, value));
  const changes = marks.map(({step}) => `M${100 * step / end} 0V100`).join("");
  $("chart").innerHTML = `<path class="grid" d="M0 50H100${changes}"/>` + lines.map(([color, , value]) => {
    const points = history.filter(state => value(state) !== undefined).map(state => `${x(state)} ${y(value(state))}`);
    return points.length ? `<path class="${color}" d="M${points.join("L")}"/><path class="${color} dot" d="M${points.at(-1)}h0"/>` : "";
  }).join("");
  $("end").textContent = end;
  $("legend").innerHTML = lines.map(([color, name, value]) => {
    const last = value(history.findLast(state => value(state) !== undefined) ?? now);
    return `<span><svg class="${color}" viewBox="0 0 28 8"><path d="M0 4H28"/></svg>${name} ` + (color === "c3" ?
      `<code>${now.carry.digit}</code> after <code>${show(encode(now.carry.before))}</code> ` : "") + `<b>${last === undefined ? "…" : fixed(last)}</b></span>`;
  }).join("");
  $("marks").textContent = marks.length ? `You changed ${marks.slice(-4).map(({step, text}) => `${text} (step ${step})`).join(", ")}.` : "";
}

function draw_held() {
  const {rows} = history.findLast(state => state.held).held;
  const cell = ({completion_ids: ids, text, prompt}) => `<code>${show(ids.filter(id => id !== eos))}</code> ` +
    (reward_funcs.accuracy_reward(text, prompt) ? '<b class="up">✓</b>' : '<b class="down">✗</b>');
  $("held").innerHTML = rows.map((row, i) => `<tr><td><code>${row.prompt}</code><td><small>at first<br>now</small>` +
    `<td>${cell(first?.[i] ?? row)}<br>${cell(row)}`).join("");
}

function draw_bar() {
  $("run").textContent = running ? "❚❚ Pause" : "▶ Run";
  $("run").ariaPressed = running;
  $("bar").className = busy ? "busy" : "";
  const {step, metrics, silent, seconds} = now ?? {}, accuracy = history.findLast(state => state.held)?.held.all;
  if (now) $("said").innerHTML = `step <b>${step}</b>` + (accuracy === undefined ? "" : ` · held-out accuracy <b>${fixed(accuracy)}</b>`) +
    ` <small>· ${silent} of ${now.rows.length / now.num_generations} groups silent` + (metrics ? ` · ${fixed(100 * metrics.clipped, 1)} % clipped · ` +
    `${fixed(seconds, 1)} s` : "") + "</small>";
}

function changed(text, resample) {                          // noted below the chart
  marks = [...marks.filter(mark => mark.step !== now.step || mark.text.split(":")[0] !== text.split(":")[0]), {step: now.step, text}];
  resample ? ask("sample") : draw_group();
  draw_chart();
  draw_bar();
}

const hints = {
  own: "Each token of an answer gets the push of its answer: nobody says which token was wrong.",
  added: "Pushes on the same token after the same beginning are added up. Where all answers agree they cancel.",
  net: "A token that is nearly certain cannot rise much. So what is left is where the answers part."};

function view(name) {
  form.view = name;
  document.querySelector(`[name=view][value=${name}]`).checked = true;
  $("group").dataset.view = name;
  $("hint").textContent = hints[name];
}

const calm = matchMedia("(prefers-reduced-motion: reduce)").matches, show_later = calm ? [] : [["added", 4000], ["net", 7000]];
const timers = show_later.map(([name, time]) => setTimeout(() => view(name), time));
const stop_showing = () => timers.forEach(clearTimeout);
view(calm ? "net" : "own");
$("views").onchange = ({target}) => (stop_showing(), view(target.value));
$("step").onclick = () => (running = false, ask("step"));
$("run").onclick = () => (running = !running, running && !busy ? ask("step") : draw_bar());
$("again").onclick = () => (running = false, verdicts = {}, ask("start"));
$("group").onclick = ({target}) => {
  const row = now?.group[target.dataset.i];
  if (!row) return;
  verdicts[row.prompt + row.text] = row.reward > 0.5 ? 0 : 1;
  changed(`${show(row.completion_ids)}: ${row.reward > 0.5 ? "wrong" : "right"}`);
};
$("stats").onclick = ({target}) => {
  if (!target.dataset.first) return;
  now.shown = +target.dataset.first;
  [prompt, $("sum").value] = [now.rows[now.shown].prompt, now.rows[now.shown].prompt.slice(0, -1)];
  draw_group();
};
$("sum").onchange = ({target}) => {
  target.setCustomValidity(held.includes(target.value + "=") ? "This sum is held out: choose another." : "");
  if (!target.value || !target.reportValidity()) return;
  prompt = target.value + "=";
  ask("sample");
};
form.onsubmit = event => event.preventDefault();
form.onchange = ({target: {name, parentNode: label, selectedOptions: [option]}}) => {
  if (now) changed(`${label.firstChild.data.trim()}: ${option.text.trim()}`, /^num_gen|batch/.test(name));
};
form.onreset = () => setTimeout(() => changed("rules: as at first", true));
ask("start");
