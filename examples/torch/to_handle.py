"""Prints the raw CUDA handle of a tensor, with stock PyTorch and without device-ipc.

    python3 to_handle.py

Prints HANDLE OFFSET BYTES for `cuda_raw_handle borrow`, waits for the Enter key, and prints the numbers again.
"""

import sys

import torch


def raw_handle(blob):
    """Returns the 64 bytes of cudaIpcMemHandle_t in a handle of PyTorch.

    Since 2.5 it has a prefix of two bytes: a version, and a letter for the kind of memory.
    """
    if len(blob) == 64:
        return blob
    if len(blob) == 66 and blob[1:2] == b"c":
        return blob[2:]
    sys.exit(
        "the memory of this tensor has no raw handle, because it is in an expandable segment; "
        "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"
    )


def main():
    tensor = torch.arange(20, dtype=torch.float32, device="cuda:0")
    storage = tensor.untyped_storage()
    # Device, handle, size, offset of the storage in the allocation, reference counter and its slot, event and whether
    # the importer must wait for it.
    _, blob, _, offset, counter, slot, _, _ = storage._share_cuda_()
    offset += tensor.storage_offset() * tensor.element_size()
    torch.cuda.synchronize()
    print(raw_handle(blob).hex(), offset, tensor.numel() * tensor.element_size(), flush=True)
    if not sys.stdin.readline():
        sys.exit("the standard input was closed before the borrower finished")
    # PyTorch counts the handle as opened, and would keep the memory until the count is released.
    torch.UntypedStorage._release_ipc_counter_cuda(counter, slot)
    print("after the borrower:", tensor.tolist(), flush=True)


if __name__ == "__main__":
    main()
