// The learner. A message brings the reader's rules. A step learns from the rows on the page, then samples new ones.
let policy, reference, held_out, problems, rng, rows, step = 0;

function start(config, weights, sums) {
  const numbers = [...Array(100).keys()].filter(x => x > 10 && x % 10 > 0);
  held_out = sums;
  problems = numbers.flatMap(x => numbers.map(y => `${x}+${y}=`)).filter(prompt => !held_out.includes(prompt));
  policy = make_model(weights);
  reference = make_model(weights);
  rng = random(7654321 * config.seed);                      // small seeds alone would begin alike
}

function sample({prompt, num_generations: G, generation_batch_size: B}) {   // the first group answers the reader's sum
  const prompts = [prompt];
  while (prompts.length < B / G) prompts.push(problems[Math.floor(rng() * problems.length)]);
  rows = prompts.flatMap(prompt => Array(G).fill(prompt)).map(prompt => generate(policy, prompt, rng));
}

function learn(config) {                                    // moved: the first group, and log π after the step
  let metrics;
  compute_rewards(rows, config);
  for (let k = 0; k < config.num_iterations; k++) metrics = update(policy, reference, rows, config);
  step++;
  const moved = rows.slice(0, config.num_generations).map(row => ({...row, logps: per_token_logps(policy, row).x}));
  return {...metrics, moved};
}

function evaluate() {                                       // the held-out sums, with the likeliest token each time
  const answers = held_out.map(prompt => generate(policy, prompt));
  return answers.map(row => ({...row, right: reward_funcs.accuracy_reward(row.text, row.prompt)}));
}

function π_of_carry(prompt) {
  const {before, digit} = carry_of(prompt), row = {prompt_ids: encode(prompt + before), completion_ids: encode(digit)};
  return Math.exp(per_token_logps(policy, row).x[0]);
}

onmessage = ({data: {action, config, weights, sums, first}}) => {
  if (action === "start") start(config, weights, sums);
  const learned = action === "step" ? learn(config) : {moved: null};        // null: forgets the last step's
  if (action === "show") rows.unshift(...rows.splice(first, config.num_generations));         // this group goes first
  else sample(config);
  postMessage({...learned, step, rows, prompt: config.prompt, carry: π_of_carry(config.prompt)});
  if (step % 2 === 0 && ["start", "step"].includes(action)) postMessage({step, held: evaluate()});
};
