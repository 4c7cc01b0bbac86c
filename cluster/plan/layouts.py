"""Which layouts of a transformer make sense on a number of GPUs, and what limits each of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.plan.memory import Memory, fits, rank_memory
from cluster.plan.step import Cluster, Step, transformer_step
from cluster.plan.transformer import Layout, Transformer
from workshop.gpus import Gpu

MEMORY_ERROR = 0.26  # one in ten of the judging runs needed more (`cluster.plan --check`)
BATCH_TOLERANCE = 0.10  # of the global batch that a layout may miss
KINDS = ("DDP", "FSDP", "HSDP", "FSDP + tensor", "ZeRO-1 + pipeline", "ZeRO-1 + tensor + pipeline")


@dataclass(frozen=True)
class Plan:
    """A layout with its prediction. fits: "yes", "perhaps" or "no"."""
    kind: str
    model: Transformer
    layout: Layout
    gpu: Gpu
    cluster: Cluster
    step: Step
    memory: Memory
    fits: str

    @property
    def batch_tokens(self) -> float:
        """Tokens of a step, on all GPUs."""
        layout = self.layout
        return layout.data * layout.micro_batch * layout.micro_batches * self.model.context

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        return self.batch_tokens / self.step.seconds / self.layout.gpus

    @property
    def mfu(self) -> float:
        """Model FLOP/s, without recomputation, over the peak."""
        return self.tokens_per_second * self.model.flops / self.gpu.peak

    @property
    def efficiency(self) -> float:
        """Share of the step in which the GPU computes."""
        return self.step.compute / self.step.seconds

    @property
    def name(self) -> str:
        """What a reader calls it, such as "FSDP16 TP4"."""
        layout = self.layout
        shards = layout.data // layout.replicas
        words = [{0: f"DDP{layout.data}", 1: f"DP{layout.data} ZeRO-1",
                  3: f"FSDP{shards}" + (f" x {layout.replicas}" if layout.replicas > 1 else "")}[
                      layout.zero]] if layout.data > 1 or layout.gpus == 1 else []
        words += [f"TP{layout.tensor}"] if layout.tensor > 1 else []
        words += [f"PP{layout.pipeline}"] if layout.pipeline > 1 else []
        return " ".join(words)


def layouts(model: Transformer, gpus: int, per_node: int, sequences: float) -> Iterator[tuple]:
    """Yield (kind, layout) for all layouts of `sequences` per step that divide evenly.

    Tensor parallelism stays inside a node, and needs as many heads; a pipeline's stages divide the
    blocks, or the blocks with the embedding and the output layer. Micro-batches: powers of two.
    """
    inside = min(gpus, per_node)
    heads = model.kv_heads or model.heads
    tensors = [n for n in (1, 2, 4, 8) if inside % n == 0 and heads % n == 0]
    stages = [n for n in (1, 2, 4, 8, 16) if model.layers % n == 0 or (model.layers + 2) % n == 0]
    for tensor in tensors:
        for pipeline in stages:
            data, rest = divmod(gpus, tensor * pipeline)
            if rest or not data:
                continue
            zeros = [(1, 1)] if pipeline > 1 else [(3, 1)] if gpus > 1 else []
            if tensor == pipeline == 1:
                zeros += [(0, 1)] + ([(3, gpus // per_node)] if gpus > per_node > 1 else [])
            for micro_batch in (1, 2, 4, 8, 16, 32, 64):
                micro_batches = max(1, round(sequences / data / micro_batch))
                batch = data * micro_batch * micro_batches
                if abs(batch / sequences - 1) > BATCH_TOLERANCE:
                    continue
                for zero, replicas in zeros:
                    for checkpointing in "none", "full":
                        layout = Layout(data, 1, tensor, pipeline, zero, replicas, micro_batch,
                                        micro_batches, 1, checkpointing)
                        yield kind_of(layout), layout


def kind_of(layout: Layout) -> str:
    if layout.pipeline > 1:
        return KINDS[5] if layout.tensor > 1 else KINDS[4]
    if layout.tensor > 1:
        return KINDS[3]
    return KINDS[2] if layout.replicas > 1 else KINDS[1] if layout.zero else KINDS[0]


def rank(model: Transformer, gpu: Gpu, cluster: Cluster, sequences: float) -> list[Plan]:
    """Return the best plan of each kind, best first: those that fit by speed, then the others."""
    best = {}
    for plan in all_plans(model, gpu, cluster, sequences):
        if plan.kind not in best or order(plan) < order(best[plan.kind]):
            best[plan.kind] = plan
    return sorted(best.values(), key=order)


def find_bolder(best: Plan, plans: Iterator[Plan]) -> Plan | None:
    """Return the fastest plan that perhaps fits, if it is over 3 % faster than the best."""
    perhaps = [plan for plan in plans if plan.fits == "perhaps"
               and plan.tokens_per_second > 1.03 * best.tokens_per_second]
    return max(perhaps, key=lambda plan: plan.tokens_per_second, default=None)


def all_plans(model: Transformer, gpu: Gpu, cluster: Cluster, sequences: float) -> Iterator[Plan]:
    """Yield a plan for each layout."""
    for kind, layout in layouts(model, cluster.ranks, cluster.gpus, sequences):
        memory = rank_memory(model, layout)
        yield Plan(kind, model, layout, gpu, cluster,
                   transformer_step(model, layout, gpu, cluster), memory,
                   fits(memory, gpu, MEMORY_ERROR))


def order(plan: Plan) -> tuple:
    """Sort by: fits, perhaps, does not; then the fastest, or, if it does not fit, the smallest."""
    doubt = ("yes", "perhaps", "no").index(plan.fits)
    return doubt, plan.memory.reserved if doubt == 2 else -plan.tokens_per_second


def limit(plan: Plan) -> str:
    """Return what limits a plan, as an inequality with its numbers in it.

    Memory, if it does not fit; what GPUs wait for, if it takes over a fifth of the step; else
    computation.
    """
    step, layout, memory = plan.step, plan.layout, plan.memory
    if plan.fits == "no":
        return (f"memory: {memory.state / 2**30:.0f} GiB of state + "
                f"{(memory.activations + memory.work) / 2**30:.0f} of activations and temporary, "
                f"with fragments {memory.reserved / 2**30:.0f} > {plan.gpu.memory / 2**30:.0f} GiB")
    computed = step.compute + step.tensor
    waits = {"link": step.data_exposed, "pipeline": step.bubble, "activations": step.tensor}
    longest = max(waits, key=waits.get)
    if waits[longest] <= step.seconds / 5:
        return (f"compute: {show(computed)} of computation, GPUs wait {show(step.data_exposed)} "
                f"for parameters and gradients, {show(step.data)} in all")
    fifth = f"> a fifth of {show(step.seconds)}"
    if longest == "activations":
        return f"activations: {show(step.tensor)} to send them {fifth}"
    if longest == "pipeline":
        return (f"pipeline: {show(step.bubble)} idle {fifth}: {layout.pipeline - 1} stages to "
                f"fill, {layout.micro_batches} micro-batches")
    text = f"link: GPUs wait {show(step.data_exposed)} for parameters and gradients {fifth}"
    if plan.kind in ("FSDP", "FSDP + tensor") and step.data > computed:
        tokens = plan.batch_tokens / layout.data / layout.micro_batches * step.data / computed
        text += f"; sending = computing at {tokens:,.0f} tokens per micro-batch"
    used_up = layout.micro_batch * layout.micro_batches == 1
    return text + (", but the batch is used up" if used_up else "")


def show(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.3f} ms"


def why_it_lost(best: Plan, other: Plan) -> str:
    """Return why the other plan is not the recommended one."""
    if other.fits == "no":
        return limit(other)
    slower = 1 - other.tokens_per_second / best.tokens_per_second
    if slower < 0:
        return f"{-slower:.0%} faster, but perhaps it does not fit"
    parts = {"recomputing and computing": other.step.compute - best.step.compute,
             "tensor or pipeline messages": other.step.tensor - best.step.tensor,
             "exposed parameters and gradients": other.step.data_exposed - best.step.data_exposed,
             "the pipeline's idle time": other.step.bubble - best.step.bubble}
    reason = max(parts, key=parts.get)
    return f"{slower:.0%} slower: {show(parts[reason])} more of {reason}"
