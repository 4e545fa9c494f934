"""Ten rounds between two processes with one device each, by PyTorch RPC (TensorPipe).

    rpc_tutorial_cuda   the computation of PyTorch's tutorial "Direct device-to-device communication with TensorPipe CUDA
                        RPC": two linear layers of 1000 x 1000, one in each process, forward and backward, device
                        map {0: 1}
    rpc_tutorial_cpu    the same, with explicit copies of each tensor through the CPU
    rpc_transport_cuda  only the transport: a tensor of 1000 x 1000 floats there and back, device map {0: 1}
    rpc_transport_cpu   the same through the CPU

A sample is ten rounds including the synchronization of the stream. Each mode is warmed up; `details` contains the time of
its first ten rounds.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import measure

ROWS = ("rpc_tutorial_cuda", "rpc_tutorial_cpu", "rpc_transport_cuda", "rpc_transport_cpu")
ROUNDS = 10
# 1000 x 1000 floats in each direction.
BYTES_A_ROUND = 2 * 1000 * 1000 * 4
WARM = 3
REPEATS = 20
QUICK = 3
SECONDS = 60


def tutorial(through_cpu: bool):
    """Returns a function that runs ten rounds of the tutorial."""
    import torch
    import torch.distributed.autograd as autograd
    import torch.distributed.rpc as rpc
    from halves import SIDE, Half

    near = Half("cuda:0", through_cpu)
    far = rpc.remote("worker1", Half, args=("cuda:1", through_cpu))
    values = torch.randn(SIDE, SIDE, device="cuda:0")

    def rounds() -> None:
        for _ in range(ROUNDS):
            with autograd.context() as context:
                result = far.rpc_sync().forward(near(values))
                autograd.backward(context, [result.sum()])
        torch.cuda.current_stream("cuda:0").synchronize()

    return rounds


def transport(through_cpu: bool):
    """Returns a function that runs ten rounds without layers; the result is on the first device again."""
    import torch
    import torch.distributed.rpc as rpc
    from halves import SIDE, echo, echo_through_card

    values = torch.randn(SIDE, SIDE, device="cuda:0")

    def rounds() -> None:
        for _ in range(ROUNDS):
            if through_cpu:
                rpc.rpc_sync("worker1", echo_through_card, args=(values.cpu(),)).to("cuda:0")
            else:
                rpc.rpc_sync("worker1", echo, args=(values,))
        torch.cuda.current_stream("cuda:0").synchronize()

    return rounds


def measure_mode(name: str, make, through_cpu: bool, machine: dict[str, object], repeats: int) -> None:
    rounds = make(through_cpu)
    first = measure.timed(rounds)
    for _ in range(WARM):
        rounds()
    samples = [measure.timed(rounds) for _ in range(repeats)]
    details = {"rounds": ROUNDS, "first_ns": first}
    measure.show(measure.row(name, samples, ROUNDS * BYTES_A_ROUND, machine, details))


def join(rank: int, rendezvous: str) -> None:
    """Initializes RPC between the two processes, which rendezvous through a file."""
    import torch.distributed.rpc as rpc

    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    options = rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=128, rpc_timeout=SECONDS, init_method=f"file://{rendezvous}"
    )
    if rank == 0:
        options.set_device_map("worker1", {0: 1})
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)


def serve(rendezvous: str) -> None:
    """The peer process: serves until both shut down."""
    import torch.distributed.rpc as rpc

    join(1, rendezvous)
    rpc.shutdown()


def run(machine: dict[str, object], quick: bool) -> None:
    import torch.distributed.rpc as rpc
    import torch.multiprocessing as multiprocessing

    repeats = QUICK if quick else REPEATS
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        rendezvous = str(Path(directory) / "rendezvous")
        other = multiprocessing.get_context("spawn").Process(target=serve, args=(rendezvous,), daemon=True)
        other.start()
        join(0, rendezvous)
        for kind, make in (("tutorial", tutorial), ("transport", transport)):
            for path in ("cuda", "cpu"):
                measure_mode(f"rpc_{kind}_{path}", make, path == "cpu", machine, repeats)
        rpc.shutdown()
        other.join(SECONDS)


if __name__ == "__main__":
    sys.exit(measure.main(__file__, ROWS, 2, 300, run))
