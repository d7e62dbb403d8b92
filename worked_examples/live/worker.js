// Two workers run this file. One holds the model: a message brings the reader's config, the answer is what the page
// shows. The other answers the held-out sums with weights that the page hands on, so that no step waits for it.
let run;

function start({weights, held}, {seed}) {
  const numbers = [...Array(100).keys()].filter(x => x > 10 && x % 10 > 0);
  const problems = numbers.flatMap(x => numbers.map(y => `${x}+${y}=`)).filter(prompt => !held.includes(prompt));
  const policy = make_model(weights), reference = make_model(weights);
  return {policy, reference, problems, rng: random(seed), optimizer: {}, step: 0};
}

function sample({prompt, num_generations, generation_batch_size}) {         // the first group answers the reader's sum
  const prompts = [prompt];
  while (prompts.length < generation_batch_size / num_generations)
    prompts.push(run.problems[Math.floor(run.rng() * run.problems.length)]);
  run.num_generations = num_generations;                                    // a later config may have another
  run.rows = generate(run.policy, prompts.flatMap(prompt => Array(num_generations).fill(prompt)), run.rng);
}

function step(config) {
  const num_generations = run.num_generations, group = run.rows.slice(config.shown, config.shown + num_generations);
  const metrics = {loss: 0, clipped: 0, grad_norm: 0};
  compute_rewards(run.rows, {...config, num_generations});
  for (let k = 0; k < config.num_iterations; k++) {
    const more = update(run.policy, run.reference, run.rows, config, run.optimizer);
    for (const name in metrics) metrics[name] += more[name] / config.num_iterations;
  }
  run.step++;
  return {metrics, moved: group.map(row => ({...row, after: [...per_token_logps(run.policy, row).x]}))};
}

function probability_of_the_carry(prompt) {                 // after <think>5+7=12,1+8+ the 1; or the 0, if none is due
  const before = teacher_trace(prompt).match(/.*,.*?\+.*?\+/)[0], digit = teacher_trace(prompt)[before.length];
  const ids = encode(prompt + before), logits = forward(run.policy, ids, [...ids.keys()]);
  const logps = log_softmax(row_of(logits, ids.length - 1));
  return {before, digit, probability: Math.exp(logps[words.indexOf(digit)])};
}

onmessage = ({data: {action, config, ...given}}) => {
  if (action === "evaluate") return postMessage(generate(make_model(given.weights), given.held));
  if (action === "start") run = start(given, config);
  const done = action === "step" ? step(config) : {};
  sample(config);
  const carry = probability_of_the_carry(config.prompt), weights = run.policy.all.x.slice();
  const {rows, num_generations} = run;
  postMessage({...done, action, step: run.step, rows, num_generations, carry, weights}, [weights.buffer]);
};
