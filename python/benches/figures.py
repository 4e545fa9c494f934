"""What hand-overs of CUDA tensors between two Python processes take, beside stock torch.multiprocessing, in one run.

    python benches/figures.py [--quick] [--side SIDE]... [--rust PATH] [--output FILE]

The sides run one after the other, stock and install three times in turn, since a virtual machine is slower at times. Each has a sender and a
receiver process of its own on the first device:

    floor     a byte each way over a pipe, and no memory: what the wake-ups of two processes take
    by hand   a state dict by PyTorch's exchange functions and the driver's IPC calls in C, and nothing else (by_hand.c)
    stock     torch.multiprocessing.Queue of PyTorch
    install   the same program after device_ipc.torch.install()
    ours      device_ipc: a Channel for one tensor, `share` and `device_ipc.torch.open` for state dicts

A sample is the time from the start of the hand-over until the sender has the acknowledgement that the receiver has all tensors as
torch tensors. "first": the memory was never shared before. "again": the same tensors once more, while the receiver keeps those of
before; `share` is called again each time. Unmapping of the memory of before is not timed, on any side. Cells are medians in microseconds,
with the 10th and the 90th percentile.

"one tensor": the same tensor each time, while the receiver still has it from the time before. "one tensor, memory closed": the receiver has
dropped it, unmapped its memory, and collected Python's garbage, which took it about 80 ms; the caches of both processors are cold then.
"one integer": by the same two queues, without a tensor.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import shutil
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

SECONDS = 60
SIDES = ("floor", "by hand", "stock", "install", "ours")
# These run in turn, this often.
IN_TURN = ("stock", "install")
TURNS = 3
GIB = 1 << 30


def llama_3_8b() -> dict[str, tuple[int, ...]]:
    """The names and shapes of Llama-3-8B: 291 tensors, 16 GB in bfloat16."""
    layer = {
        "q_proj": (4096, 4096),
        "k_proj": (1024, 4096),
        "v_proj": (1024, 4096),
        "o_proj": (4096, 4096),
        "gate_proj": (14336, 4096),
        "up_proj": (14336, 4096),
        "down_proj": (4096, 14336),
        "input_norm": (4096,),
        "post_norm": (4096,),
    }
    shapes = {f"layers.{i}.{name}": shape for i in range(32) for name, shape in layer.items()}
    return {"embed": (128256, 4096), **shapes, "norm": (4096,), "lm_head": (128256, 4096)}


def thousand(*shape: int) -> dict[str, tuple[int, ...]]:
    return {f"layer.{i}.weight": shape for i in range(1000)}


# name: shapes, element type, rounds, memory of the side "ours" beside the caching allocator (None)
DICTS: dict[str, tuple[dict[str, tuple[int, ...]], str, int, list[int | None]]] = {
    "1000 x 64 B": (thousand(16), "float32", 9, [None]),
    "1000 x 1 MiB": (thousand(512, 512), "float32", 7, [None, 512 << 20]),
    "Llama-3-8B, 291 tensors, 16 GB": (llama_3_8b(), "bfloat16", 4, [None, 512 << 20, 17 * GIB]),
}


# What the two queues take without a tensor.
INTEGER = "one integer"
ONE = "one tensor"
ONE_CLOSED = "one tensor, memory closed"
TEXT = "ours, text over a pipe"
OURS = ("share", "open", "views")
# The goals: microseconds, or a part of the time of stock.
ONE_BLOCK = "ours, pool of one block"
GOALS: dict[tuple[str, str], int | float] = {
    (ONE, "install"): 110,
    (ONE, "ours"): 40,
    (ONE, TEXT): 200,
    ("1000 x 64 B, first", "install"): 1.0,
    ("1000 x 64 B, first", "ours"): 1600,
    ("1000 x 64 B, again", "install"): 0.6,
    ("1000 x 64 B, again", "ours"): 1200,
    ("1000 x 1 MiB, first", "install"): 1.0,
    ("1000 x 1 MiB, first", "ours, pool of 512 MiB"): 2000,
    ("1000 x 1 MiB, again", "install"): 0.6,
    ("1000 x 1 MiB, again", "ours, pool of 512 MiB"): 1300,
    ("Llama-3-8B, 291 tensors, 16 GB, first", "install"): 1.0,
    ("Llama-3-8B, 291 tensors, 16 GB, first", ONE_BLOCK): 1500,
    ("Llama-3-8B, 291 tensors, 16 GB, again", "install"): 0.6,
    ("Llama-3-8B, 291 tensors, 16 GB, again", ONE_BLOCK): 500,
}


def memory_name(block_bytes: int | None) -> str:
    if block_bytes is None:
        return "ours"
    return f"ours, pool of {block_bytes >> 20} MiB" if block_bytes < GIB else "ours, pool of one block"


def make(shapes: dict[str, tuple[int, ...]], dtype: str, block_bytes: int | None) -> dict[str, Any]:
    """Allocates a state dict."""
    import torch

    import device_ipc.torch as dt

    place: Any = contextlib.nullcontext() if block_bytes is None else dt.pool(block_bytes=block_bytes)
    with place:
        state = {
            name: torch.zeros(shape, dtype=getattr(torch, dtype), device="cuda:0")
            for name, shape in shapes.items()
        }
    torch.cuda.synchronize()
    return state


def forget() -> None:
    """Gives all unused memory back to the driver."""
    import torch

    gc.collect()
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def timed(body: Callable[[], object]) -> float:
    begun = time.perf_counter_ns()
    body()
    return (time.perf_counter_ns() - begun) / 1e3


def note(side: str, row: str, samples: list[float], **details: float) -> None:
    print(json.dumps({"side": side, "row": row, "samples": samples, "details": details}), flush=True)


def detail(names: tuple[str, ...], kinds: Sequence[tuple[float, ...]]) -> dict[str, float]:
    """Returns the medians of the parts of hand-overs."""
    return dict(zip(names, (statistics.median(part) for part in zip(*kinds))))


# The side "floor".


def answer_bytes(pipe: Any) -> None:
    while pipe.poll(SECONDS) and (received := pipe.recv_bytes()) != b"end":
        pipe.send_bytes(received)


def by_bytes(rounds: int) -> None:
    import multiprocessing

    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    peer = context.Process(target=answer_bytes, args=(theirs,), daemon=True)
    peer.start()

    def exchange() -> None:
        pipe.send_bytes(b"1")
        assert pipe.poll(SECONDS) and pipe.recv_bytes() == b"1"

    for _ in range(50):
        exchange()
    note("floor", ONE, [timed(exchange) for _ in range(rounds)])
    idle = []
    for _ in range(rounds // 5):
        time.sleep(0.08)
        idle.append(timed(exchange))
    note("floor", ONE_CLOSED, idle)
    pipe.send_bytes(b"end")
    peer.join(SECONDS)


# The side "by hand".


def state_dicts_by_hand(rounds: int) -> None:
    from by_hand import ByHand

    start("by hand")
    peer = ByHand()
    for name, (shapes, dtype, repeats, _) in DICTS.items():
        first, again = [], []
        for _ in range(repeats if rounds > 100 else 3):
            forget()
            state = make(shapes, dtype, None)
            first.append(timed(lambda: peer.hand_over(state, True)))
            # The references of each hand-over are those of one.
            for _ in range(3):
                peer.release()
                again.append(timed(lambda: peer.hand_over(state, False)))
            peer.drop()
            del state
        names = ("describe", "open and make")
        note("by hand", f"{name}, first", first[1:], **detail(names, peer.parts[4::4]))
        rest = [part for i, part in enumerate(peer.parts) if i >= 4 and i % 4 > 0]
        note("by hand", f"{name}, again", again[3:], **detail(names, rest))
        peer.parts.clear()
    peer.end()


# The sides "stock" and "install".


def start(side: str) -> None:
    import torch

    torch.cuda.set_device(0)
    torch.zeros(1, device="cuda:0")
    if side == "install":
        import device_ipc.torch as dt

        getattr(dt, "install")()


def receive_by_queue(side: str, values: Any, acknowledgements: Any) -> None:
    start(side)
    acknowledgements.put("ready")
    kept: list[Any] = []
    while True:
        command, value = values.get(timeout=SECONDS)
        if command == "end":
            return
        if command == "drop":
            kept.clear()
            del value
            gc.collect()
            if side == "install":
                # PyTorch unmaps the memory with its last tensor, this library when it is asked for.
                import device_ipc

                device_ipc.close_unused(SECONDS)
        elif command == "one":
            kept[:] = [value]  # the one of before is dropped after this one has come
        else:
            kept.append(value)
        value = None
        acknowledgements.put(1)


def by_queue(side: str, rounds: int, turns: int) -> None:
    """Runs one turn."""
    import torch
    import torch.multiprocessing as multiprocessing

    start(side)
    context = multiprocessing.get_context("spawn")
    values, acknowledgements = context.Queue(), context.Queue()
    receiver = context.Process(target=receive_by_queue, args=(side, values, acknowledgements), daemon=True)
    receiver.start()
    acknowledgements.get(timeout=SECONDS)

    def hand_over(command: str, value: object) -> None:
        values.put((command, value))
        acknowledgements.get(timeout=SECONDS)

    for _ in range(50):
        hand_over("one", 1)
    rounds //= turns
    note(side, INTEGER, [timed(lambda: hand_over("one", 1)) for _ in range(rounds)])
    tensor = torch.zeros((4, 5), device="cuda:0")
    torch.cuda.synchronize()
    for _ in range(50):
        hand_over("one", tensor)
    note(side, ONE, [timed(lambda: hand_over("one", tensor)) for _ in range(rounds)])
    closed = []
    for _ in range(rounds // 5):
        hand_over("drop", None)
        closed.append(timed(lambda: hand_over("one", tensor)))
    note(side, ONE_CLOSED, closed)
    hand_over("drop", None)
    for name, (shapes, dtype, repeats, _) in DICTS.items():
        first, again = [], []
        for _ in range(1 + math.ceil((repeats - 1) / turns) if turns > 1 else 3):
            forget()
            state = make(shapes, dtype, None)
            first.append(timed(lambda: hand_over("take", state)))
            again += [timed(lambda: hand_over("take", state)) for _ in range(3)]
            hand_over("drop", None)
            del state
        # The first round initialises the processes.
        note(side, f"{name}, first", first[1:])
        note(side, f"{name}, again", again[3:])
    values.put(("end", None))
    receiver.join(SECONDS)


# The side "ours".


def receive_by_text(pipe: Any, name: str) -> None:
    """Opens descriptors that come through a pipe, and tensors that come through a channel."""
    start("ours")
    import torch

    import device_ipc
    import device_ipc.torch as dt

    pipe.send_bytes(b"ready")
    channel = device_ipc.connect(name, backend="cuda")
    while (message := channel.receive(timeout=SECONDS)).exports:
        with message.open(device="cuda:0") as mapping:
            tensor = torch.from_dlpack(mapping)
            # A tensor that outlives the block gives a warning each time.
            del tensor
        channel.send(b"taken")
    channel.close()
    kept: list[Any] = []
    while pipe.poll(SECONDS):
        text = pipe.recv_bytes()
        if text == b"end":
            return
        is_single = text[:1] == b"1"
        if text == b"drop":
            kept.clear()
            gc.collect()
            pipe.send_bytes(struct.pack("dd", 0, 0))
            continue
        begun = time.perf_counter_ns()
        mapping = device_ipc.open(text[1:], device="cuda:0")
        opened = time.perf_counter_ns()
        if is_single:
            kept[:] = [torch.from_dlpack(mapping.tensor)]  # the one of before is dropped after this one has come
        else:
            kept.append(dt.Tensors(mapping))
        viewed = time.perf_counter_ns()
        del mapping
        pipe.send_bytes(struct.pack("dd", (opened - begun) / 1e3, (viewed - opened) / 1e3))


def by_text(rounds: int) -> None:
    import os

    import torch
    import torch.multiprocessing as multiprocessing

    import device_ipc

    start("ours")
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    name = f"figures-{os.getpid()}"
    with device_ipc.listen(name, backend="cuda") as listener:
        receiver = context.Process(target=receive_by_text, args=(theirs, name), daemon=True)
        receiver.start()
        theirs.close()
        assert pipe.poll(SECONDS) and pipe.recv_bytes() == b"ready"
        channel = listener.accept(timeout=SECONDS)

    def by_channel() -> None:
        channel.send(b"", tensor)
        channel.receive(timeout=SECONDS)

    tensor = torch.zeros((4, 5), device="cuda:0")
    torch.cuda.synchronize()
    for _ in range(50):
        by_channel()
    note("ours", ONE, [timed(by_channel) for _ in range(rounds)])
    channel.send(b"")
    channel.close(timeout=SECONDS)

    exports: list[device_ipc.Export] = []
    parts: list[tuple[float, float, float]] = []

    def answer() -> tuple[float, float]:
        assert pipe.poll(SECONDS), "the receiver does not answer"
        opened, viewed = struct.unpack("dd", pipe.recv_bytes())
        return opened, viewed

    def hand_over(value: Any, kind: bytes = b"n") -> None:
        begun = time.perf_counter_ns()
        export = device_ipc.share(value)
        shared = time.perf_counter_ns()
        pipe.send_bytes(kind + bytes(export.descriptor))
        exports.append(export)
        parts.append(((shared - begun) / 1e3, *answer()))

    def drop() -> None:
        pipe.send_bytes(b"drop")
        answer()
        for export in exports:
            export.close(timeout=SECONDS)
        exports.clear()
        device_ipc.close_unused()

    for _ in range(50):
        hand_over(tensor, b"1")
    parts.clear()
    samples = []
    for _ in range(rounds):
        samples.append(timed(lambda: hand_over(tensor, b"1")))
        exports.pop(0).close(timeout=SECONDS)
    note(TEXT, ONE, samples, **detail(OURS, parts))
    drop()
    parts.clear()
    closed = []
    for _ in range(rounds // 5):
        closed.append(timed(lambda: hand_over(tensor, b"1")))
        drop()
    note(TEXT, ONE_CLOSED, closed, **detail(OURS, parts))
    for name, (shapes, dtype, repeats, memories) in DICTS.items():
        for block_bytes in memories:
            first, again, first_parts, again_parts = [], [], [], []
            for repeat in range(repeats if rounds > 100 else 3):
                forget()
                state = make(shapes, dtype, block_bytes)
                parts.clear()
                first.append(timed(lambda: hand_over(state)))
                again += [timed(lambda: hand_over(state)) for _ in range(3)]
                first_parts += parts[:1]
                again_parts += parts[1:]
                drop()
                del state
            side = memory_name(block_bytes)
            note(side, f"{name}, first", first[1:], **detail(OURS, first_parts[1:]))
            note(side, f"{name}, again", again[3:], **detail(OURS, again_parts[3:]))
    pipe.send_bytes(b"end")
    receiver.join(SECONDS)


# The table.


def rows_of(side: str, quick: bool) -> Iterator[dict[str, Any]]:
    """Runs a side in a process of its own."""
    if side == "install":
        import device_ipc.torch as dt

        if not hasattr(dt, "install"):
            yield {"side": side, "row": "all", "skipped": "this version has no device_ipc.torch.install"}
            return
    command = [sys.executable, __file__, "--run", side, *(["--quick"] if quick else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        yield json.loads(line)
    if process.wait(SECONDS) != 0:
        yield {"side": side, "row": "all", "skipped": f"the process has ended with status {process.returncode}"}


def order_of(sides: Sequence[str], quick: bool) -> list[str]:
    """Returns the sides as they run, those in turn at the place of the first of them."""
    in_turn = [side for side in sides if side in IN_TURN]
    order: list[str] = []
    for side in sides:
        if side not in in_turn:
            order.append(side)
        elif side not in order:
            order += in_turn * (1 if quick else TURNS)
    return order


def add(row: dict[str, Any], found: list[dict[str, Any]]) -> None:
    """Adds a row, or the samples of a further turn to it."""
    for known in found:
        if "samples" in row and "samples" in known and (known["side"], known["row"]) == (row["side"], row["row"]):
            known["samples"] += row["samples"]
            return
    found.append(row)


def by_rust(program: str) -> Iterator[dict[str, Any]]:
    """Runs the rows of the Rust benchmarks that Python is compared with."""
    path = shutil.which(program)
    if path is None:
        yield {"side": "Rust", "row": ONE, "skipped": f"{program} not found"}
        return
    command = [path, "--row", "hand-over", "--backend", "cuda"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    yield {"side": "Rust", "row": ONE, "skipped": (done.stdout + done.stderr)[-3000:]}


def cell(samples: list[float]) -> str:
    if len(samples) < 2:
        return f"{samples[0]:.0f}" if samples else "-"
    tenths = statistics.quantiles(samples, n=10)
    return f"{statistics.median(samples):.0f} ({tenths[0]:.0f} to {tenths[-1]:.0f})"


def table(found: list[dict[str, Any]]) -> str:
    import torch

    import device_ipc

    def medians(side: str) -> dict[str, float]:
        return {row["row"]: statistics.median(row["samples"]) for row in found if row["side"] == side and "samples" in row}

    stock, bare = medians("stock"), medians("by hand")
    lines = [
        f"device_ipc {device_ipc.__version__}, torch {torch.__version__}, {torch.cuda.get_device_name(0)}; "
        f"`python {' '.join(sys.argv)}`; microseconds, median (p10 to p90)",
        "",
        "| hand-over | side | time | goal | reached | times as fast as stock | times as long as by hand | of which, medians |",
        "|---|---|---|---|---|---|---|---|",
    ]
    order = list(dict.fromkeys(row["row"] for row in found if "samples" in row))
    for row in sorted((row for row in found if "samples" in row), key=lambda row: order.index(row["row"])):
        median = statistics.median(row["samples"]) if row["samples"] else 0
        against = stock.get(row["row"])
        ratio = f"{against / median:.1f}" if against and median and row["side"] != "stock" else ""
        by_hand = bare.get(row["row"])
        longer = f"{median / by_hand:.1f}" if by_hand and row["side"] != "by hand" else ""
        parts = ", ".join(f"{name} {value:.0f}" for name, value in row["details"].items())
        goal = GOALS.get((row["row"], row["side"]))
        if isinstance(goal, float):
            goal = round(goal * against) if against else None
        reached = "" if goal is None or not median else "yes" if median <= goal else "NO"
        shown = "" if goal is None else str(goal)
        cells = [row["row"], row["side"], cell(row["samples"]), shown, reached, ratio, longer, parts]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [""] + [f"{row['side']}, {row['row']}: {row['skipped']}" for row in found if "skipped" in row]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--side", action="append", choices=SIDES, help="only this side; can be repeated")
    parser.add_argument("--rust", default="device-ipc-bench", help="the program of the Rust benchmarks")
    parser.add_argument("--output", help="a file for the table, in Markdown")
    parser.add_argument("--run", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rounds = 100 if arguments.quick else 500
    if arguments.run == "floor":
        by_bytes(rounds)
        return
    if arguments.run == "by hand":
        state_dicts_by_hand(rounds)
        return
    if arguments.run == "ours":
        by_text(rounds)
        return
    if arguments.run:
        by_queue(arguments.run, rounds, 1 if arguments.quick else TURNS)
        return
    found: list[dict[str, Any]] = []
    for side in order_of(arguments.side or SIDES, arguments.quick):
        for row in rows_of(side, arguments.quick):
            print(row["side"], row["row"], cell(row["samples"]) if "samples" in row else row["skipped"], file=sys.stderr)
            add(row, found)
    found += by_rust(arguments.rust)
    text = table(found)
    print(text)
    if arguments.output:
        with open(arguments.output, "w") as file:
            file.write(text + "\n")


if __name__ == "__main__":
    main()
