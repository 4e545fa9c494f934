"""Opens memory by a raw CUDA handle and adds 1 to each number in place, with stock PyTorch and without device-ipc.

    python3 from_handle.py HANDLE OFFSET BYTES

The handle has 128 hexadecimal digits, as printed by examples/cuda_raw_handle.rs; the memory contains float32.
"""

import sys

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor


def open_handle(handle, offset, count, device=0):
    """Returns a tensor of `count` float32 at `offset` bytes in the allocation of the handle.

    PyTorch interprets 64 bytes as a raw `cudaIpcMemHandle_t`; its own handles have a prefix of two bytes. It counts
    references in a file of the exporter; there is none here, and PyTorch ignores a missing file. There is no event to
    wait for, because the exporter has synchronized its stream.
    """
    assert len(handle) == 64, f"invalid handle: expected 64 B, found {len(handle)} B"
    return rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=torch.Size([count]),
        tensor_stride=(1,),
        tensor_offset=0,
        storage_cls=torch.storage.TypedStorage,
        dtype=torch.float32,
        storage_device=device,
        storage_handle=handle,
        storage_size_bytes=count * 4,
        storage_offset_bytes=offset,
        requires_grad=False,
        ref_counter_handle=b"/device-ipc-has-none",
        ref_counter_offset=0,
        event_handle=bytes(64),
        event_sync_required=False,
    )


def main():
    handle, offset, length = sys.argv[1:]
    tensor = open_handle(bytes.fromhex(handle), int(offset), int(length) // 4)
    print("borrowed:", tensor.tolist())
    tensor += 1
    torch.cuda.synchronize()
    del tensor  # closes the handle
    print("done", flush=True)


if __name__ == "__main__":
    main()
