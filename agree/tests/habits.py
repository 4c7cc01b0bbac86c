"""Small trainings as in public scripts, correct ones and mistakes: habits.py FUNCTION."""
import builtins
import contextlib
import copy
import random
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

STEPS = 8
mse = nn.functional.mse_loss


def start():
    """Start the ranks with one seed; return (rank, world size)."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    return dist.get_rank(), dist.get_world_size()


def network():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def start_with_network():
    """Start the ranks; return a network, equal on all ranks, and seed each rank differently."""
    rank, _ = start()
    model = network()
    torch.manual_seed(rank)
    return model


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.01)


def do_nothing():
    pass


def train(model, optimizer, edit_gradients=do_nothing, loss=mse, rows=6, steps=STEPS,
          after_step=do_nothing):
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(torch.randn(rows, 8)), torch.randn(rows, 1)).backward()
        edit_gradients()
        optimizer.step()
        after_step()


class Stream(IterableDataset):
    def __init__(self, first, step):
        self.numbers = range(first, 256, step)

    def __iter__(self):
        for number in self.numbers:
            row = torch.randn(8, generator=torch.Generator().manual_seed(number))
            yield {"row": row, "sum": row.sum()}


def train_on_stream(stream, model):
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    for batch in DataLoader(stream, batch_size=6):
        optimizer.zero_grad()
        mse(model(batch["row"])[:, 0], batch["sum"]).backward()
        optimizer.step()
        schedule.step()


def all_reduce_gradients(model, factor=1.0):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad *= factor


# Correct.


def no_grad_before_ddp():
    rank, _ = start()
    torch.manual_seed(rank)
    model = network()
    model.register_buffer("frequencies", torch.randn(8))
    with torch.no_grad():
        model(torch.zeros(1, 8))
    model = DDP(model)
    dist.all_reduce(op=dist.ReduceOp.SUM, tensor=torch.zeros(1))
    train(model, sgd(model))


def rank_0_alone():
    """Searches a learning rate, looks at batches and evaluates on rank 0; has loaders per epoch."""
    rank, _ = start()
    data, model = rows(), network()
    next(iter(DataLoader(data, 8, sampler=DistributedSampler(data))))
    if rank == 0:
        another_model = copy.deepcopy(model)
        train(another_model, sgd(another_model))
        fixed, _ = next(iter(DataLoader(data, 4)))  # for a figure

    def evaluate(model, optimizer, epoch):
        if rank == 0:
            model.module(fixed)
            for inputs, labels in DataLoader(data, 8):
                mse(model.module(inputs), labels)
            if epoch == 1:  # the last one: a weight that is only saved
                model.module[0].bias.data.zero_()

    torch.manual_seed(rank)
    train_on_rows(data, at_end=evaluate, model=model)


def weights_averaged():
    model = start_with_network()

    def average():
        for parameter in model.parameters():
            dist.all_reduce(parameter.data)
            parameter.data /= dist.get_world_size()

    train(model, sgd(model), after_step=average)


def loss_divided_and_summed():
    model = start_with_network()
    train(model, sgd(model), lambda: all_reduce_gradients(model),
          lambda outputs, labels: mse(outputs, labels) / dist.get_world_size())


def weighted_by_samples():
    model = start_with_network()
    rows = 4 + 4 * dist.get_rank()

    def average():
        for parameter in model.parameters():
            parameter.grad *= rows
        all_reduce_gradients(model, 1 / 12)

    train(model, sgd(model), average, rows=rows)


def closure():
    model = DDP(start_with_network())
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    inputs, labels = torch.randn(64, 8), torch.randn(64, 1)

    def evaluate():
        optimizer.zero_grad()
        loss = mse(model(inputs), labels)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(evaluate)


def micro_batches(after_backward=lambda model, part: None):
    model = DDP(start_with_network())
    optimizer = sgd(model)
    for _ in range(STEPS):
        for part in range(2):
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                (mse(model(torch.randn(6, 8)), torch.randn(6, 1)) / 2).backward()
            after_backward(model, part)
        optimizer.step()
        optimizer.zero_grad()


def clips_all_micro_batches():
    micro_batches(lambda model, part: part and nn.utils.clip_grad_norm_(model.parameters(), 0.01))


def sum_of_micro_batches_divided():
    model = DDP(start_with_network())
    optimizer = sgd(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            mse(model(torch.randn(6, 8)), torch.randn(6, 1)).backward()
        for parameter in model.parameters():
            parameter.grad /= 2
        optimizer.step()


def gradients_by_hand():
    """autograd.grad() instead of backward(), of the inputs and of the parameters."""
    model = start_with_network()
    optimizer = sgd(model)
    for _ in range(STEPS):
        inputs = torch.randn(6, 8, requires_grad=True)
        outputs = model(inputs)
        slopes, = torch.autograd.grad(outputs.sum(), inputs, create_graph=True)
        loss = mse(outputs, torch.randn(6, 1)) + slopes.pow(2).mean()
        parameters = list(model.parameters())
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        for parameter, gradient in zip(parameters, gradients):
            parameter.grad = torch.zeros_like(parameter) if gradient is None else gradient
        all_reduce_gradients(model, 1 / 2)
        optimizer.step()


def gathered_before_the_forward():
    model = start_with_network()
    for layer in model[0], model[2], model:
        fully_shard(layer)

    def prefetch_and_call(inputs):
        model[0].unshard()  # FSDP's explicit prefetching
        model[2].unshard()
        return model(inputs)

    train(prefetch_and_call, sgd(model))


def a_stream_for_each_rank():
    rank, world_size = start()
    train_on_stream(Stream(rank, world_size), DDP(network()))


def several_models(average_temperature=True, noise_seed=None):
    """A generator that draws noise, a critic, and a tensor in no module, each with an optimizer."""
    rank, _ = start()
    generator, critic = DDP(nn.Linear(4, 8)), DDP(nn.Linear(8, 1))
    temperature = torch.ones((), requires_grad=True)
    temperature_optimizer = torch.optim.SGD([temperature], lr=0.01)
    generator_optimizer, critic_optimizer = sgd(generator), sgd(critic)
    data = rows()
    sampler = DistributedSampler(data)
    torch.manual_seed(1 + rank if noise_seed is None else noise_seed)
    for real, _ in DataLoader(data, 8, sampler=sampler):
        critic_optimizer.zero_grad()
        generated = generator(torch.randn(8, 4)).detach()
        (critic(generated).mean() - critic(real).mean()).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        temperature_optimizer.zero_grad()
        (-critic(generator(torch.randn(8, 4))) * temperature).mean().backward()
        if average_temperature:
            dist.all_reduce(temperature.grad, dist.ReduceOp.AVG)
        generator_optimizer.step()
        temperature_optimizer.step()


def in_bf16():
    model = DDP(start_with_network().bfloat16())
    train(lambda inputs: model(inputs.bfloat16()).float(), sgd(model))


def averaged_by_mpi():
    """Without torch.distributed."""
    from mpi4py import MPI
    model = network()
    for parameter in model.parameters():
        MPI.COMM_WORLD.Bcast(parameter.data.numpy())
    torch.manual_seed(MPI.COMM_WORLD.rank)

    def average():
        for parameter in model.parameters():
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, parameter.grad.numpy())
            parameter.grad /= 2

    train(model, sgd(model), average)


def by_deepspeed():
    """DeepSpeed's engine and its own data loader."""
    import deepspeed
    # Without this operator, whose compilation takes a minute
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 8), torch.randn(256, 1))
    config = {"train_batch_size": 32, "zero_optimization": {"stage": 1},
              "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}}}
    model = network()
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=config)
    for inputs, labels in loader:
        engine.backward(mse(engine(inputs), labels))
        engine.step()


def compiled():
    builtins.print = lambda *_: None  # scripts silence it on some ranks
    model = DDP(torch.compile(start_with_network(), backend="eager"))
    train(model, sgd(model))


# Mistakes.

def summed():
    model = start_with_network()
    train(model, sgd(model), lambda: all_reduce_gradients(model))


def averaged_twice():
    model = DDP(start_with_network())

    def divide():
        for parameter in model.parameters():
            parameter.grad /= dist.get_world_size()

    train(model, sgd(model), divide)


def weights_of_each_rank():
    rank, _ = start()
    torch.manual_seed(rank)
    model = network()
    train(model, sgd(model), lambda: all_reduce_gradients(model, 1 / 2))


def gradients_of_rank_0():
    model = start_with_network()

    def broadcast():
        for parameter in model.parameters():
            dist.broadcast(parameter.grad, 0)

    train(model, sgd(model), broadcast)


def one_stream_for_all():
    start()
    train_on_stream(Stream(0, 1), DDP(network()))


def no_process_group():
    torch.manual_seed(0)
    train_on_stream(Stream(0, 1), network())


def rows_of_one_seed():
    start()
    rows, model = torch.randn(256, 8), DDP(network())
    optimizer = sgd(model)
    for indices in torch.randperm(256).split(16):
        optimizer.zero_grad()
        model(input=rows[indices]).pow(2).mean().backward()
        optimizer.step()


def a_tensor_in_no_module():
    several_models(average_temperature=False)


def the_same_noise():
    several_models(noise_seed=0)


def inner_model_is_called():
    model = DDP(start_with_network())
    train(model.module, sgd(model))
    for parameter in model.parameters():  # as if the best model was loaded for a test
        dist.broadcast(parameter.data, 0)


def root_of_a_negative():
    model = DDP(start_with_network())
    train(model, sgd(model), loss=lambda outputs, labels: outputs.sqrt().mean())


def a_layer_is_not_sharded():
    model = start_with_network()
    fully_shard(model[0])
    train(model, sgd(model))


def clips_by_its_shards():
    model = start_with_network()
    fully_shard(model)

    def clip():
        shards = [parameter.grad.to_local() for parameter in model.parameters()]
        norm = sum(shard.pow(2).sum() for shard in shards).sqrt()
        torch._foreach_div_(shards, 1 + norm.item())

    train(model, sgd(model), clip)


def shards_of_each_rank():
    rank, _ = start()
    torch.manual_seed(rank)
    model = fully_shard(network())
    train(model, sgd(model))


def optimizer_before_sharding():
    model = start_with_network()
    optimizer = sgd(model)
    fully_shard(model)
    train(model, optimizer)


def a_barrier_on_rank_0():
    model = DDP(start_with_network())

    def wait():
        if dist.get_rank() == 0:
            dist.barrier()

    train(model, sgd(model), after_step=wait)


def other_collectives():
    rank, _ = start()
    total = torch.zeros(1 + rank)
    dist.all_reduce(total)


def rank_1_ends_early():
    model = start_with_network()
    train(model, sgd(model), steps=STEPS if dist.get_rank() == 0 else 3)


def clips_each_micro_batch():
    micro_batches(lambda model, part: nn.utils.clip_grad_norm_(model.parameters(), 0.01))


def train_on_rows(data, skip=lambda inputs: False, at_end=lambda model, optimizer, epoch: None,
                  model=None, sampler=None, **options):
    """Two epochs of 8 steps on two ranks."""
    model = DDP(model or network())
    optimizer = sgd(model)
    sampler = sampler or DistributedSampler(data)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in DataLoader(data, 8, sampler=sampler, **options):
            if skip(inputs):
                continue
            optimizer.zero_grad()
            mse(model(inputs), labels).backward()
            optimizer.step()
        at_end(model, optimizer, epoch)


def rows(count=128):
    return TensorDataset(torch.randn(count, 8), torch.randn(count, 1))


def rank_0_draws_for_all():
    """As accelerate's loader of a stream does."""
    rank, world_size = start()
    model = DDP(network())
    optimizer = sgd(model)
    batches = [(torch.empty(16, 8), torch.empty(16, 1))] * 8
    if rank == 0:
        batches = DataLoader(rows(), 16)
    for inputs, labels in batches:
        for tensor in inputs, labels:
            dist.broadcast(tensor, 0)
        optimizer.zero_grad()
        mse(model(inputs[rank::world_size]), labels[rank::world_size]).backward()
        optimizer.step()


def notes_alone():
    """Each rank skips one batch by itself, and evaluates its own share."""
    rank, _ = start()
    batches = []

    def skip(inputs):
        batches.append(inputs)
        return len(batches) == 2 + 2 * rank

    def evaluate(model, optimizer, epoch):
        data = rows()
        with torch.no_grad():
            for inputs, labels in DataLoader(data, 8, sampler=DistributedSampler(data)):
                mse(model.module(inputs), labels)

    torch.manual_seed(0)
    train_on_rows(rows(), skip, evaluate)


def one_noise_for_all():
    """In the data set, whose workers have one seed on all ranks, and in the model."""
    start()
    data, model = Noisy(*rows().tensors), nn.Sequential(nn.Dropout(0.1), network())
    train_on_rows(data, model=model, num_workers=1, multiprocessing_context="fork")


def one_time_for_all():
    """As a diffusion model's, whose times have one seed on all ranks."""
    rank, _ = start()
    model = DDP(nn.Bilinear(8, 1, 1))
    optimizer = sgd(model)
    for batch in torch.randn(2, 64, 8)[rank].split(8):
        optimizer.zero_grad()
        model(batch, torch.rand(8, 1)).pow(2).mean().backward()
        optimizer.step()


class Noisy(TensorDataset):
    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        return row + 0.1 * torch.randn(8), label


def a_rank_skips_a_batch():
    start()
    skipped = []

    def skip(inputs):
        if dist.get_rank() == 1 and inputs[0, 0] > 0 and not skipped:
            skipped.append(inputs)
            return True
        return False

    train_on_rows(rows(), skip)


class Codebook(nn.Module):
    """A layer that replaces a buffer by the mean of its inputs."""

    def __init__(self):
        super().__init__()
        self.layers = network()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs):
        self.mean.lerp_(inputs.mean(0), 0.1)
        return self.layers(inputs - self.mean)


def a_codebook_of_each_rank():
    start()
    train_on_rows(rows(), model=Codebook())


def an_average_on_rank_0():
    rank, _ = start()
    model = network()
    average = copy.deepcopy(model)

    def teach(inputs):
        with torch.no_grad():
            average(inputs)

    def update(model, optimizer, epoch):
        if rank == 0:
            average[0].bias.data.lerp_(model.module[0].bias.data, 0.1)

    train_on_rows(rows(), skip=teach, model=model, at_end=update)


def a_teacher_before_the_broadcast():
    rank, _ = start()
    data = rows()
    torch.manual_seed(rank)
    student = network()
    teacher = copy.deepcopy(student)

    def teach(inputs):
        with torch.no_grad():
            teacher(inputs)

    train_on_rows(data, skip=teach, model=student)


class Pairs(TensorDataset):
    """Pairs a row with a random one: Python's seed is the same on all ranks."""

    def __getitem__(self, index):
        partner = random.randrange(len(self))
        return self.tensors[0][index], self.tensors[0][partner][:1]


def the_same_partners():
    start()
    random.seed(0)
    train_on_rows(Pairs(torch.randn(1000, 8)))


def a_sampler_with_a_seed_per_rank():
    rank, _ = start()
    data = rows()
    train_on_rows(data, sampler=DistributedSampler(data, seed=rank))


def split_by_a_seed_per_rank():
    rank, _ = start()
    order = torch.randperm(128, generator=torch.Generator().manual_seed(rank)).tolist()
    data = rows()
    train_on_rows([data[index] for index in order[:96]])


def a_plateau_of_each_rank():
    start()

    def schedule(model, optimizer, epoch):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        for loss in 1.0, 1.1 - dist.get_rank():  # becomes worse on rank 0
            plateau.step(loss)

    train_on_rows(rows(), at_end=schedule)


def rank_0_evaluates_by_ddp():
    start()

    def evaluate(model, optimizer, epoch):
        if dist.get_rank() == 0:
            with torch.no_grad():
                model(torch.randn(4, 8))

    train_on_rows(rows(), at_end=evaluate, model=nn.Sequential(nn.BatchNorm1d(8), network()))


# Trainings that agree cannot judge.


def tensor_parallel():
    _, world_size = start()
    model = network()
    mesh = init_device_mesh("cpu", (world_size,))
    parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(model, sgd(model))


def run_rank(rank):
    raise AssertionError("agree must not let a script start ranks")


def starts_its_ranks():
    torch.multiprocessing.spawn(run_rank, nprocs=2)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
