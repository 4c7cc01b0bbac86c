"""Wrong solutions of exercise 6: {name: (changes to the solution, what the hint says)}."""

LENGTH = "-(-total // ranks)  # rounded up"
ZEROS = "torch.zeros(length, dtype"
SCATTER = "dist.reduce_scatter(shard, list(gradients.chunk(dist.get_world_size())))\n"
MEAN = "return shard / dist.get_world_size()"
GATHER = "dist.all_gather(shards, own)\n"
VELOCITY = "self.velocity = self.momentum * self.velocity + gradient\n"
OWN = "own -= self.lr * self.velocity"
WRONG = {
    "rounded down": ([(LENGTH, "total // ranks")], "the last 2 parameters are in no shard"),
    "the same shard": ([("rank * length", "0")], "all ranks have the same shard"),
    "the rest to the last rank": ([(LENGTH, "total // ranks"),
                                   ("self.begin + length", "self.begin + length + 2 * (rank == 2)")],
                                  "not equally long"),
    "no zeros": ([("self.begin + length", "min(self.begin + length, total)")], "not equally long"),
    "state of everything": ([(ZEROS, "torch.zeros(total, dtype")], "the state of all parameters"),
    "a view of everything": ([(ZEROS, "torch.zeros(length * ranks, dtype"),
                              ("[0].dtype)", "[0].dtype)[self.begin:self.end]")],
                             "a view keeps all that it was cut from"),
    "state twice": ([("        self.velocity", "        self.old = torch.zeros(length)\n        self.velocity")],
                    "96 bytes in self.old, self.velocity"),
    "a sum": ([(MEAN, "return shard")], "the sum, 3 times the mean"),
    "divided twice": ([(MEAN, MEAN + " / 3")], "divided twice"),
    "nothing returned": ([("return shard", "shard")], "average returns nothing"),
    "not averaged": ([(SCATTER, "shard = gradients[self.begin:self.end] * 3\n")], "its own gradients still"),
    "the first shard for all": ([(SCATTER, "dist.all_reduce(gradients)\n        shard = gradients[:len(shard)]\n")],
                                "right on rank 0, not on the others"),
    "the whole row": ([(SCATTER, "dist.all_reduce(gradients)\n        shard = gradients\n")],
                      "returns 24 numbers, a shard has 8"),
    "all-reduced": ([(SCATTER, "dist.all_reduce(gradients)\n        shard = gradients[self.begin:self.end]\n")],
                    "all_reduce: 32 numbers from a rank, where 16"),
    "no gather": ([(GATHER, "shards = [own] * 3\n")], "rank 0's shard stands there 3 times"),
    "the own shard alone": ([(GATHER, "shards = [own]\n")], "gather returns 8 numbers"),
    "added up": ([(GATHER, "dist.all_reduce(own)\n        shards = [own] * 3\n")], "the shards are added up"),
    "gathered by an all-reduce": ([(GATHER, "shards = [own * (r == dist.get_rank()) for r in range(3)]\n"
                                            "        dist.all_reduce(row := torch.cat(shards))\n        return row\n")],
                                  "all_reduce: 32 numbers from a rank"),
    "not in place": ([(OWN, "own = own - self.lr * self.velocity")], "update changes own in place"),
    "gradients are gathered": ([(OWN, "own.copy_(gradient)")], "gather the stepped parameters"),
    "uphill": ([(OWN, OWN.replace("-=", "+="))], "-1 times as long as it should be"),
    "no learning rate": ([("self.lr * ", "")], "10 times as long"),
    "Adam's average": ([("+ gradient", "+ (1 - self.momentum) * gradient")], "0.1 times as long"),
    "velocity is forgotten": ([(VELOCITY, "self.velocity = gradient\n")], "velocity has to be kept"),
    "the state grows": ([(VELOCITY, VELOCITY + "        self.gradient = gradient\n")], "128 bytes in self.velocity"),
}
