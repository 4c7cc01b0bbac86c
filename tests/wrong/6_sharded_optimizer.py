"""Wrong solutions of exercise 6: {name: (changes to the solution, what the hint says)}."""

LENGTH = "-(-total // ranks)  # rounded up"
ZEROS = "torch.zeros(length, dtype"
SCATTER = "dist.reduce_scatter(shard, list(gradients.chunk(dist.get_world_size())))\n"
MEAN = "return shard / dist.get_world_size()"
GATHER = "dist.all_gather(shards, own)\n"
VELOCITY = "self.velocity = self.momentum * self.velocity + gradient\n"
OWN = "own -= self.lr * self.velocity"
WRONG = {
    "rounded down": ([(LENGTH, "total // ranks")], "rounded up, so that no parameter is left out"),
    "state of everything": ([(ZEROS, "torch.zeros(total, dtype")], "of all parameters it is 184"),
    "a sum": ([(MEAN, "return shard")], "the sum is 3 times the mean"),
    "all-reduced": (
        [(SCATTER, "dist.all_reduce(gradients)\n        shard = gradients[self.begin:self.end]\n")],
        "it calls all_reduce, where one reduce_scatter"),
    "no gather": ([(GATHER, "shards = [own] * 3\n")], "all shards, one after the other"),
    "not in place": ([(OWN, "own = own - self.lr * self.velocity")], "update changes own in place"),
    "velocity is forgotten": ([(VELOCITY, "self.velocity = gradient\n")], "keeps velocity in self"),
}
