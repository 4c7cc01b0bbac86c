"""Which layouts of a transformer make sense on a number of GPUs, and what limits each of them."""

from collections.abc import Iterator
from dataclasses import dataclass

from cluster.plan.memory import Memory, fits, rank_memory
from cluster.plan.step import Cluster, Step, transformer_step
from cluster.plan.transformer import Layout, Transformer, kind_of
from workshop.gpus import Gpu

BATCH_TOLERANCE = 0.10  # of the global batch that a layout may miss


@dataclass(frozen=True)
class Plan:
    """A layout with its prediction. fits: "yes", "perhaps" or "no"."""
    model: Transformer
    layout: Layout
    gpu: Gpu
    cluster: Cluster
    step: Step
    memory: Memory
    fits: str

    @property
    def kind(self) -> str:
        return kind_of(self.layout)

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second and GPU."""
        tokens = self.layout.sequences * self.model.context
        return tokens / self.step.seconds / self.layout.gpus

    @property
    def mfu(self) -> float:
        """Model FLOP/s, without recomputation, over the peak."""
        return self.tokens_per_second * self.model.flops / self.gpu.peak

    @property
    def name(self) -> str:
        """What a reader calls it, such as "FSDP16 TP4"."""
        layout = self.layout
        replicas = f" x {layout.replicas}" if layout.replicas > 1 else ""
        data = {0: f"DDP{layout.data}", 1: f"DP{layout.data} ZeRO-1",
                3: f"FSDP{layout.data // layout.replicas}{replicas}"}[layout.zero]
        words = [data] if layout.data > 1 or layout.gpus == 1 else []
        words += [f"TP{layout.tensor}"] if layout.tensor > 1 else []
        words += [f"PP{layout.pipeline}"] if layout.pipeline > 1 else []
        return " ".join(words)

    @property
    def limit(self) -> str:
        """Memory, if it does not fit; what takes over a fifth of the step; else computation."""
        if self.fits == "no":
            return "memory"
        waits = {"link": self.step.data_exposed, "pipeline": self.step.bubble,
                 "activations": self.step.tensor}
        longest = max(waits, key=waits.get)
        return longest if waits[longest] > self.step.seconds / 5 else "compute"


def make_plan(model: Transformer, layout: Layout, gpu: Gpu, cluster: Cluster) -> Plan:
    memory = rank_memory(model, layout)
    return Plan(model, layout, gpu, cluster, transformer_step(model, layout, gpu, cluster), memory,
                fits(memory, gpu))


def layouts(model: Transformer, gpus: int, per_node: int, sequences: float) -> Iterator[Layout]:
    """Yield all layouts of `sequences` per step that divide evenly.

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
                        yield Layout(
                            data, tensor=tensor, pipeline=pipeline, zero=zero, replicas=replicas,
                            micro_batch=micro_batch, micro_batches=micro_batches,
                            checkpointing=checkpointing)


def rank(model: Transformer, gpu: Gpu, cluster: Cluster, sequences: float) -> list[Plan]:
    """Return the best plan of each kind, best first: those that fit by speed, then the others."""
    best = {}
    for layout in layouts(model, cluster.ranks, cluster.gpus, sequences):
        plan = make_plan(model, layout, gpu, cluster)
        if plan.kind not in best or order(plan) < order(best[plan.kind]):
            best[plan.kind] = plan
    return sorted(best.values(), key=order)


def order(plan: Plan) -> tuple:
    """Sort by: fits, perhaps, does not; then the fastest, or, if it does not fit, the smallest."""
    doubt = ("yes", "perhaps", "no").index(plan.fits)
    return doubt, plan.memory.reserved if doubt == 2 else -plan.tokens_per_second
