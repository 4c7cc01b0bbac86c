"""MPI started in a process whose memory is full of ones, with holes of all sizes, and that says its rank."""

import ctypes

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
for size in range(64, 4096, 32):
    blocks = [libc.malloc(ctypes.c_size_t(size)) for _ in range(60)]
    for block in blocks:
        ctypes.memset(block, 0xFF, size)
    for block in blocks[::2]:
        libc.free(ctypes.c_void_p(block))

from mpi4py import MPI  # noqa: E402 (it starts MPI, which is what is tried)

print(f"{MPI.COMM_WORLD.rank}/{MPI.COMM_WORLD.size}", flush=True)
