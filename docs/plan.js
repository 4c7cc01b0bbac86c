/* The page "What will it take?". First cluster/plan, with the Python's names in camelCase: what
   layouts.rank needs with PyTorch's default software, without context parallelism and chunks.
   tools/pages/plan.py writes PLANNER; tests/test_plan_page.py compares this with the Python. */
"use strict";
const {constants, memoryConstants, gradientBytes} = PLANNER, GIB = 2 ** 30;
const roundHalfEven = x => x % 1 === 0.5 ? 2 * Math.round(x / 2) : Math.round(x);  // as Python

function transformer(sizes) {
  const {layers, width, heads, context, vocabulary, gated} = sizes;
  const kvHeads = sizes.kvHeads || heads, mlpWidth = sizes.ffn || 4 * width;
  const attention = (2 + 2 * kvHeads / heads) * width ** 2;
  const blockParameters = attention + (gated ? 3 : 2) * width * mlpWidth;
  const embeddingParameters = vocabulary * width, attentionFlops = 2 * layers * width * context;
  const matmulFlops = 2 * (layers * blockParameters + embeddingParameters);
  const saved = gated ? [12 + 4 * kvHeads / heads, 8] : [18, 4];
  return {...sizes, kvHeads, blockParameters, embeddingParameters, matmulFlops, attentionFlops,
    parameters: layers * blockParameters + (sizes.tied ? 1 : 2) * embeddingParameters,
    flops: 3 * (matmulFlops + attentionFlops), savedBytes: saved[0] * width + saved[1] * mlpWidth};
}

function makeCluster(gpus, perNode, nodeLink, gpuLink) {
  const inNode = Math.min(perNode, gpus), nodes = Math.ceil(gpus / inNode);
  return {nodes, gpus: inNode, nodeLink, gpuLink, ranks: nodes * inNode};
}

function groupRate(cluster, size, stride, share) {
  if (size * stride <= cluster.gpus) return cluster.gpuLink * share;
  const rings = Math.max(1, Math.floor(cluster.gpus / stride));
  return Math.min(cluster.gpuLink * share, cluster.nodeLink * share * rings / cluster.gpus);
}

function slowestStage(model, stages) {
  const block = 2 * model.blockParameters, head = 2 * model.embeddingParameters;
  const blocks = Math.ceil((model.layers + 2) / stages);
  const slowest = model.layers % stages === 0 ? model.layers / stages * block + head
    : Math.max(blocks * block, (blocks - 1) * block + head);
  return stages === 1 ? 1 : slowest * stages / model.matmulFlops;
}

function computeSecondsOf(model, layout, gpu) {
  const [all, attention, others] = PLANNER.recomputed[layout.checkpointing];
  const products = all * (1 - 2 * model.embeddingParameters / model.matmulFlops);
  const tokens = layout.microBatch * model.context / layout.pipeline;
  const rate = gpu.peak * gpu.matmulShare, stage = slowestStage(model, layout.pipeline);
  const productSeconds = (3 + products) * model.matmulFlops * stage / rate;
  const attentionSeconds = (3.5 + attention) * model.attentionFlops / (rate * constants.attention);
  const moved = constants.otherBytes * model.layers * model.width;
  const otherSeconds = (3 + others) / 3 * moved / gpu.memoryRate;
  return tokens / layout.tensor * (productSeconds + attentionSeconds + otherSeconds);
}

function transformerStep(model, layout, gpu, cluster) {
  const {pipeline, zero, microBatches} = layout, blocks = model.layers / pipeline;
  const {share, usable} = constants, rate = (...group) => groupRate(cluster, ...group);
  const compute = computeSecondsOf(model, layout, gpu), tokens = layout.microBatch * model.context;
  const calls = blocks * (layout.checkpointing === "full" ? 6 : 4), others = layout.tensor - 1;
  const sent = calls * 2 * others / layout.tensor * tokens * model.width * 2;
  const passed = pipeline > 1 ? 2 * tokens * model.width * 2 / layout.tensor : 0;
  const tensor = sent / rate(layout.tensor, 1, share) + calls * 2 * constants.ringHop * others
    + passed / rate(2, Math.floor(cluster.ranks / pipeline), usable);
  const parameters = model.parameters / layout.tensor / pipeline;
  const shards = zero === 3 ? layout.data / layout.replicas : 1, across = layout.data / shards;
  const gathered = (4 + gradientBytes) * parameters * (shards - 1) / shards;
  const fsdp = gathered / rate(shards, layout.tensor, share)
    + 3 * blocks * constants.ringHop * (shards - 1);
  const reduced = (across - 1) / across * (zero === 1 ? 2 + gradientBytes : 2 * gradientBytes)
    * parameters / shards / rate(across, layout.tensor * shards, usable);
  const before = compute + tensor;
  const exposed = Math.max(fsdp - before, 0) + constants.exposed * Math.min(fsdp, before);
  const microBatch = before + exposed, bubble = microBatch * (pipeline - 1);
  const lastExposed = pipeline > 1 ? reduced
    : Math.max(reduced - microBatch * 2 / 3, constants.exposed * reduced);
  const optimizer = 24 * parameters / (zero === 1 ? layout.data : shards) / gpu.memoryRate;
  return {seconds: microBatches * microBatch + bubble + lastExposed + optimizer, bubble, optimizer,
    compute: microBatches * compute, tensor: microBatches * tensor,
    data: fsdp * microBatches + reduced, dataExposed: exposed * microBatches + lastExposed};
}

function rankMemory(model, layout) {
  const {layers, embeddingParameters: matrix} = model, stages = layout.pipeline;
  const even = layers % stages === 0, blocks = Math.ceil((layers + (even ? 0 : 2)) / stages);
  const ends = even ? blocks : blocks - 1;
  const candidates = stages === 1 ? [[layers, matrix * (model.tied ? 1 : 2), 1, true]]
    : [[ends, matrix, stages, false], [blocks, 0, stages - 1, false], [ends, matrix, 1, true]];
  return candidates.map(stage => stageMemory(model, layout, ...stage))
    .reduce((one, two) => two.reserved > one.reserved ? two : one);
}

function stageMemory(model, layout, blocks, embedding, inFlight, isLast) {
  const {tensor, zero} = layout, full = layout.checkpointing === "full", input = 2 * model.width;
  const parameters = (blocks * model.blockParameters + embedding) / tensor;
  const state = zero === 3 ? 16 * parameters / (layout.data / layout.replicas)
      + ((4 + gradientBytes) * model.blockParameters + (2 + gradientBytes) * embedding) / tensor
    : parameters * (8 + 12 / (zero ? layout.data : 1));
  const tokens = layout.microBatch * model.context;
  const saved = model.savedBytes / tensor + (tensor > 1 ? input : 0);
  const activations = (full ? input / tensor : saved) * tokens * blocks
    * Math.min(inFlight, layout.microBatches);
  const logits = isLast ? memoryConstants.logitBytes * tokens * model.vocabulary / tensor : 0;
  const work = Math.max(full ? saved * tokens : 0, logits);
  const reserved = (state + activations + work) * memoryConstants.reserved;
  return {state, activations, work, reserved,
    inUse: reserved * memoryConstants.nvidiaSmi + memoryConstants.context};
}

const fits = (memory, gpu) => memory.reserved > gpu.memory ? "no"
  : memory.inUse * (1 + PLANNER.memoryError) <= gpu.memory ? "yes" : "perhaps";

function* layouts(model, gpus, perNode, sequences) {
  const divides = n => model.layers % n === 0 || (model.layers + 2) % n === 0;
  const tensors = [1, 2, 4, 8].filter(n => perNode % n === 0 && model.kvHeads % n === 0);
  for (const tensor of tensors) for (const pipeline of [1, 2, 4, 8, 16].filter(divides)) {
    const data = gpus / (tensor * pipeline), zeros = gpus > 1 ? [[pipeline > 1 ? 1 : 3, 1]] : [];
    if (!Number.isInteger(data)) continue;
    if (tensor * pipeline === 1) zeros.push([0, 1]);
    if (tensor * pipeline === 1 && gpus > perNode && perNode > 1) zeros.push([3, gpus / perNode]);
    for (const microBatch of [1, 2, 4, 8, 16, 32, 64]) {
      const microBatches = Math.max(1, roundHalfEven(sequences / data / microBatch));
      const error = Math.abs(data * microBatch * microBatches / sequences - 1);
      if (error > PLANNER.batchTolerance) continue;
      for (const [zero, replicas] of zeros) for (const checkpointing of ["none", "full"])
        yield {data, tensor, pipeline, zero, replicas, microBatch, microBatches, checkpointing};
    }
  }
}

function kindOf(layout) {
  const state = layout.replicas > 1 ? "HSDP" : ["DDP", "ZeRO-1", "ZeRO-2", "FSDP"][layout.zero];
  return [state, ...["tensor", "pipeline"].filter(name => layout[name] > 1)].join(" + ");
}

function rank(model, gpu, cluster, sequences) {
  const best = {};
  for (const layout of layouts(model, cluster.ranks, cluster.gpus, sequences)) {
    const kind = kindOf(layout), memory = rankMemory(model, layout);
    const step = transformerStep(model, layout, gpu, cluster);
    const tokens = layout.data * layout.microBatch * layout.microBatches * model.context;
    const tokensPerSecond = tokens / step.seconds / cluster.ranks;
    const plan = {kind, layout, gpu, step, memory, fits: fits(memory, gpu), tokensPerSecond,
      mfu: tokensPerSecond * model.flops / gpu.peak};
    if (!best[kind] || order(plan, best[kind]) < 0) best[kind] = plan;
  }
  return Object.values(best).sort(order);
}

function order(one, other) {
  const doubt = plan => ["yes", "perhaps", "no"].indexOf(plan.fits);
  return doubt(one) - doubt(other) || (one.fits !== "no" ? other.tokensPerSecond
    - one.tokensPerSecond : one.memory.reserved - other.memory.reserved);
}

function limit({step, fits}) {
  if (fits === "no") return "memory";
  const waits = {link: step.dataExposed, pipeline: step.bubble, activations: step.tensor};
  const longest = Object.keys(waits).reduce((one, two) => waits[two] > waits[one] ? two : one);
  return waits[longest] > step.seconds / 5 ? longest : "compute";
}

/* The page; its form is in plan.html. */
const element = name => document.getElementById(`plan-${name}`), inputs = element("form").elements;
const fields = [...inputs].filter(input => input.name);
const show = x => x.toLocaleString("en-US", {maximumSignificantDigits: 3});
const bar = (total, ...parts) => `<span class="plan-bar">${parts.map(([name, size]) =>
  `<i class="plan-${name}" style="width: ${100 * size / total}%"></i>`).join("")}</span>`;
const fill = values => fields.filter(({name}) => name in values)
  .forEach(field => { field.value = values[field.name] || ""; });

function showPlan(plan, best) {
  const {data, replicas, tensor, pipeline, microBatch, microBatches, checkpointing} = plan.layout;
  const {memory: {state, activations, work, inUse}, gpu, step} = plan;
  const before = step.compute + step.tensor, id = plan.kind.replaceAll(" ", "");
  const first = plan === best;
  const hidden = Math.min(before, step.data - step.dataExposed);
  const fit = {yes: "fits", perhaps: "may not fit", no: "does not fit"}[plan.fits];
  return `<details id="plan-${id}" class="${first ? "first" : ""}"
      ${first || element(id)?.matches("[open]:not(.first)") ? "open" : ""}>
    <summary><b>${plan.kind}</b>: ${show(inUse / GIB)} of ${show(gpu.memory / GIB)} GiB, ${fit};
      ${show(plan.tokensPerSecond)} tokens/s per GPU, MFU ${show(100 * plan.mfu)}%,
      limited by ${limit(plan)}
      ${bar(2 * gpu.memory, ["state", state], ["activations", activations], ["work", work],
        ["reserve", inUse - state - activations - work])}</summary>
    <p>data ${data / replicas} × replicas ${replicas} × tensor ${tensor} × pipeline ${pipeline},
      micro-batch ${microBatch}, ${microBatches} per step, checkpointing: ${checkpointing}</p>
    <p>step ${show(step.seconds)} s: computation ${show(step.compute)} s,
      idle ${show(step.bubble)} s, optimizer ${show(step.optimizer)} s</p>
    ${bar(step.seconds, ["", step.tensor], ["compute", step.compute], ["", step.dataExposed],
      ["idle", step.bubble], ["optimizer", step.optimizer])}
    <p>activations sent ${show(step.tensor)} s</p>${bar(step.seconds, ["exposed", step.tensor])}
    <p>parameters and gradients ${show(step.data)} s, ${show(step.dataExposed)} s exposed</p>
    ${bar(step.seconds, ["", before - hidden], ["hidden", hidden], ["exposed", step.dataExposed])}
  </details>`;
}

function update() {
  const values = Object.fromEntries(fields.map(field => [field.name,
    field.type === "number" ? Number(field.value) : field.value]));
  const {width, heads, kvHeads, nodeLink, gpusPerNode} = values, gpu = PLANNER.gpus[values.gpu];
  inputs.heads.setCustomValidity(width % heads ? `must divide the width, ${width}` : "");
  inputs.kvHeads.setCustomValidity(kvHeads && heads % kvHeads ? "must divide the heads" : "");
  const wrong = fields.find(field => !field.validity.valid);
  const cluster = makeCluster(values.gpus, gpusPerNode, nodeLink * 1e9 / 8, gpu.gpuLink);
  const model = transformer(values), sequences = values.batch / values.context;
  const plans = wrong ? [] : rank(model, gpu, cluster, sequences), best = plans[0];
  const title = {yes: "Recommended, the fastest that fits", no: "None fits; the smallest",
    perhaps: "Recommended, but it may not fit"};
  let message = `${show(sequences)} sequences do not divide among ${cluster.ranks} GPUs`;
  if (wrong) message = `${wrong.labels[0].textContent.trim()}: ${wrong.validationMessage}`;
  if (best) message = `${title[best.fits]}: ${best.kind}. ${show(model.parameters / 1e9)} billion `
    + `parameters on ${cluster.ranks} GPUs, ${cluster.gpus} per node: ${show(best.step.seconds)} s `
    + `per step of ${show(sequences)} sequences`;
  element("best").textContent = message;
  element("layouts").innerHTML = plans.map(plan => showPlan(plan, best)).join("");
  for (const slider of inputs) if (slider.dataset.base) Object.assign(slider, {
    value: Math.log2(values[slider.dataset.field] / slider.dataset.base),
    ariaValueText: values[slider.dataset.field]});
}

element("form").oninput = ({target: {name, value, dataset: {field, base}}}) => {
  const model = {...PLANNER.models[inputs.model.value]}, gpu = PLANNER.gpus[inputs.gpu.value];
  if (name === "model") fill(model);
  if (name === "gpu") fill({...gpu, nodeLink: gpu.nodeLink * 8 / 1e9});
  if (name in model) inputs.model.value = "";
  if (base) inputs[field].value = base * 2 ** value;
  update();
};
for (const target of [inputs.model, inputs.gpu]) element("form").oninput({target});
