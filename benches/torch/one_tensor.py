"""The hand-over of one CUDA tensor to another process on the same device, with an acknowledgement.

A sample is the time from `put` until the acknowledgement is received. The sender keeps its tensor, and both sides are
warmed up.

    one_tensor_queue          torch.multiprocessing.Queue (spawn); the receiver keeps the first tensor, so that
                              later ones are in its cache
    one_tensor_queue_dropped  the same, but the receiver drops each tensor, which is opened and closed in every round
    one_tensor_pipe           multiprocessing.Pipe, which has no feeder thread: the fastest transport that pickles the tensor
"""

from __future__ import annotations

import queue
import sys

import measure

ROWS = ("one_tensor_queue", "one_tensor_queue_dropped", "one_tensor_pipe")
SHAPE = (4, 5)
SIZE = 4 * 5 * 4

# PyTorch creates an interprocess event for each send of a tensor, up to 1000 live events in a process (CudaIPCTypes.h,
# CUDA_IPC_MAXIMUM_EVENTS_TO_USE). A new tensor for each row and fewer rounds stay below that limit.
WARM = 50
ROUNDS = 900
QUICK = 50
SECONDS = 60


def receive_from_queue(tensors, acknowledgements, keep: bool) -> None:
    """The peer process: acknowledges tensors until it receives None."""
    measure.start_card(0)
    acknowledgements.put("ready")
    kept = None
    while (tensor := tensors.get(timeout=SECONDS)) is not None:
        if keep and kept is None:
            kept = tensor
        del tensor
        acknowledgements.put("taken")


def receive_from_pipe(pipe) -> None:
    """The peer process for a pipe; keeps the first tensor."""
    measure.start_card(0)
    pipe.send("ready")
    kept = None
    while pipe.poll(SECONDS) and (tensor := pipe.recv()) is not None:
        if kept is None:
            kept = tensor
        del tensor
        pipe.send("taken")


def through_queue(context, rounds: int, keep: bool) -> list[int]:
    import torch

    tensors, acknowledgements = context.Queue(), context.Queue()
    receiver = context.Process(target=receive_from_queue, args=(tensors, acknowledgements, keep), daemon=True)
    receiver.start()
    expect(acknowledgements.get(timeout=SECONDS), "ready")
    tensor = torch.zeros(SHAPE, device="cuda:0")
    torch.cuda.synchronize()

    def hand_over() -> None:
        tensors.put(tensor)
        expect(acknowledgements.get(timeout=SECONDS), "taken")

    samples = [measure.timed(hand_over) for _ in range(WARM + rounds)][WARM:]
    tensors.put(None)
    receiver.join(SECONDS)
    return samples


def through_pipe(context, rounds: int) -> list[int]:
    import torch

    ours, theirs = context.Pipe()
    receiver = context.Process(target=receive_from_pipe, args=(theirs,), daemon=True)
    receiver.start()
    theirs.close()
    expect(take(ours), "ready")
    tensor = torch.zeros(SHAPE, device="cuda:0")
    torch.cuda.synchronize()

    def hand_over() -> None:
        ours.send(tensor)
        expect(take(ours), "taken")

    samples = [measure.timed(hand_over) for _ in range(WARM + rounds)][WARM:]
    ours.send(None)
    receiver.join(SECONDS)
    return samples


def take(pipe):
    if not pipe.poll(SECONDS):
        raise queue.Empty
    return pipe.recv()


def expect(word: str, expected: str) -> None:
    if word != expected:
        raise RuntimeError(f"the receiver sent {word!r} instead of {expected!r}")


def run(machine: dict[str, object], quick: bool) -> None:
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    measure.start_card(0)
    rounds = QUICK if quick else ROUNDS
    for name, samples in (
        ("one_tensor_queue", lambda: through_queue(context, rounds, keep=True)),
        ("one_tensor_queue_dropped", lambda: through_queue(context, rounds, keep=False)),
        ("one_tensor_pipe", lambda: through_pipe(context, rounds)),
    ):
        measure.show(measure.row(name, samples(), SIZE, machine))


if __name__ == "__main__":
    sys.exit(measure.main(__file__, ROWS, 1, 300, run))
