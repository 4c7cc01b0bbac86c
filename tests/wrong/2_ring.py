"""Wrong solutions of exercise 2: {name: (changes to the solution, what the hint says)}."""

SENDING, WAIT = "    sending = dist.isend(chunk, right)\n", "    sending.wait()\n"
SUMMED, REPLACED = "        summed += received\n", "        exchange(sent, replaced)\n"
SPLIT = "tensor.tensor_split(dist.get_world_size())"
WHOLE_BUFFER = ("        exchange(torch.cat(chunks), everything := torch.cat(chunks))\n"
                "        received = everything.tensor_split(ranks)[(rank - step - 1) % ranks]\n")
WRONG = {
    "to the left": ([("right = (rank + 1)", "right = (rank - 1)"), ("left = (rank - 1)", "left = (rank + 1)")],
                    "go to the left neighbours"),
    "no ring": ([("right = (rank + 1) % ranks", "right = rank + 1")], "there is no rank 4"),
    "the last one sends to itself": ([("right = (rank + 1) % ranks", "right = min(rank + 1, ranks - 1)")],
                                     "rank 3 is this rank itself"),
    "all send first": ([(SENDING, "    dist.send(chunk, right)\n"), (WAIT, "")], "all are in dist.send"),
    "received from the right": ([("left = (rank - 1)", "left = (rank + 1)")], "rank 0 waits for a message of rank 1"),
    "no wait for what is received": ([("dist.recv(room, left)", "dist.irecv(room, left)")], "room is still empty"),
    "no wait for what is sent": ([(WAIT, "")], "isend only begins to send"),
    "all_reduce in the place of messages": ([(SUMMED, SUMMED + "        dist.all_reduce(summed)\n")],
                                            "all_reduce is a collective"),
    "the whole buffer in each step": ([("        exchange(sent, received)\n", WHOLE_BUFFER)],
                                      "a message has 20 numbers, a chunk 5"),
    "a step too few": ([("range(ranks - 1)", "range(ranks - 2)")], "2 messages from a rank; N is 4, so it takes 3"),
    "a step too many": ([("range(ranks - 1)", "range(ranks)")], "4 messages from a rank"),
    "not added": ([(SUMMED, "")], "the chunks are what they were: add"),
    "added to a copy": ([(SUMMED, "        summed = summed + received\n")], "the chunks are what they were: add"),
    "replaced, not added": ([(SUMMED, "        summed.copy_(received)\n")], "alone: add what is received"),
    "begun with another chunk": ([("sent = chunks[(rank - step)", "sent = chunks[(rank - step - 1)"),
                                  ("summed = chunks[(rank - step - 1)", "summed = chunks[(rank - step - 2)")],
                                 "rank 0 has that of chunk 0"),
    "always the own chunk": ([("sent = chunks[(rank - step) % ranks]", "sent = chunks[rank]")],
                             "on rank 0 chunk 1 is the sum of rank 0's and rank 3's"),
    "added again in the second half": ([(REPLACED, "        received = torch.empty_like(replaced)\n"
                                         "        exchange(sent, received)\n        replaced += received\n")],
                                       "it takes the place of what is there"),
    "the own partial sum goes round": ([("(rank - step + 1) % ranks", "(rank - step) % ranks"),
                                        ("replaced = chunks[(rank - step)", "replaced = chunks[(rank - step - 1)")],
                                       "rank r begins with chunk r + 1"),
    "copies": ([(SPLIT, "[part.clone() for part in " + SPLIT + "]")], "the chunks are copies"),
    "the rest is left out": ([(SPLIT, "tensor[:len(tensor) // 4 * 4].tensor_split(dist.get_world_size())")],
                             "all but the last 2"),
    "torch.chunk": ([("tensor_split", "chunk")], "torch.chunk makes 3 chunks, not 4"),
    "each chunk is the whole tensor": ([(SPLIT, "[tensor] * dist.get_world_size()")],
                                      "each number is to be in one chunk"),
}
