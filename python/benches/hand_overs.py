"""Hand-overs between two processes: time, resident memory and file descriptors, which must not grow.

    python benches/hand_overs.py [NUMBER]

Each hand-over shares memory, sends the descriptor over a pipe, and opens, reads and releases the memory in the other process.
"""

import multiprocessing
import os
import sys
import time
from multiprocessing.connection import Connection

import numpy as np

import device_ipc


def usage() -> tuple[int, int, int]:
    """Returns resident memory in KiB, the number of file descriptors, and the number of threads."""
    with open("/proc/self/status") as status:
        fields = dict(line.split(":", 1) for line in status)
    return int(fields["VmRSS"].split()[0]), len(os.listdir("/proc/self/fd")), int(fields["Threads"])


def importer(pipe: Connection) -> None:
    while (text := pipe.recv()) is not None:
        if text == "usage":
            pipe.send(usage())
            continue
        with device_ipc.open(text) as mapping:
            pipe.send(int(np.from_dlpack(mapping)[0]))
    pipe.send(None)


def main() -> None:
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=importer, args=(there,), daemon=True)
    process.start()
    tensor = device_ipc.empty((1024,), "int64", "mock:0")
    array = np.from_dlpack(tensor)
    print(f"{'hand-overs':>10}  {'exporter':>24}  {'importer':>24}  KiB, descriptors, threads")
    begun = time.monotonic()
    for done in range(number + 1):
        if done % max(1, number // 10) == 0 or done == 1000:
            here.send("usage")
            print(f"{done:>10}  {str(usage()):>24}  {str(here.recv()):>24}", flush=True)
        array[0] = done
        with device_ipc.share(tensor) as export:
            here.send(str(export))
            assert here.recv() == done
    each = (time.monotonic() - begun) / number
    here.send(None)
    here.recv()
    process.join(30)
    print(f"{each * 1e6:.1f} us each")
    print(device_ipc.counters())


if __name__ == "__main__":
    main()
