"""Small trainings as in public scripts, correct ones and mistakes: habits.py FUNCTION."""
import builtins
import contextlib
import copy
import functools
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
average = functools.partial(dist.all_reduce, op=dist.ReduceOp.AVG)


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


def do_nothing(*_):
    pass


def train(model, edit_gradients=do_nothing, loss=mse, steps=STEPS, after_step=do_nothing,
          optimizer=None):
    optimizer = optimizer or sgd(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(torch.randn(6, 8)), torch.randn(6, 1)).backward()
        edit_gradients()
        optimizer.step()
        after_step()


def for_gradients(model, operation):
    """Return a function that calls operation(gradient) for each gradient."""
    def edit():
        for parameter in model.parameters():
            operation(parameter.grad)

    return edit


def train_by_hand(operation, loss=mse, wrap=lambda model: model):
    """Train with an operation on each gradient, in place of DDP or after it."""
    model = start_with_network()
    train(wrap(model), for_gradients(model, operation), loss)


def halve(tensor):
    tensor /= 2


def rows(count=128):
    """Return the same data on all ranks."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 8, generator=generator),
                         torch.randn(count, 1, generator=generator))


def train_on_rows(data, skip=do_nothing, at_end=do_nothing, model=None, sampler=None, **options):
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


class Stream(IterableDataset):
    def __init__(self, first, step):
        self.numbers = range(first, 256, step)

    def __iter__(self):
        for number in self.numbers:
            row = torch.randn(8, generator=torch.Generator().manual_seed(number))
            yield {"row": row, "sum": row.sum()}


def train_on_stream(divide):
    """Train on a stream; divide it among the ranks, or give each rank the whole."""
    rank, world_size = start()
    stream, model = Stream(rank, world_size) if divide else Stream(0, 1), DDP(network())
    optimizer = sgd(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)
    for batch in DataLoader(stream, batch_size=6):
        optimizer.zero_grad()
        mse(model(batch["row"])[:, 0], batch["sum"]).backward()
        optimizer.step()
        schedule.step()


def clip_micro_batches(clipped):
    """Train with two micro-batches per step; clip after those that are named, 0 or 1."""
    model = DDP(start_with_network())
    optimizer = sgd(model)
    for _ in range(STEPS):
        for part in range(2):
            with model.no_sync() if part == 0 else contextlib.nullcontext():
                (mse(model(torch.randn(6, 8)), torch.randn(6, 1)) / 2).backward()
            if part in clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


# Correct.


def compiled_in_bf16():
    """Weights of each rank before DDP, a call without gradients, keywords, a silent print()."""
    rank, _ = start()
    torch.manual_seed(rank)
    builtins.print = do_nothing
    model = network().bfloat16()
    model.register_buffer("frequencies", torch.randn(8))
    with torch.no_grad():
        model(torch.zeros(1, 8).bfloat16())
    dist.all_reduce(op=dist.ReduceOp.SUM, tensor=torch.zeros(1))
    model = DDP(torch.compile(model, backend="eager"))
    train(lambda inputs: model(inputs.bfloat16()).float(), optimizer=sgd(model))


def rank_0_alone():
    """Looks at batches and evaluates on rank 0; has loaders per epoch, and a group of one rank."""
    rank, _ = start()
    dist.barrier(group=dist.new_group([0]))  # other ranks do nothing
    data = rows()
    next(iter(DataLoader(data, 8, sampler=DistributedSampler(data))))
    if rank == 0:
        fixed, _ = next(iter(DataLoader(data, 4)))  # for a figure

    def evaluate(model, optimizer, epoch):
        if rank == 0:
            model.module(fixed)
            for inputs, labels in DataLoader(data, 8, sampler=[0, 1, 2]):
                mse(model.module(inputs), labels)
            if epoch == 1:  # the last one: a weight that is only saved
                model.module[0].bias.data.zero_()

    train_on_rows(data, at_end=evaluate)


def weights_averaged():
    model = start_with_network()

    def average_weights():
        for parameter in model.parameters():
            average(parameter.data)

    train(model, after_step=average_weights)


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
        for parameter, gradient in zip(parameters, torch.autograd.grad(
                loss, parameters, materialize_grads=True)):
            parameter.grad = gradient
        for_gradients(model, average)()
        optimizer.step()


def several_models(average_temperature=True):
    """A generator that draws noise, a critic, and a tensor in no module, each with an optimizer."""
    rank, _ = start()
    generator, critic = DDP(nn.Linear(4, 8)), DDP(nn.Linear(8, 1))
    temperature = torch.ones((), requires_grad=True)
    temperature_optimizer = torch.optim.SGD([temperature], lr=0.01)
    generator_optimizer, critic_optimizer = sgd(generator), sgd(critic)
    data = rows()
    torch.manual_seed(1 + rank)
    for real, _ in DataLoader(data, 8, sampler=DistributedSampler(data)):
        critic_optimizer.zero_grad()
        generated = generator(torch.randn(8, 4)).detach()
        (critic(generated).mean() - critic(real).mean()).backward()
        critic_optimizer.step()
        generator_optimizer.zero_grad()
        temperature_optimizer.zero_grad()
        (-critic(generator(torch.randn(8, 4))) * temperature).mean().backward()
        if average_temperature:
            average(temperature.grad)
        generator_optimizer.step()
        temperature_optimizer.step()


def averaged_by_mpi():
    """Without torch.distributed."""
    from mpi4py import MPI
    ranks = MPI.COMM_WORLD
    model = network()
    for parameter in model.parameters():
        ranks.Bcast(parameter.data.numpy())
    torch.manual_seed(ranks.rank)

    def average_by_mpi(gradient):
        ranks.Allreduce(MPI.IN_PLACE, gradient.numpy())
        halve(gradient)

    train(model, for_gradients(model, average_by_mpi))


# Mistakes.


def no_process_group():
    torch.manual_seed(0)
    train(network())


def weights_of_each_rank():
    rank, _ = start()
    torch.manual_seed(rank)
    model = network()
    train(model, for_gradients(model, average))


def rows_of_one_seed(later=0):
    start()
    data, model = torch.randn(256, 8), DDP(network())
    optimizer = sgd(model)
    for indices in torch.randperm(256).roll(16 * later * dist.get_rank()).split(16):
        optimizer.zero_grad()
        model(input=data[indices]).pow(2).mean().backward()
        optimizer.step()


def rows_of_the_step_before():
    rows_of_one_seed(later=1)


def inner_model_is_called():
    model = DDP(start_with_network())
    train(model.module)
    for parameter in model.parameters():  # as if the best model was loaded for a test
        dist.broadcast(parameter.data, 0)


def a_layer_is_not_sharded():
    model = start_with_network()
    fully_shard(model[0])
    train(model)


def shards_of_each_rank():
    rank, _ = start()
    torch.manual_seed(rank)
    train(fully_shard(network()))


def optimizer_before_sharding():
    model = start_with_network()
    optimizer = sgd(model)
    train(fully_shard(model), optimizer=optimizer)


def a_barrier_on_rank_0():
    model = DDP(start_with_network())

    def wait():
        if dist.get_rank() == 0:
            dist.barrier()

    train(model, after_step=wait)


def other_collectives():
    rank, _ = start()
    total = torch.zeros(1 + rank)
    dist.all_reduce(total)


def rank_1_ends_early():
    train(start_with_network(), steps=STEPS if dist.get_rank() == 0 else 3)


def notes_alone():
    """Each rank skips one batch by itself."""
    rank, _ = start()
    batches = []

    def skip(inputs):
        batches.append(inputs)
        return len(batches) == 2 + 2 * rank

    train_on_rows(rows(), skip)


class Noisy(TensorDataset):
    def __getitem__(self, index):
        row, label = super().__getitem__(index)
        return row + 0.1 * torch.randn(8) + random.random(), label


def one_noise_for_all():
    """In the data set, which has one seed on all ranks, and in the model."""
    start()
    random.seed(0)
    data, model = Noisy(*rows().tensors), nn.Sequential(nn.Dropout(0.1), network())
    train_on_rows(data, model=model)


def one_mask_for_all():
    """By a function, whose use agree cannot see."""
    start()

    def drop(inputs):
        nn.functional.dropout(inputs)

    train_on_rows(rows(), drop)


def one_time_for_all():
    """As a diffusion model's, whose times have one seed on all ranks."""
    rank, _ = start()
    model = DDP(nn.Bilinear(8, 1, 1))
    optimizer = sgd(model)
    for batch in torch.randn(2, 64, 8)[rank].split(8):
        optimizer.zero_grad()
        model(batch, torch.rand(8, 1)).pow(2).mean().backward()
        optimizer.step()


def a_rank_skips_a_batch():
    start()
    skipped = []

    def skip(inputs):
        if dist.get_rank() == 1 and inputs[0, 0] > 0 and not skipped:
            skipped.append(inputs)
            return True
        return False

    train_on_rows(rows(), skip)


def an_average_on_rank_0():
    """The weights of a teacher."""
    rank, _ = start()
    student = network()
    teacher = copy.deepcopy(student)

    def teach(inputs):
        with torch.no_grad():
            teacher(inputs)

    def update(model, optimizer, epoch):
        if rank == 0:
            teacher[0].bias.data.lerp_(model.module[0].bias.data, 0.1)

    train_on_rows(rows(), teach, update, student)


def a_sampler_with_a_seed_per_rank():
    rank, _ = start()
    data = rows()
    train_on_rows(data, sampler=DistributedSampler(data, seed=rank))


def a_sampler_for_one_rank():
    start()
    data = rows(64)
    train_on_rows(data, sampler=DistributedSampler(data, 1, 0))


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
    train(parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def rank_0_searches_alone():
    """For a learning rate, say."""
    rank, _ = start()
    if rank == 0:
        train(network())
    train_on_rows(rows())


def run_rank(rank):
    raise AssertionError("agree must not let a script start ranks")


def starts_its_ranks():
    torch.multiprocessing.spawn(run_rank, nprocs=2)


TRAININGS = {
    # Correct
    "loss_divided_and_summed": lambda: train_by_hand(
        dist.all_reduce, lambda outputs, labels: mse(outputs, labels) / dist.get_world_size()),
    "clips_all_micro_batches": lambda: clip_micro_batches([1]),
    "a_stream_for_each_rank": lambda: train_on_stream(divide=True),
    # Mistakes
    "summed": lambda: train_by_hand(dist.all_reduce),
    "averaged_twice": lambda: train_by_hand(halve, wrap=DDP),
    "gradients_of_rank_0": lambda: train_by_hand(functools.partial(dist.broadcast, src=0)),
    "root_of_a_negative": lambda: train_by_hand(
        do_nothing, lambda outputs, labels: outputs.sqrt().mean(), DDP),
    "clips_each_micro_batch": lambda: clip_micro_batches([0, 1]),
    "one_stream_for_all": lambda: train_on_stream(divide=False),
    "a_tensor_in_no_module": lambda: several_models(average_temperature=False),
}

if __name__ == "__main__":
    name = sys.argv[1]
    (TRAININGS.get(name) or globals()[name])()
