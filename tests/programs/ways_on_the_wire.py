"""three_ways.py; leaves what Linux says that each rank's sockets sent in a training's steps.

`python ways_on_the_wire.py FOLDER FLAG...`: a file for each rank, with the bytes of each way.
"""

import gc
import json
import os
import socket
import struct
import sys

import three_ways  # of chapter 3

folder = sys.argv.pop(1)


def sent():
    total = 0
    for name in os.listdir("/proc/self/fd"):
        if os.path.realpath(f"/proc/self/fd/{name}").rpartition("/")[2].startswith("socket:"):
            with socket.socket(fileno=os.dup(int(name))) as found:
                if found.family != socket.AF_UNIX and found.type == socket.SOCK_STREAM:
                    info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 208)
                    total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


class Watched(three_ways.Sent):
    def __exit__(self, *problem):
        super().__exit__(*problem)
        looks.append(sent())


def train(way, args, train=three_ways.train):
    looks.clear()
    result = train(way, args)
    wire[way.__name__] = looks[-1] - looks[0]  # the first: when the way is set up
    return result


looks, wire = [], {}
three_ways.Sent, three_ways.train = Watched, train
three_ways.main()
with open(f"{folder}/wire-{three_ways.dist.get_rank()}", "w") as file:
    json.dump(wire, file)
gc.collect()
three_ways.dist.destroy_process_group()
