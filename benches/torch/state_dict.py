"""The hand-over of a state dict of 1000 CUDA tensors to another process on the same device by torch.multiprocessing.Queue.

A sample is the time from `put` until the acknowledgement of all tensors is received.

    state_dict_64_first      16 floats each, which PyTorch's allocator packs into few allocations; none is open yet
    state_dict_64_again      the same dict again: the receiver has kept the tensors and finds all in its cache
    state_dict_1mib_first    1 MiB each
    state_dict_1mib_again

`details` contains the number of driver allocations of the tensors. Each first time uses new tensors in allocations that
were never shared, after the receiver has dropped all tensors.
"""

from __future__ import annotations

import gc
import sys

import measure

TENSORS = 1000
KINDS = (("64", 16), ("1mib", 262_144))
ROWS = tuple(f"state_dict_{kind}_{when}" for kind, _ in KINDS for when in ("first", "again"))
REPEATS = 7
AGAIN = 5
SECONDS = 60


def receive(dicts, acknowledgements) -> None:
    """The peer process. A message is a command, and for "take" a state dict."""
    measure.start_card(0)
    acknowledgements.put("ready")
    kept = []
    while True:
        command, tensors = dicts.get(timeout=SECONDS)
        if command == "end":
            return
        if command == "drop":
            kept.clear()
            tensors = None
            gc.collect()
            acknowledgements.put(0)
        else:
            kept.append(tensors)
            acknowledgements.put(len(tensors))


def make(elements: int) -> dict[str, object]:
    import torch

    def tensor(index: int) -> torch.Tensor:
        return torch.full((elements,), float(index), device="cuda:0")

    tensors = {f"layer.{index}.weight": tensor(index) for index in range(TENSORS)}
    torch.cuda.synchronize()
    return tensors


def allocations_of(addresses: list[int], segments: list[dict[str, object]]) -> dict[str, int]:
    """Returns the number of driver allocations of these addresses, and the smallest and largest size."""
    sizes = {}
    for segment in segments:
        start, size = segment["address"], segment["total_size"]
        if any(start <= address < start + size for address in addresses):
            sizes[start] = size
    if not sizes:
        return {"allocations": 0, "smallest": 0, "largest": 0}
    return {"allocations": len(sizes), "smallest": min(sizes.values()), "largest": max(sizes.values())}


def measure_kind(
    dicts, acknowledgements, elements: int, repeats: int
) -> tuple[list[int], list[int], dict[str, int]]:
    import torch

    def hand_over(tensors: dict[str, object]) -> None:
        dicts.put(("take", tensors))
        taken = acknowledgements.get(timeout=SECONDS)
        if taken != TENSORS:
            raise RuntimeError(f"the receiver opened {taken} tensors instead of {TENSORS}")

    first, again, details = [], [], {}
    # The first repeat includes one-time initialization of the process and is not recorded.
    for repeat in range(1 + repeats):
        tensors = make(elements)
        addresses = [tensor.data_ptr() for tensor in tensors.values()]
        details = allocations_of(addresses, torch.cuda.memory_snapshot())
        samples = [measure.timed(lambda: hand_over(tensors)) for _ in range(1 + AGAIN)]
        if repeat > 0:
            first.append(samples[0])
            again.extend(samples[1:])
        dicts.put(("drop", None))
        acknowledgements.get(timeout=SECONDS)
        del tensors
        gc.collect()
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
    return first, again, details


def run(machine: dict[str, object], quick: bool) -> None:
    import torch.multiprocessing as multiprocessing

    context = multiprocessing.get_context("spawn")
    measure.start_card(0)
    dicts, acknowledgements = context.Queue(), context.Queue()
    receiver = context.Process(target=receive, args=(dicts, acknowledgements), daemon=True)
    receiver.start()
    acknowledgements.get(timeout=SECONDS)
    for kind, elements in KINDS:
        first, again, details = measure_kind(dicts, acknowledgements, elements, 2 if quick else REPEATS)
        size = TENSORS * elements * 4
        details = {"tensors": TENSORS, **details}
        measure.show(measure.row(f"state_dict_{kind}_first", first, size, machine, details))
        measure.show(measure.row(f"state_dict_{kind}_again", again, size, machine, details))
    dicts.put(("end", None))
    receiver.join(SECONDS)


if __name__ == "__main__":
    sys.exit(measure.main(__file__, ROWS, 1, 300, run))
