"""Wrong solutions of exercise 2: {name: (changes to the solution, what the hint says)}."""

SENDING, WAIT = "    sending = dist.isend(chunk, right)\n", "    sending.wait()\n"
SUMMED, REPLACED = "        summed += received\n", "        exchange(sent, replaced)\n"
WRONG = {
    "no ring": ([("right = (rank + 1) % ranks", "right = rank + 1")], "there is no rank 4"),
    "all send first": ([(SENDING, "    dist.send(chunk, right)\n"), (WAIT, "")],
                       "a send ends when the other rank receives"),
    "no wait": ([("dist.recv(room, left)", "dist.irecv(room, left)")], "room is empty until wait"),
    "a step too few": ([("range(ranks - 1)", "range(ranks - 2)")], "it takes 3 messages"),
    "added to a copy": ([(SUMMED, "        summed = summed + received\n")],
                        "= in place of += or copy_ makes another tensor"),
    "begun with another chunk": (
        [("sent = chunks[(rank - step)", "sent = chunks[(rank - step - 1)"),
         ("summed = chunks[(rank - step - 1)", "summed = chunks[(rank - step - 2)")],
        "rank r sends chunk r first"),
    "added again in the second half": (
        [(REPLACED,
          "        received = torch.empty_like(replaced)\n"
          "        exchange(sent, received)\n        replaced += received\n")],
        "takes the place of what is there"),
}
