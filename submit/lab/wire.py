"""The switch of a lab whose link has a latency: python3 wire.py 1ms NODES, started by lab.sh.

Makes the network devices `switch` and wire1 to wireN, reads the frames that are sent into each,
and writes them, after the latency, out of the one where their address is. It is for frames as
large as a device takes: each costs Python some 10 us.
"""

import collections
import contextlib
import fcntl
import os
import selectors
import struct
import sys
import time

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000  # linux/if_tun.h
LARGEST = 65_550


def open_device(name):
    file = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return file


def main(latency, nodes):
    seconds = float(latency[:-2]) * {"ms": 1e-3, "us": 1e-6}[latency[-2:]]
    names = ["switch", *(f"wire{number}" for number in range(1, nodes + 1))]
    devices = [open_device(name) for name in names]
    selector = selectors.DefaultSelector()
    for device in devices:
        selector.register(device, selectors.EVENT_READ)

    device_of = {}  # {address: the device where it was seen as a sender}
    in_flight = collections.deque()  # (when it arrives, device, frame), in that order
    while True:
        wait = max(0, in_flight[0][0] - time.monotonic()) if in_flight else None
        for key, _ in selector.select(wait):
            try:
                frame = os.read(key.fd, LARGEST)
            except OSError:  # the device is gone with its node
                selector.unregister(key.fd)
                devices.remove(key.fd)
                continue
            receiver, sender = frame[:6], frame[6:12]
            device_of[sender] = key.fd
            targets = set(devices) - {key.fd}
            if receiver in device_of:
                targets = {device_of[receiver]}
            arrival = time.monotonic() + seconds
            in_flight.extend((arrival, device, frame) for device in targets)
        while in_flight and in_flight[0][0] <= time.monotonic():
            _, device, frame = in_flight.popleft()
            with contextlib.suppress(OSError):  # that device is down, or gone with its node
                os.write(device, frame)


main(sys.argv[1], int(sys.argv[2]))
