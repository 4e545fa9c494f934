"""Ready and acknowledge between two streams of two processes on one device, by interprocess events.

    ready_ack_events  each side has one event, which the peer opens once. In a round, this process records its event and
                      sends a message through a pipe; the stream of the peer waits for the event, records its own and
                      replies; the stream of this process waits for that event. The pipe is required, because a wait
                      refers to the last record before the call
    event_export      the cost of the event in each `put` of a tensor: creation, record and export

A sample of ready_ack_events is one round including the synchronization of the stream.
"""

from __future__ import annotations

import sys

import measure

ROWS = ("ready_ack_events", "event_export")
WARM = 50
ROUNDS = 2000
EXPORTS = 500
QUICK = 50
SECONDS = 60


def answer(pipe) -> None:
    """The peer process: answers each message until the pipe is closed or another message arrives."""
    import torch

    measure.start_card(0)
    stream = torch.cuda.Stream()
    acknowledge = torch.cuda.Event(interprocess=True)
    acknowledge.record(stream)
    pipe.send_bytes(acknowledge.ipc_handle())
    ready = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), pipe.recv_bytes())
    while pipe.poll(SECONDS) and pipe.recv_bytes() == b"ready":
        stream.wait_event(ready)
        acknowledge.record(stream)
        pipe.send_bytes(b"acknowledge")


def rounds_of_events(context, rounds: int) -> list[int]:
    import torch

    ours, theirs = context.Pipe()
    other = context.Process(target=answer, args=(theirs,), daemon=True)
    other.start()
    theirs.close()
    stream = torch.cuda.Stream()
    ready = torch.cuda.Event(interprocess=True)
    ready.record(stream)
    ours.send_bytes(ready.ipc_handle())
    acknowledge = torch.cuda.Event.from_ipc_handle(torch.device("cuda:0"), receive(ours))

    def one_round() -> None:
        ready.record(stream)
        ours.send_bytes(b"ready")
        receive(ours)
        stream.wait_event(acknowledge)
        stream.synchronize()

    samples = [measure.timed(one_round) for _ in range(WARM + rounds)][WARM:]
    ours.send_bytes(b"end")
    other.join(SECONDS)
    return samples


def receive(pipe) -> bytes:
    if not pipe.poll(SECONDS):
        raise TimeoutError(f"timed out after {SECONDS} s: no message from the peer process")
    return pipe.recv_bytes()


def exports(rounds: int) -> list[int]:
    import torch

    kept = []

    def export() -> None:
        event = torch.cuda.Event(interprocess=True)
        event.record()
        event.ipc_handle()
        kept.append(event)

    samples = [measure.timed(export) for _ in range(WARM + rounds)][WARM:]
    torch.cuda.synchronize()
    return samples


def run(machine: dict[str, object], quick: bool) -> None:
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    measure.start_card(0)
    samples = rounds_of_events(context, QUICK if quick else ROUNDS)
    measure.show(measure.row("ready_ack_events", samples, 0, machine))
    measure.show(measure.row("event_export", exports(QUICK if quick else EXPORTS), 0, machine))


if __name__ == "__main__":
    sys.exit(measure.main(__file__, ROWS, 1, 120, run))
