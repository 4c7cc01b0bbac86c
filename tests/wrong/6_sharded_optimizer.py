"""Wrong solutions of exercise 6: {name: (changes to the solution, what the hint says)}."""

LENGTH = "-(-total // world_size)  # rounded up"
ZEROS = "torch.zeros(length, dtype"
SCATTER = "dist.reduce_scatter(shard, list(gradients.chunk(dist.get_world_size())))\n"
MEAN = "return shard / dist.get_world_size()"
GATHER = "dist.all_gather(shards, parameter_shard)\n"
VELOCITY = "self.velocity = self.momentum * self.velocity + gradient_shard\n"
SHARD = "parameter_shard -= self.lr * self.velocity"
WRONG = {
    "rounded down": ([(LENGTH, "total // world_size")],
        "rounded up, so that no parameter is left out"),
    "state of everything": ([(ZEROS, "torch.zeros(total, dtype")],
        "for all parameters it would be 184"),
    "a sum": ([(MEAN, "return shard")], "a plain sum would be 3 times"),
    "all-reduced": (
        [(SCATTER, "dist.all_reduce(gradients)\n        shard = gradients[self.begin:self.end]\n")],
        "it calls all_reduce; one reduce_scatter is enough"),
    "no gather": ([(GATHER, "shards = [parameter_shard] * 3\n")],
        "all shards, concatenated in rank order"),
    "not in place": ([(SHARD, "parameter_shard = parameter_shard - self.lr * self.velocity")],
                     "must change parameter_shard in place"),
    "velocity is forgotten": ([(VELOCITY, "self.velocity = gradient_shard\n")],
        "keep the velocity in self"),
}
