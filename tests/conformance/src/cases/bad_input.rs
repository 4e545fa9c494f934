//! Invalid regions, layouts and accesses. Each is refused, before a call of the driver if possible, and the error states the
//! reason.

use std::sync::Arc;

use device_ipc_core::{Access, Buffer, DeviceOrdinal, DeviceOwner, DevicePtr, DeviceRange, Dtype, Region};

use crate::agent::{Command, Opening, Place};
use crate::check::{equal, refused, refused_as_one_of, same, that};
use crate::flows::{Memory, OLD, nobody_holds, pattern};
use crate::{Context, Outcome, Stop, fail, unchecked};

fn share_bare(context: &Context, range: DeviceRange) -> Result<(), device_ipc_core::Error> {
    let region = Region::new(context.backend().info().name, range);
    Ok(context.ipc().share(unchecked::not_owned(region)).start().map(drop)?)
}

/// A region has at least one byte, unless its owner states a tensor without elements.
pub fn zero_bytes(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let empty = DeviceRange { len: 0, ..memory.buffer.range() };
    refused(share_bare(context, empty), "sharing no bytes", "InvalidRegion", &["no bytes"])?;
    refused(memory.ipc.share(memory.ipc.allocate(0, 0)?).start(), "a buffer of no bytes", "InvalidRegion", &["no bytes"])?;
    let beyond = context.devices()?.len() as u32;
    refused(memory.ipc.allocate(beyond, 0), "a buffer of no bytes on no device", "NoSuchDevice", &[])
}

/// The null address is not memory.
pub fn null(context: &Context) -> Outcome {
    let range = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::NULL, 64);
    refused(share_bare(context, range), "sharing the null address", "NotDeviceMemory", &["null"])
}

/// Host memory is not device memory: the most frequent mistake of callers that use both kinds of pointer.
pub fn host_memory(context: &Context) -> Outcome {
    // The driver is awake, as in a program that uses the device.
    let _memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let host = vec![1_u8; 1 << 16];
    let range = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(host.as_ptr() as u64), host.len() as u64);
    refused(share_bare(context, range), "sharing memory of the host", "NotDeviceMemory", &["not device memory"])?;
    let wild = DeviceRange::new(DeviceOrdinal::new(0), DevicePtr::new(0x10), 64);
    refused(share_bare(context, wild), "sharing an address of nothing", "NotDeviceMemory", &["not device memory"])
}

/// A region that leaves its allocation, or the address space, is refused.
pub fn outside_the_allocation(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let whole = memory.buffer.range();
    let extents = context.backend().extents_of(whole, None)?;
    let Some(end) = extents.last().and_then(|extent| extent.allocation.end()) else {
        return fail("an allocation has no extents");
    };
    let Some(room) = end.offset_from(whole.ptr) else { return fail("an allocation ends before it begins") };
    let kinds = ["InvalidRegion", "NotDeviceMemory"];
    let longer = DeviceRange { len: room + (1 << 40), ..whole };
    refused_as_one_of(share_bare(context, longer), "sharing far beyond the end", &kinds, &[])?;
    let wraps = DeviceRange { len: u64::MAX, ..whole };
    refused_as_one_of(share_bare(context, wraps), "sharing the whole address space", &kinds, &[])?;
    refused(memory.buffer.slice(4000, 97), "a slice beyond the buffer", "InvalidRegion", &["97 B at offset 4000"])?;
    refused(memory.buffer.slice(u64::MAX, 2), "a slice that wraps around", "InvalidRegion", &[])
}

/// An address behind the last allocation is not resolved to that allocation.
pub fn address_past_the_allocation(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(4096))?;
    let extents = context.backend().extents_of(memory.buffer.range(), None)?;
    let end = extents.last().and_then(|extent| extent.allocation.end());
    let Some(far) = end.and_then(|end| end.checked_add(1 << 44)) else { return fail("an allocation has no end") };
    let past = DeviceRange { ptr: far, len: 64, ..memory.buffer.range() };
    let kinds = ["InvalidRegion", "NotDeviceMemory"];
    refused_as_one_of(share_bare(context, past), "sharing an address far past the allocation", &kinds, &[])
}

/// Memory and streams of another backend are refused by name.
pub fn memory_of_another_backend(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let region = Region::new("another-backend", memory.buffer.range());
    let shared = memory.ipc.share(unchecked::not_owned(region)).start();
    refused(shared, "sharing another backend's memory", "WrongBackend", &["another-backend", "Ipc::named"])?;
    let stream = unchecked::stream_of_another_backend();
    let shared = memory.ipc.share(Arc::clone(&memory.buffer)).ready_on(&stream).start();
    refused(shared, "sharing with another backend's stream", "WrongBackend", &["another-backend"])
}

/// A share that fails gives the owner back: the memory is the caller's as before.
pub fn failed_share_gives_the_owner_back(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(80))?;
    let lone: Buffer = memory.ipc.allocate(0, 80)?;
    let range = lone.range();
    let shared = memory.ipc.share(lone).dtype(Dtype::F32).shape([4, 6]).start();
    let Err(failed) = shared else { return fail("a tensor of 96 bytes was shared in a region of 80") };
    equal(
        failed.to_string(),
        "the tensor needs 96 bytes, but its region has 80 bytes".to_owned(),
        "what a share of too large a tensor says",
    )?;
    let lone: Buffer = failed.into_inner();
    equal(lone.range(), range, "the range of the owner that came back")?;
    let share = memory.ipc.share(lone).dtype(Dtype::F32).shape([4, 5]).start()?;
    that(share.descriptor().layout().is_some(), "the second share should have a layout")
}

/// A tensor begins at a multiple of its element size.
pub fn misaligned_tensor(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(256))?;
    let share = |offset, dtype| -> Result<_, Stop> {
        Ok(memory.ipc.share(memory.buffer.slice(offset, 64)?).dtype(dtype).shape([4]).start())
    };
    for (offset, dtype, multiple) in [(1, Dtype::F32, 4), (2, Dtype::F32, 4), (4, Dtype::F64, 8), (1, Dtype::BF16, 2)] {
        let phrases = [&*format!("a multiple of {multiple} bytes"), "address"];
        refused(share(offset, dtype)?, &format!("{dtype} at offset {offset}"), "Layout", &phrases)?;
    }
    for (offset, dtype) in [(1, Dtype::U8), (4, Dtype::F32), (8, Dtype::F64), (2, Dtype::BF16)] {
        let export = share(offset, dtype)??;
        equal(export.descriptor().layout().map(|layout| layout.dtype()), Some(dtype), "the element type")?;
    }
    Ok(())
}

/// Layouts that are none are refused.
pub fn senseless_layouts(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(80))?;
    let share = || memory.ipc.share(Arc::clone(&memory.buffer));
    refused(share().shape([4, 5]).start(), "a shape without a type", "Layout", &["ShareBuilder::dtype"])?;
    let strides = share().dtype(Dtype::F32).shape([4, 5]).strides([1]).start();
    refused(strides, "one stride for two dimensions", "Layout", &["1 strides", "2 dimensions"])?;
    let huge = share().dtype(Dtype::F32).shape([u64::MAX, 8]).start();
    refused(huge, "a size that does not fit 64 bits", "Layout", &["64 bits"])?;
    let many = share().dtype(Dtype::U8).shape(vec![1; 65]).start();
    refused(many, "too many dimensions", "Layout", &["64 dimensions"])?;
    let gaps = share().dtype(Dtype::F32).shape([4, 5]).strides([6, 1]).start();
    refused(gaps, "strides that reach behind the end", "Layout", &["needs 92 bytes"])?;
    let behind = share().dtype(Dtype::F32).element_offset(21).start();
    refused(behind, "an offset behind the end", "Layout", &["needs 84 bytes"])
}

/// An element type alone describes whole elements only: nothing is left out of the tensor silently.
pub fn element_type_of_a_part_of_an_element(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(80))?;
    let odd = || memory.buffer.slice(0, 78);
    let phrases = ["78 bytes", "float32 elements of 4 bytes", "ShareBuilder::shape"];
    refused(memory.ipc.share(odd()?).dtype(Dtype::F32).start(), "half an element", "Layout", &phrases)?;
    let stated = memory.ipc.share(odd()?).dtype(Dtype::F32).shape([19]).start()?;
    equal(stated.descriptor().layout().map(|layout| layout.elements()), Some(19), "the elements of a stated shape")?;
    let mut region = memory.buffer.region();
    region.range.len = 78;
    region.dtype = Some(Dtype::F32);
    let mut set = memory.ipc.tensors();
    let added = set.owned("odd", unchecked::owned(Arc::clone(&memory.buffer), region), None);
    let Err(failed) = added else { return fail("a named tensor of half an element was added") };
    refused(Err::<(), _>(failed.error()), "half an element of a named tensor", "Layout", &phrases)
}

/// A view of another element type than the tensor's is refused with both names.
pub fn view_of_another_type(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 20)?;
    let share = memory.ipc.share(Arc::clone(&memory.buffer)).dtype(Dtype::F32).shape([4, 5]).start()?;
    let mut receiver = context.agent()?;
    receiver.open("m", share.descriptor(), Place::Home)?;
    let view = receiver.request(&Command::Bytes { name: "m".into() })?;
    refused(view.result, "a view of bytes of a tensor of floats", "Layout", &["float32", "uint8"])?;
    same(&receiver.floats("m")?, &[OLD; 20], "the floats, by a view of the right type")
}

/// A view gives elements side by side; a tensor with gaps is refused, and says how to reach its bytes.
pub fn view_of_a_tensor_with_gaps(context: &Context) -> Outcome {
    let memory = Memory::with_floats(context, 20)?;
    let share = memory.ipc.share(Arc::clone(&memory.buffer)).dtype(Dtype::F32).shape([4, 4]).strides([5, 1]).start()?;
    let mut receiver = context.agent()?;
    receiver.open("m", share.descriptor(), Place::Home)?;
    let view = receiver.request(&Command::Floats { name: "m".into() })?;
    refused(view.result, "a view of a tensor with gaps", "Layout", &["not contiguous", "view_bytes", "to_host"])
}

/// A view of elements needs an address and a length that fit them.
pub fn view_of_misaligned_bytes(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let (odd, short) = (memory.share_part(1, 16)?, memory.share_part(0, 15)?);
    let mut receiver = context.agent()?;
    receiver.open("odd", odd.descriptor(), Place::Home)?;
    receiver.open("short", short.descriptor(), Place::Home)?;
    for name in ["odd", "short"] {
        let view = receiver.request(&Command::Floats { name: name.into() })?;
        refused(view.result, "floats at an odd place", "Layout", &["whole, aligned elements of 4 bytes"])?;
    }
    same(&receiver.bytes("odd")?, &pattern(64)[1..17], "the bytes at an odd place")
}

/// An export shared read-only is not opened for writing.
pub fn writing_what_is_shared_for_reading(context: &Context) -> Outcome {
    let kind = context.kind_that(|kind| kind.read_only, "no kind of handle can be mapped read-only")?;
    let memory = Memory::of_kind(context, kind.kind, &pattern(64))?;
    let share = memory.ipc.share(Arc::clone(&memory.buffer)).access(Access::ReadOnly).start()?;
    let mut receiver = context.agent()?;
    let opening = Opening::new(share.descriptor(), Place::Home).access(Access::ReadWrite);
    let phrases = ["read-write access denied", "read-only", "ShareBuilder::access"];
    refused(receiver.try_open("m", opening)?, "opening a read-only export to write", "AccessDenied", &phrases)?;
    // A descriptor that lies about it is the exporter's to refuse.
    let lying = crate::wire::altered(share.descriptor(), |bytes| bytes[crate::wire::ACCESS] = 2)?;
    equal(lying.access(), Access::ReadWrite, "the access that an altered descriptor claims")?;
    refused(receiver.try_open("m", Opening::new(&lying, Place::Home))?, "the same with a lie", "AccessDenied", &phrases)?;
    nobody_holds(&share, "refused opens")
}
