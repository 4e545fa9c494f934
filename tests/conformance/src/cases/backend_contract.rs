//! The contract of the trait [`DeviceIpc`](device_ipc_core::backend::DeviceIpc), on the bare backend.

use std::collections::HashSet;

use device_ipc_core::backend::{Extent, HandleBytes, HandleKind, ReceivedHandle};
use device_ipc_core::{Access, AsStream, DeviceOrdinal, DevicePtr, DeviceRange, ProcessIdentity};

use crate::bare::BareExport;
use crate::check::{equal, refused, refused_as_one_of, same, that};
use crate::unchecked::Bare;
use crate::{Context, Outcome, fail, skip};

const FIRST: DeviceOrdinal = DeviceOrdinal::new(0);

/// A backend has a name that fits a descriptor, reports its version, and names the variable that hides devices.
pub fn says_who_it_is(context: &Context) -> Outcome {
    let info = context.backend().info();
    let good = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    let name = info.name;
    that((1..=32).contains(&name.len()) && name.bytes().all(good), format!("{name:?} is no name for a descriptor"))?;
    that(!info.version.is_empty(), "the version should be told in words")?;
    that(!context.backend().visible_devices_variable().is_empty(), "the variable that hides devices should have a name")
}

/// Devices stand in the order of their ordinals, and no two are the same one.
pub fn devices_are_in_order_and_distinct(context: &Context) -> Outcome {
    let devices = context.devices()?;
    for (position, device) in devices.iter().enumerate() {
        equal(device.ordinal.index(), position, "the ordinal of a device, which is its position")?;
        that(!device.name.is_empty(), format!("device {position} should have a name"))?;
        that(device.memory_bytes > 0, format!("device {position} should have memory"))?;
    }
    let distinct: HashSet<_> = devices.iter().map(|device| device.identity).collect();
    equal(distinct.len(), devices.len(), "the number of identities, one for each device")?;
    equal(context.devices()?, devices, "the devices when asked a second time")
}

/// Another process sees the same devices as the same ones.
pub fn identities_are_the_same_for_all_processes(context: &Context) -> Outcome {
    let here: Vec<_> = context.devices()?.into_iter().map(|device| device.identity).collect();
    equal(context.agent()?.devices()?, here, "the identities that another process sees")
}

/// Every device can access itself; every pair is answered; an ordinal out of range is refused.
pub fn peer_access_is_answered_for_all_pairs(context: &Context) -> Outcome {
    let backend = context.backend();
    let devices = context.devices()?;
    for from in &devices {
        for to in &devices {
            let access = backend.peer_access(from.ordinal, to.ordinal)?;
            that(access || from.ordinal != to.ordinal, format!("device {} should access itself", from.ordinal))?;
        }
    }
    let beyond = DeviceOrdinal::new(devices.len() as u32);
    let phrase = format!("device {beyond} not found");
    refused(backend.peer_access(beyond, FIRST), "access from no device", "NoSuchDevice", &[&phrase])?;
    refused(backend.peer_access(FIRST, beyond), "access to no device", "NoSuchDevice", &[&phrase])
}

/// Every call that takes an ordinal refuses one out of range.
pub fn ordinals_beyond_the_end_are_refused(context: &Context) -> Outcome {
    let backend = context.backend();
    let kind = "NoSuchDevice";
    let memory = Bare::allocate(&**backend, FIRST, 64)?;
    let kinds = backend.handle_kinds();
    let Some(own) = kinds.first() else { return fail("a backend should have a kind of handle") };
    for beyond in [context.devices()?.len() as u32, u32::MAX].map(DeviceOrdinal::new) {
        refused(backend.capabilities(beyond), "the capabilities of no device", kind, &[])?;
        refused(backend.synchronize_device(beyond), "waiting for no device", kind, &[])?;
        refused(backend.memory().allocate(beyond, 64), "memory of no device", kind, &[])?;
        refused(backend.memory().create_stream(beyond), "a stream of no device", kind, &[])?;
        refused(backend.memory().memory_info(beyond), "the memory of no device", kind, &[])?;
        let elsewhere = DeviceRange { device: beyond, ..memory.range };
        refused(backend.extents_of(elsewhere, None), "extents_of for a range of no device", kind, &[])?;
        let handle = received(own.kind, vec![1; 64], 4096);
        refused(backend.open(vec![handle], beyond, Access::ReadWrite), "opening for no device", kind, &[])?;
        refused(backend.create_event(beyond), "an event of no device", kind, &[])?;
        refused(backend.open_event(&[1; 64], beyond), "opening an event for no device", kind, &[])?;
    }
    Ok(())
}

/// There is a kind of handle, and the kinds have numbers and names of their own.
pub fn handle_kinds_are_distinct(context: &Context) -> Outcome {
    let kinds = context.backend().handle_kinds();
    that(!kinds.is_empty(), "a backend should have a kind of handle")?;
    let numbers: HashSet<_> = kinds.iter().map(|kind| kind.kind).collect();
    let names: HashSet<_> = kinds.iter().map(|kind| kind.name).collect();
    equal((numbers.len(), names.len()), (kinds.len(), kinds.len()), "the number of numbers and names of the kinds")
}

/// Capabilities do not change between two questions.
pub fn capabilities_are_constant(context: &Context) -> Outcome {
    for device in context.devices()? {
        let first = context.backend().capabilities(device.ordinal)?;
        equal(context.backend().capabilities(device.ordinal)?, first, "the capabilities when asked a second time")?;
    }
    Ok(())
}

/// A backend reports the allocation of any address in it, and checks what the caller states.
pub fn extents_are_whole_allocations(context: &Context) -> Outcome {
    let backend = &**context.backend();
    let memory = Bare::allocate(backend, FIRST, 3 << 20)?;
    let whole = backend.extents_of(memory.range, None)?;
    let Some(first) = whole.first() else { return fail("an allocation has no extents") };
    that(first.allocation.ptr <= memory.range.ptr, "an allocation should begin at or before the memory in it")?;
    let generations = backend.capabilities(FIRST)?.generations;
    for extent in &whole {
        equal(extent.generation.is_some(), generations, "whether an allocation has a number, as the capability says")?;
    }
    let Some(inner) = memory.range.slice((2 << 20) + 77, 13) else { return fail("the slice lies inside") };
    let inner_extents = backend.extents_of(inner, None)?;
    for extent in &inner_extents {
        that(whole.contains(extent), format!("the extent of an inner address is another one: {extent:?}"))?;
    }
    let covers = inner_extents.first().is_some_and(|extent| extent.allocation.contains(&inner));
    that(covers, "the extent of an inner address should contain it")?;
    if let [_, second, ..] = context.devices()?.as_slice() {
        let elsewhere = DeviceRange { device: second.ordinal, ..inner };
        let what = "extents_of for memory of device 0 in a range of device 1 (compare range.device with the memory's device)";
        refused(backend.extents_of(elsewhere, None), what, "InvalidRegion", &[])?;
    }
    let stated = backend.extents_of(inner, Some(memory.range))?;
    equal(stated, inner_extents, "the extents where the base is stated rightly")
}

/// The allocation that the caller states is compared with the one that the backend knows: the same begin, and no more
/// bytes. Fewer are right, as an allocation is rounded up without its owner's knowledge.
pub fn stated_allocation_is_checked(context: &Context) -> Outcome {
    let backend = &**context.backend();
    let memory = Bare::allocate(backend, FIRST, 3 << 20)?;
    let Some(inner) = memory.range.slice((2 << 20) + 77, 13) else { return fail("the slice lies inside") };
    let extents = backend.extents_of(inner, None)?;
    let [Extent { allocation, .. }] = extents.as_slice() else { return fail("an inner range has one extent") };
    let shorter = DeviceRange { len: inner.end().map_or(0, |end| end.get() - allocation.ptr.get()), ..*allocation };
    for right in [*allocation, shorter] {
        equal(backend.extents_of(inner, Some(right))?, extents.clone(), format!("the extents where {right:?} is stated"))?;
    }
    let moved = |by: u64| DeviceRange { ptr: DevicePtr::new(allocation.ptr.get() + by), len: allocation.len - by, ..*allocation };
    let longer = DeviceRange { len: allocation.len + 1, ..*allocation };
    for wrong in [moved(4096), moved(1), longer] {
        let what = format!(
            "extents_of with a stated allocation of {} bytes at {}, which has {} bytes at {} (compare stated_base with the \
             vendor's answer)",
            wrong.len, wrong.ptr, allocation.len, allocation.ptr
        );
        refused(backend.extents_of(inner, Some(wrong)), &what, "InvalidRegion", &[])?;
    }
    Ok(())
}

/// The extents of a range cover it to its end, one behind the other; a range that leaves its allocation into nothing is
/// refused.
pub fn extents_cover_the_range(context: &Context) -> Outcome {
    let backend = &**context.backend();
    let memory = Bare::allocate(backend, FIRST, 1 << 20)?;
    let whole = backend.extents_of(memory.range, None)?;
    let Some(Extent { allocation, .. }) = whole.first() else { return fail("an allocation has no extents") };
    for beyond in [1, 4096, 2 << 20, 1 << 40] {
        let range = DeviceRange { len: allocation.len + beyond, ..*allocation };
        let extents = match backend.extents_of(range, None) {
            Ok(extents) => extents,
            Err(error) => {
                let what = format!("extents_of for a range that leaves its allocation by {beyond} bytes");
                // Memory without a handle may follow.
                let kinds = ["InvalidRegion", "NotDeviceMemory", "NotShareable", "SharedOn"];
                refused_as_one_of(Err::<(), _>(error), &what, &kinds, &[])?;
                continue;
            }
        };
        // The vendor may have put another allocation there.
        let mut reached = Some(allocation.ptr);
        for extent in &extents {
            let fits = Some(extent.allocation.ptr) == reached;
            that(fits, format!("the extents of a range should lie one behind the other: {extents:?}"))?;
            reached = extent.allocation.end();
        }
        that(
            reached >= range.end(),
            format!(
                "extents_of named extents of {} bytes for a range of {} bytes: it has to refuse a range that leaves its \
                 allocation with InvalidRegion, or to name the neighbours up to the end of the range",
                extents.iter().map(|extent| extent.allocation.len).sum::<u64>(),
                range.len
            ),
        )?;
    }
    Ok(())
}

/// Memory other than device memory has no extents.
pub fn extents_of_no_memory(context: &Context) -> Outcome {
    let backend = context.backend();
    let _awake = Bare::allocate(&**backend, FIRST, 64)?;
    let host = [0_u8; 64];
    for (what, address) in [("memory of the host", host.as_ptr() as u64), ("an address of nothing", 0x10)] {
        let range = DeviceRange::new(FIRST, DevicePtr::new(address), 64);
        refused(backend.extents_of(range, None), what, "NotDeviceMemory", &["not device memory"])?;
    }
    Ok(())
}

/// Where the vendor numbers its allocations, two at one address differ in it.
pub fn generations_are_never_given_twice(context: &Context) -> Outcome {
    let backend = &**context.backend();
    if !backend.capabilities(FIRST)?.generations {
        return skip("the vendor does not number its allocations");
    }
    let mut seen = HashSet::new();
    for round in 0..8 {
        let memory = Bare::allocate(backend, FIRST, 1 << 16)?;
        for extent in backend.extents_of(memory.range, None)? {
            that(seen.insert(extent.generation), format!("the number of round {round} was given before"))?;
        }
    }
    Ok(())
}

/// A handle is made of an allocation, says what it is, and goes back.
pub fn export_and_unexport(context: &Context) -> Outcome {
    let backend = &**context.backend();
    let memory = Bare::allocate(backend, FIRST, 1 << 16)?;
    let extents = backend.extents_of(memory.range, None)?;
    let Some(extent) = extents.first() else { return fail("an allocation has no extents") };
    let kinds = backend.handle_kinds();
    for kind in std::iter::once(None).chain(kinds.iter().map(|kind| Some(kind.kind))) {
        let exported = match (backend.export(extent, kind), kind) {
            (Ok(exported), _) => exported,
            (error, Some(_)) => {
                let what = "a kind that does not fit the memory";
                refused_as_one_of(error, what, &["NotShareable", "Unsupported"], &[])?;
                continue;
            }
            (error, None) => return error.map(drop).map_err(Into::into),
        };
        let guard = BareExport::new(backend, exported);
        let exported = guard.handle();
        equal(&exported.extent, extent, "the extent of the handle")?;
        that(kind.is_none_or(|kind| kind == exported.kind), format!("{kind:?} was asked for: {:?}", exported.kind))?;
        let Some(info) = kinds.iter().find(|known| known.kind == exported.kind) else {
            return fail(format!("{:?} is not among the kinds of the backend", exported.kind));
        };
        equal(!exported.fds.is_empty(), info.carries_fds, "whether a handle of this kind comes with descriptors")?;
        guard.withdraw()?;
    }
    refused_as_one_of(
        backend.export(extent, Some(HandleKind(u16::MAX))),
        "a kind of handle that there is not",
        &["NotShareable", "Unsupported"],
        &[],
    )
}

/// Bytes that are no handle are an error, whatever they are; they come from another process.
pub fn garbage_is_no_handle(context: &Context) -> Outcome {
    let backend = &**context.backend();
    let _awake = backend.memory().create_stream(FIRST)?;
    for kind in backend.handle_kinds() {
        for len in [0, 1, 16, 64, 65, 4096] {
            for byte in [0, 0xa5, 0xff] {
                let handle = received(kind.kind, vec![byte; len], 4096);
                let what = format!("{len} bytes {byte:#x} as a handle of kind {}", kind.name);
                match backend.open(vec![handle], FIRST, Access::ReadWrite) {
                    Ok(_) => return fail(format!("{what} were opened")),
                    Err(error) => that(!error.to_string().is_empty(), format!("{what}: an error without words"))?,
                }
            }
        }
    }
    Ok(())
}

/// A kind of handle that the backend does not know, and no handle at all, are refused.
pub fn foreign_handles_are_refused(context: &Context) -> Outcome {
    let backend = &**context.backend();
    let foreign = received(HandleKind(u16::MAX), vec![1; 64], 4096);
    let phrases = [backend.info().name];
    let opened = backend.open(vec![foreign], FIRST, Access::ReadWrite);
    refused(opened, "a handle of a foreign kind", "Unsupported", &phrases)?;
    let nothing = backend.open(Vec::new(), FIRST, Access::ReadWrite);
    that(nothing.is_err(), "opening no handles should be an error")
}

/// Every call works on any thread, also on one that has never called the driver, and on several at once.
pub fn any_thread_may_call(context: &Context) -> Outcome {
    let backend = &**context.backend();
    let devices = context.devices()?;
    let work = |device: DeviceOrdinal, byte: u8| -> Outcome {
        let memory = Bare::allocate(backend, device, 1 << 16)?;
        let stream = context.ipc().create_stream(device)?;
        memory.fill(memory.range, byte, &stream)?;
        same(&memory.read(memory.range, &stream)?, &[byte; 1 << 16], format!("the bytes of thread {byte}"))?;
        let extents = backend.extents_of(memory.range, None)?;
        let Some(extent) = extents.first() else { return fail("an allocation has no extents") };
        backend.unexport(backend.export(extent, None)?)?;
        Ok(backend.memory().synchronize(stream.as_stream())?)
    };
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8_u8)
            .map(|index| {
                let device = devices[usize::from(index) % devices.len()].ordinal;
                let work = &work;
                scope.spawn(move || work(device, index + 1))
            })
            .collect();
        for thread in threads {
            match thread.join() {
                Ok(outcome) => outcome?,
                Err(_) => return fail("a thread panicked"),
            }
        }
        Ok(())
    })
}

/// What is to run in a device's context runs once, on the calling thread, also for a device that there is not; the backend's
/// calls within it reach the device that each names.
pub fn device_context_runs_the_body_once_here(context: &Context) -> Outcome {
    let backend = &**context.backend();
    let last = context.devices()?.len() as u32 - 1;
    for device in [0, last, last + 1].map(DeviceOrdinal::new) {
        let (mut threads, mut made) = (Vec::new(), Ok(()));
        backend.with_device_context(device, &mut || {
            threads.push(std::thread::current().id());
            // The drop of an owner may share, and may end exports of another owner.
            backend.with_device_context(FIRST, &mut || {
                made = Bare::allocate(backend, FIRST, 64)
                    .and_then(|memory| backend.extents_of(memory.range, None))
                    .map(drop);
            });
        });
        equal(threads, vec![std::thread::current().id()], "the threads on which the body ran")?;
        made?;
    }
    Ok(())
}

/// Asking for devices and their access starts no thread.
pub fn listing_devices_starts_no_thread(context: &Context) -> Outcome {
    let threads = || Ok::<_, std::io::Error>(std::fs::read_dir("/proc/self/task")?.count());
    let before = threads()?;
    for device in context.devices()? {
        context.backend().peer_access(FIRST, device.ordinal)?;
    }
    drop(context.ipc());
    equal(threads()?, before, "the number of threads after listing the devices")
}

fn received(kind: HandleKind, bytes: Vec<u8>, size: u64) -> ReceivedHandle {
    ReceivedHandle {
        kind,
        bytes: HandleBytes::new(bytes),
        fds: Vec::new(),
        size,
        generation: None,
        home: Some(FIRST),
        home_identity: None,
        exporter: ProcessIdentity::current().expect("this process has an identity"),
    }
}
