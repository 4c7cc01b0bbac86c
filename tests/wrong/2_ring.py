"""Wrong solutions of exercise 2: {name: (changes to the solution, what the hint says)}."""

SENDING, WAIT = "    sending = dist.isend(chunk, right)\n", "    sending.wait()\n"
SUMMED, REPLACED = "        summed += received\n", "        exchange(sent, target)\n"
WRONG = {
    "no ring": ([("right = (rank + 1) % ranks", "right = rank + 1")], "rank 4 does not exist"),
    "all send first": ([(SENDING, "    dist.send(chunk, right)\n"), (WAIT, "")],
                       "a send returns only when the other rank"),
    "no wait": ([("dist.recv(buffer, left)", "dist.irecv(buffer, left)")],
                "buffer is not filled until you call wait()"),
    "a step too few": ([("range(ranks - 1)", "range(ranks - 2)")], "expected 3 messages"),
    "added to a copy": ([(SUMMED, "        summed = summed + received\n")],
                        "= instead of += or copy_ makes a new tensor"),
    "begun with another chunk": (
        [("sent = chunks[(rank - step)", "sent = chunks[(rank - step - 1)"),
         ("summed = chunks[(rank - step - 1)", "summed = chunks[(rank - step - 2)")],
        "rank r sends chunk r first"),
    "added again in the second half": (
        [(REPLACED,
          "        received = torch.empty_like(target)\n"
          "        exchange(sent, received)\n        target += received\n")],
        "overwrite the chunk with copy_()"),
}
