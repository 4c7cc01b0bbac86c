"""Wrong solutions of exercise 2: {name: (changes to the solution, what the hint says)}."""

SEND, WAIT = "    request = dist.isend(chunk, right)\n", "    request.wait()\n"
ADD, REPLACE = "        sum_chunk += buffer\n", "        exchange(send_chunk, recv_chunk)\n"
WRONG = {
    "no ring": ([("right = (rank + 1) % world_size", "right = rank + 1")], "rank 4 does not exist"),
    "all send first": ([(SEND, "    dist.send(chunk, right)\n"), (WAIT, "")],
                       "send returns only when the other rank"),
    "no wait": ([("dist.recv(buffer, left)", "dist.irecv(buffer, left)")],
                "buffer is not filled until you call wait()"),
    "a step too few": ([("range(world_size - 1)", "range(world_size - 2)")], "expected 3 messages"),
    "added to a copy": ([(ADD, "        sum_chunk = sum_chunk + buffer\n")],
                        "= instead of += or copy_ makes a new tensor"),
    "begun with another chunk": (
        [("send_chunk = chunks[(rank - step)", "send_chunk = chunks[(rank - step - 1)"),
         ("sum_chunk = chunks[(rank - step - 1)", "sum_chunk = chunks[(rank - step - 2)")],
        "rank r sends chunk r first"),
    "added again in the second half": (
        [(REPLACE,
          "        buffer = torch.empty_like(recv_chunk)\n"
          "        exchange(send_chunk, buffer)\n        recv_chunk += buffer\n")],
        "overwrite the chunk with copy_()"),
}
