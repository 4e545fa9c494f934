//! The texts of remedies for users of Python.

use device_ipc::backend::Remedy;
use pyo3::prelude::*;

/// Sets the texts of the library's remedies.
pub(crate) fn install() {
    Remedy::set_texts(in_python);
}

/// Returns each remedy's name with its text, for the tests; not those of backends.
#[pyfunction]
pub(crate) fn _remedies() -> Vec<(String, &'static str)> {
    Remedy::ALL.iter().map(|remedy| (format!("{remedy:?}"), in_python(*remedy))).collect()
}

const fn in_python(remedy: Remedy) -> &'static str {
    match remedy {
        Remedy::EnableBackend => "check the spelling, and list the backends with device_ipc.available()",
        Remedy::EnableAnyBackend => "this build of the package has none; install another build",
        Remedy::AllowSimulated => "before the first use of device_ipc, to select the simulator",
        Remedy::UseItsBackend => {
            "use tensors, streams and devices of one backend, and unset DEVICE_IPC_BACKEND if it names another one"
        }
        Remedy::ForwardDescriptor => "forward the descriptor it was opened with (Mapping.descriptor)",
        Remedy::OpenOnVisibleDevice => {
            "open the memory on a visible device (the argument device), as a copy if there is no peer access (copy=\"staged-if-needed\")"
        }
        Remedy::OpenAtHomeOrStaged => {
            "open it on its home device (without the argument device), or copy it through the host (copy=\"staged-if-needed\")"
        }
        Remedy::InsertIntoDeviceMap => "add one to the dict of devices",
        Remedy::NameByIdentity => "name it by its identity (Descriptor.homes)",
        Remedy::ShareCopy => "share a copy (exposure=\"copy\")",
        Remedy::PermitAccess => {
            "give the argument access=\"rw\" to device_ipc.share, and the same to device_ipc.open"
        }
        Remedy::SpawnChild => {
            "start the child with multiprocessing.get_context(\"spawn\"), or with subprocess, instead"
        }
        Remedy::TakePublishedSlots => "take published slots only (RingReader.next)",
        Remedy::ReleaseOldestSlot => "release the oldest first (RingReadSlot.release)",
        Remedy::JoinRing => "open the ring again (device_ipc.join)",
        Remedy::RequestTimeline => "importers open the export and request theirs",
        Remedy::OpenMemory => "open it by device_ipc.open",
        Remedy::OpenRing => "open it by device_ipc.join",
        Remedy::WaitWritable => "wait with Ring.write",
        Remedy::CopyOverNetwork => "copy it over the network (copy=\"pulled-if-needed\")",
        Remedy::ListenForRemote => {
            "the exporting process has to call device_ipc.enable_remote before it shares"
        }
        Remedy::SetTransferEngine => "install NIXL",
        Remedy::UseOneEngine => "use the same transfer engine in both processes",
        Remedy::UseSharedAddress => "use the tensor that was shared, or take a copy (copy=\"staged\")",
        Remedy::OpenRingInPlace => "open the ring without copy=\"pulled\"",
        Remedy::AllowUser => "allow that user there with the argument allow_users",
        Remedy::UseOneKey => "use the same key in device_ipc.listen and device_ipc.connect",
        Remedy::ConnectOnThread => "call device_ipc.connect on another thread",
        Remedy::StateDtype => "share a tensor with an element type",
        Remedy::StateShape => "share a tensor with a shape",
        Remedy::AllowUserHere => "allow that user with the argument allow_users",
        Remedy::AllocateRemappable => {
            "have the exporter allocate it with device_ipc.empty and read_only=True, or in device_ipc.torch.pool"
        }
        Remedy::ReserveElsewhere => {
            "agree on another address in all processes, far from those that drivers choose, such as 16 TiB (1 << 44)"
        }
        Remedy::AllocateReadOnly => "device_ipc.empty with read_only=True",
        Remedy::OpenStaged => "take a copy (copy=\"staged-if-needed\")",
        Remedy::AllocateAs => "allocate it with device_ipc.empty",
        Remedy::StateAllocation => "update the vendor's library",
        Remedy::TakeByName => "take one by its name (mapping[name]), or all by Mapping.items",
        Remedy::TakeBytes => "take Mapping.regions, or have the exporter share a tensor with an element type",
        Remedy::TakeUnnamed => "take it by Mapping.tensor",
        Remedy::ShareCopyOfMemory => "share a copy in memory of device_ipc.empty or device_ipc.torch.pool()",
        Remedy::OfBackend(remedy) => remedy.python,
    }
}
