"""Gives out the bare CUDA handle of a tensor: stock PyTorch, nothing of device-ipc.

    python3 to_handle.py

Prints HANDLE OFFSET BYTES for `cuda_raw_handle borrow`, waits for the Enter key, and prints what has become of the numbers.
"""

import sys

import torch


def bare_handle(blob):
    """The 64 bytes of cudaIpcMemHandle_t in what PyTorch calls a handle.

    Since 2.5 two bytes stand in front: a version, and a letter for the kind of memory.
    """
    if len(blob) == 64:
        return blob
    if len(blob) == 66 and blob[1:2] == b"c":
        return blob[2:]
    sys.exit(
        "this tensor's memory has no bare handle: it is of an expandable segment; "
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
    )


def main():
    tensor = torch.arange(20, dtype=torch.float32, device="cuda:0")
    storage = tensor.untyped_storage()
    # Device, handle, size, offset of the storage in the allocation, reference counter and its slot, event and whether
    # that has to be waited for.
    _, blob, _, offset, counter, slot, _, _ = storage._share_cuda_()
    offset += tensor.storage_offset() * tensor.element_size()
    torch.cuda.synchronize()
    print(bare_handle(blob).hex(), offset, tensor.numel() * tensor.element_size(), flush=True)
    if not sys.stdin.readline():
        sys.exit("the input ended before the borrower had finished")
    # PyTorch counts the handle as one that somebody opened, and would keep the memory until it is told otherwise.
    torch.UntypedStorage._release_ipc_counter_cuda(counter, slot)
    print("after the borrower:", tensor.tolist(), flush=True)


if __name__ == "__main__":
    main()
