"""What messages between GPUs cost the host, in this package and by ``dist.batch_isend_irecv``.

    torchrun --nproc-per-node 2 examples/benchmark/parts/message_time.py

Each rank sends its peers some buffers and receives as many. "host" is the time until the calls have
returned, the wait for them included, "all" that until the GPU is done; both of the slowest rank, in
microseconds, medians of rounds of messages one after the other. The two take turns.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[3]))
    sys.path.insert(1, str(Path(__file__).parents[2]))

from benchmark.ranks import from_torchrun

from customized_ops.ring_attention.core.comm.dist_comm import DistComm
from customized_ops.ring_attention.core.comm.rank_group import Messages

ROUNDS, MESSAGES = 9, 50
BUFFERS = 1, 2  # of each peer
BYTES = 1 << 18  # of each buffer


def main() -> None:
    """Measure, and print a line for each number of buffers."""
    device = torch.device("cuda", from_torchrun("LOCAL_RANK"))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.new_group()  # with its own connections, as the package's has
    comm = DistComm(dist.group.WORLD)
    comm.connect(device)
    peers = [peer for peer in range(comm.size) if peer != comm.rank]
    for count in BUFFERS:
        send, receive = (
            {peer: [made(device) for _ in range(count)] for peer in peers} for _ in range(2)
        )
        ways = {
            "batch_isend_irecv": partial(by_torch, group, send, receive),
            "here": partial(by_this_package, comm, send, receive),
        }
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(1 + ROUNDS):
            for name, move in ways.items():
                times[name].append(seconds(move, device))
        if comm.rank == 0:
            print(f"{len(peers)} peers, {count} buffers each:")
            for name, found in times.items():
                host, every = (median(each) * 1e6 for each in zip(*found[1:], strict=True))
                print(f"    {name:18} host {host:5.0f} us   all {every:5.0f} us", flush=True)
    dist.destroy_process_group()


def made(device: torch.device) -> Tensor:
    """A buffer."""
    return torch.zeros(BYTES, dtype=torch.uint8, device=device)


def by_torch(group: dist.ProcessGroup, send: Messages, receive: Messages) -> None:
    """Pass the messages as torch does."""
    ops = [
        dist.P2POp(operation, message, peer, group)
        for operation, messages in ((dist.isend, send), (dist.irecv, receive))
        for peer, each in messages.items()
        for message in each
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def by_this_package(comm: DistComm, send: Messages, receive: Messages) -> None:
    """Pass them as attention does."""
    comm.start(send, receive)()


def seconds(move: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Time of a message on the host, and until the GPU is done, of the slowest rank."""
    dist.barrier()
    torch.cuda.synchronize(device)
    began = perf_counter()
    for _ in range(MESSAGES):
        move()
    host = perf_counter() - began
    torch.cuda.synchronize(device)
    slowest = torch.tensor([host, perf_counter() - began], device=device) / MESSAGES
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    of_host, of_all = slowest.tolist()
    return of_host, of_all


if __name__ == "__main__":
    main()
