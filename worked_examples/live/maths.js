// grpo.py in JavaScript: its names in its order, but for one answer (or one group) at a time, without padding, so there
// is no mask. What grpo.py takes from PyTorch and transformers is in gpt2.js.

const words = ["<pad>", "<eos>", "<think>", "</think>", ..."0123456789+=,"];
const V = words.length, eos = words.indexOf("<eos>");
const max_completion_length = 28;

const encode = text => (text.match(/<.*?>|./g) ?? []).map(word => words.indexOf(word));
const sum = numbers => numbers.reduce((a, b) => a + b, 0);

// §2 Group statistics and advantages ----------------------------------------------------------------------------------

function group_stats(rewards) {                             // of one group: mean, std = √(Σ (r_i - mean)² / (G - 1))
  const mean = sum(rewards) / rewards.length;
  const squares = sum(rewards.map(r => (r - mean) ** 2));
  if (rewards.every(r => r === rewards[0])) return [rewards[0], 0];         // rounding would leave a std
  return [mean, Math.sqrt(squares / (rewards.length - 1))];
}

function group_advantages(rewards, scale_rewards) {         // A_i = (r_i - mean) / (std + eps), or r_i - mean
  if (scale_rewards === "no mean") return rewards;          // not in grpo.py
  const [mean, std] = group_stats(rewards), eps = 1e-4;
  const scale = scale_rewards === "group" ? std + eps : 1;
  return rewards.map(r => (r - mean) / scale);
}

// §3 Log-probabilities ------------------------------------------------------------------------------------------------

function selective_log_softmax(logits, index, tape) {       // log π of token index[t] by row t of the logits (T, V)
  const rows = index.map((_, t) => log_softmax(row_of(logits.x, t, V)));
  const logps = tensor(Float64Array.from(rows, (row, t) => row[index[t]]));
  tape?.push(() => rows.forEach((row, t) => row.forEach((logp, v) => {
    const slope = (v === index[t] ? 1 : 0) - Math.exp(logp);                // ∂log π(token) / ∂logit v
    logits.d[t * V + v] += slope * logps.d[t];
  })));
  return logps;
}

function per_token_logps(model, {prompt_ids, completion_ids}, tape) {       // log π(o_t | q, o_<t) of each token
  const ids = [...prompt_ids, ...completion_ids].slice(0, -1), first = (prompt_ids.length - 1) * V;
  const {x, d} = forward(model, ids, tape);                 // a row predicts the next token
  return selective_log_softmax({x: x.subarray(first), d: d.subarray(first)}, completion_ids, tape);
}

// §4 to §7 Ratio and clip, KL, aggregation, loss: but for aggregate, of one token -------------------------------------

const importance_ratio = (logp, old_logp) => Math.exp(logp - old_logp);     // ρ = π / π_old
const clip_ratio = (ρ, epsilon) => Math.min(Math.max(ρ, 1 - epsilon), 1 + epsilon);
const clipped_surrogate_loss = (ρ, A, epsilon) => -Math.min(ρ * A, clip_ratio(ρ, epsilon) * A);
const is_clipped = (ρ, A, epsilon) => clip_ratio(ρ, epsilon) * A < ρ * A;

function kl_estimate(logp, ref_logp) {                      // k3 = exp(-k1) + k1 - 1,  k1 = log π - log π_ref
  const k1 = logp - ref_logp;
  return Math.expm1(-k1) + k1;
}

const aggregate = (per_token_loss, num_items_in_batch) => sum(per_token_loss) / num_items_in_batch;         // "dapo"

function grpo_loss(logps, A, old_logps, ref_logps, {epsilon, beta, num_items_in_batch}) {
  // One answer's part of the loss, aggregate(l + β·KL), and what training uses, the slopes ∂loss/∂log π. That of l is
  // -ρ·A, or 0 if the token is clipped, for ∂ρ/∂log π = ρ; that of KL is 1 - exp(-k1).
  const ratio = logps.map((logp, t) => importance_ratio(logp, old_logps[t]));
  const kl = logps.map((logp, t) => kl_estimate(logp, ref_logps[t]));
  const per_token_loss = ratio.map((ρ, t) => clipped_surrogate_loss(ρ, A, epsilon) + beta * kl[t]);
  const slopes = ratio.map((ρ, t) => {
    const slope = is_clipped(ρ, A, epsilon) ? 0 : -ρ * A, kl_slope = -Math.expm1(ref_logps[t] - logps[t]);
    return (slope + beta * kl_slope) / num_items_in_batch;
  });
  const clipped = ratio.filter(ρ => is_clipped(ρ, A, epsilon)).length;
  return {loss: aggregate(per_token_loss, num_items_in_batch), slopes, clipped};
}

// §8 Reward functions -------------------------------------------------------------------------------------------------

const final_answer = text => text.split("</think>").at(-1).trim();

const reward_funcs = {
  accuracy_reward: (text, prompt) => final_answer(text) === solution(prompt) ? 1 : 0,
  short_answer: text => 1 - encode(text).length / max_completion_length,    // not in grpo.py, nor the next
  always_1: () => 1};

// §9 Sampling ---------------------------------------------------------------------------------------------------------

function random(state) {                                    // numbers in [0, 1): Lehmer's generator
  return () => (state = state * 48271 % 2147483647) / 2147483647;
}

function choose_token(logps, uniform) {                     // the first v with Σ_{w<=v} p_w > u; without u, greedily
  if (uniform === undefined) return logps.indexOf(Math.max(...logps));
  const chosen = logps.findIndex((_, v) => sum(logps.slice(0, v + 1).map(Math.exp)) > uniform);
  return chosen < 0 ? V - 1 : chosen;                       // the last sum may round to below u
}

function generate(model, prompt, rng) {                     // an answer to the prompt; without rng greedily
  const row = {prompt, prompt_ids: encode(prompt), completion_ids: [], old_logps: []};
  const cache = {used: 0, layers: model.h.map(() => zeros(n_positions * 3 * n_embd))};
  let ids = row.prompt_ids;                                 // what the model has not read yet
  do {
    const logits = forward(model, ids, null, cache), logps = log_softmax(row_of(logits.x, ids.length - 1, V));
    const token = choose_token(logps, rng?.());
    row.completion_ids.push(token);
    row.old_logps.push(logps[token]);
    ids = [token];
  } while (row.completion_ids.at(-1) !== eos && row.completion_ids.length < max_completion_length);
  row.text = row.completion_ids.filter(id => id !== eos).map(id => words[id]).join("");
  return row;
}

// §10 Training --------------------------------------------------------------------------------------------------------

function compute_rewards(rows, {reward_func, verdicts, num_generations: G, scale_rewards}) {        // and advantages
  for (const row of rows)                                   // the reader's verdict on this text goes first
    row.reward = verdicts[row.prompt + row.text] ?? reward_funcs[reward_func](row.text, row.prompt);
  for (let first = 0; first < rows.length; first += G) {
    const group = rows.slice(first, first + G);
    const advantages = group_advantages(group.map(row => row.reward), scale_rewards);
    group.forEach((row, k) => { row.advantage = advantages[k]; });
  }
}

function backward(policy, reference, rows, config) {        // the loss of a batch, and its gradient in policy.all.d
  const num_items_in_batch = sum(rows.map(row => row.completion_ids.length));
  const total = {loss: 0, clipped: 0};
  policy.all.d.fill(0);
  for (const row of rows) {
    if (row.advantage === 0 && config.beta === 0) continue;                 // its loss and its gradient are 0
    const tape = [], logps = per_token_logps(policy, row, tape);
    const ref_logps = config.beta > 0 ? per_token_logps(reference, row).x : logps.x;
    const part = grpo_loss(logps.x, row.advantage, row.old_logps, ref_logps, {...config, num_items_in_batch});
    logps.d.set(part.slopes);
    while (tape.length > 0) tape.pop()();
    total.loss += part.loss;
    total.clipped += part.clipped / num_items_in_batch;
  }
  total.grad_norm = Math.sqrt(sum(policy.all.d.map(d => d * d)));
  return total;
}

function update(policy, reference, rows, config) {
  const metrics = backward(policy, reference, rows, config);
  const factor = 1 / Math.max(1, metrics.grad_norm);        // max_grad_norm = 1
  policy.all.d.forEach((d, i) => { policy.all.d[i] = factor * d; });
  if (config.beta > 0 || rows.some(row => row.advantage !== 0)) adamw(policy.all, config.learning_rate);
  return metrics;
}

// §11 The demo's task -------------------------------------------------------------------------------------------------

const solution = prompt => String(sum(prompt.replace("=", "").split("+").map(Number)));

function carry_of(prompt) {                                 // 47+85= has the carry 1 after <think>7+5=12,4+8+
  const [a, x, , b, y] = prompt, units = +x + +y;           // ax + by
  return {before: `<think>${x}+${y}=${units},${a}+${b}+`, digit: units > 9 ? "1" : "0"};
}
