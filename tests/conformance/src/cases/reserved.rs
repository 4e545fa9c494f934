//! Mappings at addresses that they keep: suspended, resumed, and replaced by other exports. The case's own process opens the
//! memory; agents export it.

use std::collections::HashSet;
use std::sync::mpsc::channel;
use std::time::Duration;

use device_ipc_core::backend::{HandleKind, HandleKindInfo, Lifetime, ReservationGranularity};
use device_ipc_core::{
    Access, Descriptor, DevicePtr, DeviceRange, Dtype, Error, Mapping, Reservation, Stream, Tensor, TensorLayout, counters,
};

use crate::agent::{Agent, Answer, Command, Opening, Place, SharedTensor, Sharing, TensorSharing};
use crate::check::{Refusal, equal, refused, same, that};
use crate::flows::{Memory, OLD, SOON, bytes_of, float_bytes, memory_stays_free, pattern, until};
use crate::gate::Gate;
use crate::usage::Usage;
use crate::{Context, Outcome, Stop, skip, unchecked};

const LEN: usize = 100_003;

/// Runs a case for each usable kind whose memory can be mapped at any address; skips if there is none.
fn for_each_remappable(context: &Context, mut case: impl FnMut(&HandleKindInfo) -> Outcome) -> Outcome {
    let kinds: Vec<_> = context.usable_kinds()?.into_iter().filter(|kind| kind.remappable).collect();
    if kinds.is_empty() {
        return skip("no kind of handle can be mapped at addresses that the importer keeps");
    }
    kinds.iter().try_for_each(|kind| {
        case(kind).map_err(|stop| match stop {
            Stop::Failed(what) => Stop::Failed(format!("{} handles: {what}", kind.name)),
            skipped => skipped,
        })
    })
}

/// Exports bytes of which every kind's allocation holds more than they are.
fn version(exporter: &mut Agent, kind: HandleKind, name: &str, seed: usize) -> Result<(Descriptor, Vec<u8>), Stop> {
    let bytes = pattern(LEN + seed)[seed..].to_vec();
    Ok((exporter.export_as(kind, name, &bytes)?, bytes))
}

fn open(context: &Context, descriptor: &Descriptor) -> Result<(Mapping, Stream), Stop> {
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    Ok((ipc.open(descriptor).reserved().on(&stream)?, stream))
}

#[track_caller]
fn is_at(mapping: &Mapping, address: DevicePtr, when: &str) -> Outcome {
    equal(mapping.range().ptr, address, format!("the address {when}"))
}

#[track_caller]
fn is_released(exporter: &mut Agent, name: &str) -> Outcome {
    exporter.must(&Command::WaitReleased { name: name.into(), timeout: SOON }).map(drop)
}

/// A suspended mapping has no lease and no bytes, and keeps its address; it takes the same export or another one.
pub fn suspended_and_resumed(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    for_each_remappable(context, |kind| {
        let (first, old) = version(&mut exporter, kind.kind, "first", 0)?;
        let (second, new) = version(&mut exporter, kind.kind, "second", 1)?;
        let (mut mapping, stream) = open(context, &first)?;
        let address = mapping.range().ptr;
        that(!mapping.is_suspended(), "a mapping begins with its memory")?;
        same(&bytes_of(&mapping, &stream)?, &old, "the bytes of a reserved mapping")?;
        refused(mapping.resume(&second), "resuming what is not suspended", "Unsupported", &["not suspended"])?;

        mapping.suspend()?;
        mapping.suspend()?;
        that(mapping.is_suspended(), "it is suspended")?;
        is_released(&mut exporter, "first")?;
        is_at(&mapping, address, "of a suspended mapping")?;
        refused(mapping.view::<u8, _>(&stream).map(drop), "a view while suspended", "Suspended", &["resume it"])?;
        refused(mapping.check(), "a check while suspended", "Suspended", &[])?;
        refused(mapping.replace(&second), "a replacement while suspended", "Suspended", &[])?;

        mapping.resume(&first)?;
        is_at(&mapping, address, "after the same export was mapped")?;
        same(&bytes_of(&mapping, &stream)?, &old, "the bytes of the same export")?;

        mapping.suspend()?;
        // The exporter frees the memory meanwhile.
        exporter.must(&Command::Close { name: "first".into(), timeout: SOON, free_anyway: false })?;
        exporter.must(&Command::Free { name: "first".into() })?;
        refused(mapping.resume(&first), "resuming a dropped export", "ExportDropped", &[])?;
        that(mapping.is_suspended(), "it is suspended after an error")?;
        mapping.resume(&second)?;
        is_at(&mapping, address, "after another export was mapped")?;
        same(&bytes_of(&mapping, &stream)?, &new, "the bytes of the other export")?;
        equal(mapping.descriptor().export(), second.export(), "the export of the mapping")?;
        mapping.release(&stream)?;
        is_released(&mut exporter, "second")?;
        exporter.must(&Command::Drop { names: vec!["second".into()] }).map(drop)
    })
}

/// The memory is exchanged at the same address, and the old export is released when the call returns.
pub fn replaced_by_another_version(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    for_each_remappable(context, |kind| {
        let versions = [version(&mut exporter, kind.kind, "a", 0)?, version(&mut exporter, kind.kind, "b", 7)?];
        let (mut mapping, stream) = open(context, &versions[0].0)?;
        let address = mapping.range().ptr;
        for round in 1..6_usize {
            let (descriptor, bytes) = &versions[round % 2];
            match round % 3 {
                0 => mapping.replace_on(descriptor, &stream)?,
                1 => mapping.replace(descriptor)?,
                _ => mapping.replace(context.ipc().open(descriptor).timeout(SOON))?,
            }
            is_released(&mut exporter, if round % 2 == 0 { "b" } else { "a" })?;
            is_at(&mapping, address, "after a replacement")?;
            same(&bytes_of(&mapping, &stream)?, bytes, format!("the bytes after replacement {round}"))?;
        }
        // Writes reach the present version alone.
        mapping.view_mut::<u8, _>(&stream)?.fill_bytes(0xee)?;
        stream.synchronize()?;
        same(&exporter.bytes("b")?, &vec![0xee; LEN], "the exporter's bytes of the present version")?;
        same(&exporter.bytes("a")?, &versions[0].1, "the exporter's bytes of the version before")?;
        drop(mapping);
        is_released(&mut exporter, "b")?;
        exporter.must(&Command::Drop { names: vec!["a".into(), "b".into()] }).map(drop)
    })
}

/// This process has not opened the export.
#[track_caller]
fn is_not_held(exporter: &mut Agent, name: &str) -> Outcome {
    let holders = match exporter.must(&Command::Holders { name: name.into() })? {
        Answer::Text(text) => text,
        other => other.to_string(),
    };
    that(!holders.contains(&std::process::id().to_string()), format!("{name} was opened: {holders}"))
}

fn bundle(exporter: &mut Agent, kind: HandleKind, name: &str, seed: usize) -> Result<(Descriptor, Vec<Vec<u8>>), Stop> {
    let mut contents = Vec::new();
    for memory in 0..3 {
        let bytes = pattern(4096 + seed + memory)[seed + memory..].to_vec();
        let (of, len) = (format!("{name}{memory}"), bytes.len() as u64);
        exporter.must(&Command::Allocate { name: of, len, device: 0, kind: Some(kind.0), bytes: Some(bytes.clone()) })?;
        contents.push(bytes);
    }
    // Two tensors in the last memory.
    let places = [(0, 0, 4096), (1, 0, 4096), (2, 0, 1024), (2, 1024, 3072)];
    let tensors = places.iter().enumerate().map(|(index, (memory, offset, len))| SharedTensor {
        name: format!("t{index}"),
        memory: *memory,
        offset: *offset,
        dtype: "uint8".into(),
        shape: vec![*len],
    });
    let memories = (0..3).map(|memory| (format!("{name}{memory}"), None)).collect();
    let sharing = TensorSharing { memories, tensors: tensors.collect(), ..Default::default() };
    Ok((exporter.get(&Command::ShareTensors { name: name.into(), sharing })?, contents))
}

/// All tensors of several allocations are exchanged, and each keeps its address.
pub fn named_tensors_keep_their_addresses(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    for_each_remappable(context, |kind| {
        let (first, _) = bundle(&mut exporter, kind.kind, "a", 0)?;
        let (second, new) = bundle(&mut exporter, kind.kind, "b", 9)?;
        let (mut mapping, stream) = open(context, &first)?;
        let addresses = |mapping: &Mapping| mapping.tensors().map(|(_, tensor)| tensor.range().ptr).collect::<Vec<_>>();
        let before = addresses(&mapping);
        mapping.replace_on(&second, &stream)?;
        same(&addresses(&mapping), &before, "the addresses of the tensors")?;
        let last = mapping.get("t3")?.view::<u8, _>(&stream)?.to_vec()?;
        same(&last, &new[2][1024..], "the bytes of the last tensor")?;
        same(&mapping.get("t1")?.view::<u8, _>(&stream)?.to_vec()?, &new[1], "the bytes of another tensor")?;
        mapping.suspend()?;
        same(&addresses(&mapping), &before, "the addresses while suspended")?;
        refused(mapping.get("t0")?.view::<u8, _>(&stream).map(drop), "a view while suspended", "Suspended", &[])?;
        mapping.resume(&first)?;
        same(&addresses(&mapping), &before, "the addresses after a resume")?;
        drop(mapping);
        is_released(&mut exporter, "a")?;
        is_released(&mut exporter, "b")?;
        exporter.must(&Command::Drop { names: vec!["a".into(), "b".into()] }).map(drop)
    })
}

/// Work that was submitted before a replacement uses the old version, and work after it the new one.
pub fn replace_follows_the_stream(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    for_each_remappable(context, |kind| {
        let old = exporter.export_as(kind.kind, "old", &float_bytes(&[OLD; 1024]))?;
        let new = exporter.export_as(kind.kind, "new", &float_bytes(&[OLD; 1024]))?;
        let (mut mapping, stream) = open(context, &old)?;
        mapping.view_mut::<f32, _>(&stream)?.add(0.0)?;
        stream.synchronize()?;
        for by_stream in [true, false] {
            let descriptor = if by_stream { &new } else { &old };
            let gate = Gate::close(&stream)?;
            mapping.view_mut::<f32, _>(&stream)?.add(1.0)?;
            gate.open_soon();
            if by_stream { mapping.replace_on(descriptor, &stream)? } else { mapping.replace(descriptor)? }
            mapping.view_mut::<f32, _>(&stream)?.add(10.0)?;
            stream.synchronize()?;
        }
        same(&exporter.floats("old")?, &[OLD + 11.0; 1024], "the first version")?;
        same(&exporter.floats("new")?, &[OLD + 11.0; 1024], "the second version")?;
        drop(mapping);
        is_released(&mut exporter, "old")?;
        exporter.must(&Command::Drop { names: vec!["old".into(), "new".into()] }).map(drop)
    })
}

/// A version that is not written yet is waited for; one that is not written in time changes nothing.
pub fn replace_waits_for_ready(context: &Context) -> Outcome {
    context.needs_events()?;
    let mut exporter = context.agent()?;
    exporter.prepare(0)?;
    for_each_remappable(context, |kind| {
        let (first, old) = version(&mut exporter, kind.kind, "first", 0)?;
        let (late, _) = version(&mut exporter, kind.kind, "late", 1)?;
        exporter.must(&Command::Drop { names: vec!["late".into()] })?;
        drop(late);
        exporter.close_gate(0)?;
        exporter.must(&Command::Fill { name: "late".into(), byte: 0xee })?;
        let late = exporter.share("late", Sharing { ready_on: Some(0), ..Sharing::default() })?;
        let ipc = context.ipc();
        let stream = ipc.create_stream(0)?;
        let mut hasty = ipc.open(&first).reserved().timeout(Duration::from_secs(1)).on(&stream)?;
        refused(hasty.replace(&late), "a version that is not written", "Timeout", &[])?;
        same(&bytes_of(&hasty, &stream)?, &old, "the bytes after a replacement that timed out")?;
        drop(hasty);
        is_released(&mut exporter, "first")?;

        let (mut mapping, stream) = open(context, &first)?;
        std::thread::scope(|scope| {
            let replacing = scope.spawn(|| mapping.replace_on(&late, &stream));
            exporter.open_gates("a version that is not written yet")?;
            let replaced = replacing.join().map_err(|_| Stop::failed("the thread that replaces panicked"))?;
            Ok::<_, Stop>(replaced?)
        })?;
        same(&bytes_of(&mapping, &stream)?, &vec![0xee; LEN], "the bytes that the exporter's stream wrote")?;
        drop(mapping);
        is_released(&mut exporter, "late")?;
        exporter.must(&Command::Drop { names: vec!["first".into(), "late".into()] }).map(drop)
    })
}

/// An export of another layout is refused before anything is opened, and the error names the first difference.
pub fn another_layout_is_refused(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    for_each_remappable(context, |kind| {
        let (first, old) = version(&mut exporter, kind.kind, "first", 0)?;
        let (mut mapping, stream) = open(context, &first)?;
        let shorter = exporter.share_as("shorter", "first", Sharing { len: Some(64), ..Sharing::default() })?;
        let (named, _) = bundle(&mut exporter, kind.kind, "named", 0)?;
        for suspended in [false, true] {
            if suspended {
                mapping.suspend()?;
            }
            let mut attempt = |descriptor| {
                if suspended { mapping.resume(descriptor) } else { mapping.replace(descriptor) }
            };
            let phrases = ["the length of the region in bytes is 64, expected 100003"];
            refused(attempt(&shorter), "a shorter region", "Layout", &phrases)?;
            refused(attempt(&named), "named tensors", "Layout", &["the presence of names is true, expected false"])?;
        }
        mapping.resume(&first)?;
        same(&bytes_of(&mapping, &stream)?, &old, "the bytes after refused layouts")?;
        for name in ["shorter", "named"] {
            is_not_held(&mut exporter, name)?;
        }
        drop(mapping);
        is_released(&mut exporter, "first")?;
        let names = ["shorter", "first", "named"].map(String::from).to_vec();
        exporter.must(&Command::Drop { names }).map(drop)
    })
}

/// A replacement by a dropped export, by a dead exporter's, or by one that permits less leaves the old version mapped.
pub fn failed_replace_keeps_the_old_version(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    for_each_remappable(context, |kind| {
        let (first, old) = version(&mut exporter, kind.kind, "first", 0)?;
        let (dropped, _) = version(&mut exporter, kind.kind, "dropped", 1)?;
        exporter.must(&Command::Drop { names: vec!["dropped".into()] })?;
        let mut other = context.agent()?;
        let (gone, _) = version(&mut other, kind.kind, "gone", 2)?;
        other.kill()?;
        exporter.must(&Command::Allocate {
            name: "read".into(),
            len: LEN as u64,
            device: 0,
            kind: Some(kind.kind.0),
            bytes: None,
        })?;
        let reading = Sharing { access: Some(Access::ReadOnly), ..Sharing::default() };
        let (mut mapping, stream) = open(context, &first)?;
        let address = mapping.range().ptr;
        let opens = counters().driver_opens_total;
        refused(mapping.replace(&dropped), "a dropped export", "ExportDropped", &[])?;
        refused(mapping.replace(&gone), "a dead exporter's export", "ExporterGone", &[])?;
        if kind.read_only {
            let reading = exporter.share("read", reading)?;
            refused(mapping.replace(&reading), "a read-only export", "AccessDenied", &[])?;
            exporter.must(&Command::Drop { names: vec!["read".into()] })?;
        }
        let ipc = context.ipc();
        let staged = ipc.open(&first).staged();
        refused(mapping.replace(staged), "a copy as the next version", "Unsupported", &["a copy is private memory"])?;
        let other = ipc.open(&first).access(Access::ReadOnly);
        refused(mapping.replace(other), "another access", "Unsupported", &["a read-write mapping read-only"])?;
        equal(counters().driver_opens_total, opens, "the driver's opens by refused replacements")?;
        is_at(&mapping, address, "after failed replacements")?;
        same(&bytes_of(&mapping, &stream)?, &old, "the bytes after failed replacements")?;
        drop(mapping);
        is_released(&mut exporter, "first")?;
        exporter.must(&Command::Free { name: "read".into() })?;
        exporter.must(&Command::Drop { names: vec!["first".into()] }).map(drop)
    })
}

/// The death of the exporter of the mapped version, or of a suspended one, hinders no replacement by another exporter's.
pub fn exporter_killed_in_every_state(context: &Context) -> Outcome {
    let mut survivor = context.agent()?;
    for_each_remappable(context, |kind| {
        let (last, bytes) = version(&mut survivor, kind.kind, "last", 3)?;
        // Mapped.
        let mut exporter = context.agent()?;
        let (first, old) = version(&mut exporter, kind.kind, "first", 0)?;
        let (mut mapping, stream) = open(context, &first)?;
        let address = mapping.range().ptr;
        let (sender, gone) = channel();
        mapping.on_gone(move |error| drop(sender.send(error.to_string())));
        exporter.kill()?;
        that(gone.recv_timeout(SOON).is_ok(), "on_gone of the present version should run")?;
        if kind.lifetime == Lifetime::Pins {
            same(&bytes_of(&mapping, &stream)?, &old, "the bytes of a dead exporter")?;
        }
        mapping.replace(&last)?;
        is_at(&mapping, address, "after the death of the first exporter")?;
        same(&bytes_of(&mapping, &stream)?, &bytes, "the bytes of another exporter")?;

        // Suspended.
        let mut exporter = context.agent()?;
        let (second, _) = version(&mut exporter, kind.kind, "second", 1)?;
        mapping.replace(&second)?;
        mapping.suspend()?;
        is_released(&mut exporter, "second")?;
        exporter.kill()?;
        refused(mapping.resume(&second), "resuming a dead exporter's export", "ExporterGone", &[])?;
        that(mapping.is_suspended(), "it is suspended after an error")?;
        mapping.resume(&last)?;
        is_at(&mapping, address, "after the death of the second exporter")?;
        same(&bytes_of(&mapping, &stream)?, &bytes, "the bytes after a resume")?;
        drop(mapping);
        is_released(&mut survivor, "last")?;
        survivor.must(&Command::Drop { names: vec!["last".into()] }).map(drop)
    })
}

/// A version that was closed by force leaves the addresses reserved, for another version.
pub fn closed_by_force_and_replaced(context: &Context) -> Outcome {
    let mut survivor = context.agent()?;
    for_each_remappable(context, |kind| {
        let (last, bytes) = version(&mut survivor, kind.kind, "last", 3)?;
        let mut exporter = context.agent()?;
        let (first, _) = version(&mut exporter, kind.kind, "first", 0)?;
        let (mut mapping, stream) = open(context, &first)?;
        let address = mapping.range().ptr;
        exporter.kill()?;
        equal(unchecked::close_mappings_of(first.exporter())?, 1, "the mappings closed by force")?;
        refused(mapping.view::<u8, _>(&stream).map(drop), "a view of what was closed", "ExporterGone", &[])?;
        mapping.replace(&last)?;
        is_at(&mapping, address, "after a close by force")?;
        same(&bytes_of(&mapping, &stream)?, &bytes, "the bytes after a close by force")?;
        drop(mapping);
        is_released(&mut survivor, "last")?;
        survivor.must(&Command::Drop { names: vec!["last".into()] }).map(drop)
    })
}

/// A read-only mapping is read-only in every version.
pub fn read_only_is_kept(context: &Context) -> Outcome {
    let fits = |kind: &HandleKindInfo| kind.read_only && kind.remappable;
    let kind = context.kind_that(fits, "no kind of handle can be mapped read-only at addresses that the importer keeps")?;
    let mut exporter = context.agent()?;
    let (first, _) = version(&mut exporter, kind.kind, "first", 0)?;
    let (second, bytes) = version(&mut exporter, kind.kind, "second", 1)?;
    let mut importer = context.agent()?;
    let opening = Opening::new(&first, Place::Home).access(Access::ReadOnly).reserved();
    importer.try_open("m", opening)?.map_err(|refusal| Stop::failed(refusal.text))?;
    importer.must(&Command::Replace { name: "m".into(), descriptor: second.to_string(), device: None })?;
    same(&importer.bytes("m")?, &bytes, "the bytes of the second version")?;
    let fill = importer.request(&Command::FillUnchecked { name: "m".into(), byte: 0xee })?;
    that(
        fill.result.is_err(),
        "a write to a read-only mapping should be an error of the device: DeviceReservations::map has to give the access of \
         the import",
    )?;
    same(&exporter.bytes("second")?, &bytes, "the bytes after a write to a read-only mapping")
}

/// Device work on suspended addresses fails, and reaches no memory.
pub fn suspended_addresses_hold_nothing(context: &Context) -> Outcome {
    for_each_remappable(context, |kind| {
        let mut exporter = context.agent()?;
        let (first, bytes) = version(&mut exporter, kind.kind, "first", 0)?;
        // The device may be of no use to it afterwards.
        let mut importer = context.agent()?;
        let opening = Opening::new(&first, Place::Home).reserved();
        importer.try_open("m", opening)?.map_err(|refusal| Stop::failed(refusal.text))?;
        importer.must(&Command::Suspend { name: "m".into() })?;
        is_released(&mut exporter, "first")?;
        let fill = importer.request(&Command::FillUnchecked { name: "m".into(), byte: 0xee })?;
        that(
            fill.result.is_err(),
            "a write to suspended addresses should be an error of the device: DeviceReservations::unmap has to unmap the range",
        )?;
        same(&exporter.bytes("first")?, &bytes, "the exporter's bytes")
    })
}

/// Memory is mapped on another device than its home, and replaced by memory of another home.
pub fn device_that_is_not_the_home(context: &Context) -> Outcome {
    let [first, second] = context.two_peers()?;
    for_each_remappable(context, |kind| {
        let mut exporter = context.agent()?;
        let mut exports = Vec::new();
        for device in [first.ordinal, second.ordinal] {
            let bytes = pattern(4096 + device.index())[device.index()..].to_vec();
            let (name, len) = (format!("m{device}"), bytes.len() as u64);
            let kind = Some(kind.kind.0);
            exporter.must(&Command::Allocate { name: name.clone(), len, device: device.get(), kind, bytes: Some(bytes.clone()) })?;
            exports.push((exporter.share(&name, Sharing::default())?, bytes));
        }
        let ipc = context.ipc();
        let stream = ipc.create_stream(second.ordinal)?;
        let mut mapping = ipc.open(&exports[0].0).reserved().on(&stream)?;
        let address = mapping.range().ptr;
        equal((mapping.is_at_home(), mapping.device()), (false, second.ordinal), "the place of the mapping")?;
        same(&bytes_of(&mapping, &stream)?, &exports[0].1, "the bytes of the other device")?;
        let wrong = ipc.create_stream(first.ordinal)?;
        refused(mapping.replace_on(&exports[1].0, &wrong), "a stream of another device", "WrongStream", &[])?;
        mapping.replace_on(&exports[1].0, &stream)?;
        equal((mapping.is_at_home(), mapping.device()), (true, second.ordinal), "the place of the next version")?;
        is_at(&mapping, address, "after a replacement by memory of another home")?;
        same(&bytes_of(&mapping, &stream)?, &exports[1].1, "the bytes of the second home")?;
        drop(mapping);
        is_released(&mut exporter, &format!("m{}", second.ordinal))?;
        // A reservation is of one device.
        let reservation = ipc.reserve(second.ordinal, 1 << 22)?;
        let open = || ipc.open(&exports[0].0).reserved_in(&reservation, 0);
        let devices = [&*format!("on device {}", first.ordinal), &*format!("on device {}", second.ordinal)];
        refused(open().at_home(), "a reservation of another device", "InvalidRegion", &devices)?;
        let mapping = open().on(&stream)?;
        is_at(&mapping, reservation.range().ptr, "in a reservation of another device than its home")?;
        same(&bytes_of(&mapping, &stream)?, &exports[0].1, "the bytes of the other device in a reservation")
    })
}

/// A reserved mapping and a plain one of the same export are two leases at two addresses; the cache keeps only the plain one. A
/// vendor may import a handle once for a device: then the second mapping is refused, and the first is as before.
pub fn not_shared_with_other_mappings(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    for_each_remappable(context, |kind| {
        let (first, bytes) = version(&mut exporter, kind.kind, "first", 0)?;
        let ipc = context.ipc();
        let (mut reserved, stream) = open(context, &first)?;
        let plain = match ipc.open(&first).on(&stream) {
            Err(Error::OverlapsInUse { .. }) => {
                let again = ipc.open(&first).reserved().on(&stream);
                refused(again, "a second reserved mapping", "OverlapsInUse", &[])?;
                refused(reserved.replace(&first), "a replacement by the mapped export", "OverlapsInUse", &[])?;
                same(&bytes_of(&reserved, &stream)?, &bytes, "the bytes after refused mappings")?;
                drop(reserved);
                same(&bytes_of(&ipc.open(&first).on(&stream)?, &stream)?, &bytes, "the bytes of a plain mapping")?;
                device_ipc_core::close_unused(SOON)?;
                return exporter.must(&Command::Drop { names: vec!["first".into()] }).map(drop);
            }
            plain => plain?,
        };
        let (other, _) = open(context, &first)?;
        let addresses = [&reserved, &plain, &other].map(|mapping| mapping.range().ptr);
        that(addresses[0] != addresses[1] && addresses[0] != addresses[2], format!("addresses are shared: {addresses:?}"))?;
        reserved.suspend()?;
        same(&bytes_of(&plain, &stream)?, &bytes, "the bytes of the plain mapping")?;
        same(&bytes_of(&other, &stream)?, &bytes, "the bytes of the other reserved mapping")?;
        drop(plain);
        drop(other);
        drop(reserved);
        device_ipc_core::close_unused(SOON)?;
        is_released(&mut exporter, "first")?;
        exporter.must(&Command::Drop { names: vec!["first".into()] }).map(drop)
    })
}

/// A mapping that was dropped, or released on a stream, is not in the way of the next one of its export, also where a vendor
/// imports a handle once for a device.
pub fn opened_again_at_once(context: &Context) -> Outcome {
    const RESERVED: bool = true;
    const RELEASED: bool = true;
    let mut exporter = context.agent()?;
    for_each_remappable(context, |kind| {
        let (first, bytes) = version(&mut exporter, kind.kind, "first", 0)?;
        let ipc = context.ipc();
        let stream = ipc.create_stream(0)?;
        let other = ipc.create_stream(0)?;
        let mappings = [
            (RESERVED, !RELEASED),
            (RESERVED, RELEASED),
            (!RESERVED, !RELEASED),
            (RESERVED, RELEASED),
            (!RESERVED, RELEASED),
            (RESERVED, !RELEASED),
            (!RESERVED, RELEASED),
        ];
        let mut gate = None;
        for (round, (reserved, released)) in mappings.into_iter().enumerate() {
            let plain = ipc.open(&first);
            let opened = if reserved { plain.reserved() } else { plain }.on(&other);
            drop(gate.take());
            let mapping = opened.map_err(|error| Stop::failed(format!("mapping {round} of the same export: {error}")))?;
            same(&bytes_of(&mapping, &stream)?, &bytes, format!("the bytes of mapping {round}"))?;
            let blocking = gate.insert(Gate::close(&stream)?);
            if released { mapping.release(&stream)? } else { drop(mapping) }
            blocking.open_soon();
        }
        drop(gate);
        device_ipc_core::close_unused(SOON)?;
        is_released(&mut exporter, "first")?;
        exporter.must(&Command::Drop { names: vec!["first".into()] }).map(drop)
    })
}

/// Replacements, suspensions and drops leave no memory, mapping, descriptor or lease behind.
pub fn nothing_is_left_behind(context: &Context) -> Outcome {
    const BYTES: usize = 4 << 20;
    /// More than the descriptors of the process change by chance.
    const ROUNDS: usize = 64;
    let mut exporter = context.agent()?;
    let stream = context.ipc().create_stream(0)?;
    for_each_remappable(context, |kind| {
        let free = || Ok::<_, Stop>(context.backend().memory().memory_info(stream.device())?.free_bytes);
        let round = || {
            let mut versions = Vec::new();
            for name in ["one", "two"] {
                let (len, kind) = (BYTES as u64, Some(kind.kind.0));
                exporter.must(&Command::Allocate { name: name.into(), len, device: 0, kind, bytes: None })?;
                versions.push(exporter.share(name, Sharing::default())?);
            }
            let (mut mapping, _) = open(context, &versions[0])?;
            for _ in 0..3 {
                mapping.replace(&versions[1])?;
                mapping.replace(&versions[0])?;
            }
            mapping.suspend()?;
            mapping.resume(&versions[1])?;
            mapping.suspend()?;
            for name in ["one", "two"] {
                exporter.must(&Command::Close { name: name.into(), timeout: SOON, free_anyway: false })?;
                exporter.must(&Command::Free { name: name.into() })?;
            }
            drop(mapping);
            Ok(())
        };
        memory_stays_free(BYTES, free, round)?;
        let are_closed = || {
            until("the close of all imports", |seen| {
                seen.driver_closes_total == seen.driver_opens_total && seen.mapped_bytes == 0
            })
        };
        are_closed()?;
        let before = Usage::of_this_process()?;
        let one = exporter.export_as(kind.kind, "one", &[7; 64])?;
        let mut addresses = HashSet::new();
        for _ in 0..ROUNDS {
            let (mapping, _) = open(context, &one)?;
            addresses.insert(mapping.range().ptr);
            drop(mapping);
            // A driver may import a handle once for a device (Ascend).
            are_closed()?;
        }
        that(addresses.len() < ROUNDS, "DeviceReservations::unreserve has to free the addresses: no mapping got those of another")?;
        is_released(&mut exporter, "one")?;
        exporter.must(&Command::Drop { names: vec!["one".into()] })?;
        exporter.must(&Command::Free { name: "one".into() })?;
        // The worker has done everything that was submitted before.
        device_ipc_core::close_unused(SOON)?;
        let now = Usage::of_this_process()?;
        let text = format!("{before:?} has become {now:?} by {ROUNDS} mappings: release has to close the file descriptors");
        that(now.descriptors < before.descriptors + ROUNDS, text)
    })
}

/// Returns the units of reserved ranges on device 0.
fn granularity(context: &Context) -> Result<ReservationGranularity, Stop> {
    match context.backend().reservations() {
        Some(reservations) => Ok(reservations.granularity(0.into())?),
        None => skip("no kind of handle can be mapped at addresses that the importer keeps"),
    }
}

/// Reserves addresses that `others` reserve too: those of the driver's choice, as processes would agree on them.
fn agree<T>(
    context: &Context,
    bytes: u64,
    mut others: impl FnMut(DeviceRange) -> Result<Result<T, Refusal>, Stop>,
) -> Result<(Reservation, T), Stop> {
    let ipc = context.ipc();
    let unit = granularity(context)?.address;
    let mut refused = Vec::new();
    for _ in 0..16 {
        let room = ipc.reserve(0, bytes + unit)?.range();
        let wanted = DeviceRange::new(room.device, DevicePtr::new(room.ptr.get().next_multiple_of(unit)), bytes);
        match ipc.reserve_at(wanted) {
            Ok(ours) => match others(wanted)? {
                Ok(theirs) => return Ok((ours, theirs)),
                Err(refusal) if refusal.kind == "AddressesInUse" => refused.push((Some(ours), refusal.text)),
                Err(refusal) => return Err(Stop::failed(refusal.text)),
            },
            // Another thread may have them.
            Err(error @ Error::AddressesInUse { .. }) => refused.push((None, error.to_string())),
            Err(error) => return Err(error.into()),
        }
    }
    let texts: Vec<_> = refused.into_iter().map(|(_, text)| text).collect();
    crate::fail(format!("DeviceReservations::reserve has to take free addresses: {texts:?}"))
}

/// Two processes open an export at one address, and keep it when the memory is replaced.
pub fn equal_addresses_in_two_processes(context: &Context) -> Outcome {
    let mut exporter = context.agent()?;
    for_each_remappable(context, |kind| {
        let (first, old) = version(&mut exporter, kind.kind, "first", 0)?;
        let (second, new) = version(&mut exporter, kind.kind, "second", 1)?;
        let mut other = context.agent()?;
        let (ours, theirs) = agree(context, 1 << 22, |range| {
            other.try_open("m", Opening::new(&first, Place::Home).reserved_at(range))
        })?;
        let wanted = ours.range();
        equal(theirs.address, wanted.ptr.get(), "the address in the other process")?;
        refused(context.ipc().reserve_at(wanted), "a range that this process has", "AddressesInUse", &["agree on another"])?;
        let stream = context.ipc().create_stream(0)?;
        let mut mapping = context.ipc().open(&first).reserved_in(&ours, 0).on(&stream)?;
        drop(ours);
        is_at(&mapping, wanted.ptr, "in a reservation")?;
        for (descriptor, bytes) in [(&first, &old), (&second, &new)] {
            if descriptor.export() != first.export() {
                mapping.replace(descriptor)?;
                other.must(&Command::Replace { name: "m".into(), descriptor: descriptor.to_string(), device: None })?;
            }
            same(&bytes_of(&mapping, &stream)?, bytes, "the bytes in this process")?;
            same(&other.bytes("m")?, bytes, "the bytes in the other process")?;
        }
        is_at(&mapping, wanted.ptr, "after a replacement")?;
        drop(mapping);
        other.must(&Command::Drop { names: vec!["m".into()] })?;
        is_released(&mut exporter, "second")?;
        exporter.must(&Command::Drop { names: vec!["first".into(), "second".into()] }).map(drop)
    })
}

/// Addresses that cannot be reserved are refused with what to do, and nothing stays reserved.
pub fn addresses_that_cannot_be_reserved(context: &Context) -> Outcome {
    let unit = granularity(context)?;
    let ipc = context.ipc();
    let ours = ipc.reserve(0, 3 * unit.place)?;
    let range = ours.range();
    equal((range.len, ours.granularity()), (3 * unit.place, unit.place), "the length and the unit")?;
    equal(ipc.reserve(0, 1)?.range().len, unit.place, "the length of one byte, in whole units")?;
    refused(ipc.reserve(0, 0), "no addresses", "InvalidRegion", &["0 B"])?;
    refused(ipc.reserve(0, u64::MAX), "all addresses", "InvalidRegion", &[])?;
    refused(ipc.reserve(99, 4096), "a device that is not there", "NoSuchDevice", &["99"])?;
    let units = format!("multiples of {} B", unit.address);
    let aligned = range.ptr.get() - range.ptr.get() % unit.address;
    for address in [0, aligned + 1, aligned + unit.address / 2, u64::MAX - u64::MAX % unit.address] {
        let wanted = DeviceRange { ptr: DevicePtr::new(address), len: 2 * unit.address, ..range };
        refused(ipc.reserve_at(wanted), "such an address", "InvalidRegion", &[&units, &DevicePtr::new(address).to_string()])?;
    }
    for overlap in [aligned, aligned + (2 * unit.place) / unit.address * unit.address] {
        let wanted = DeviceRange { ptr: DevicePtr::new(overlap), len: unit.address.max(range.len), ..range };
        refused(ipc.reserve_at(wanted), "addresses of this process", "AddressesInUse", &["Ipc::reserve"])?;
    }
    equal(ours.range(), range, "the range after refused ones")
}

/// Has an agent share whole units of memory whose bytes have one value.
fn unit_of(exporter: &mut Agent, kind: HandleKind, name: &str, len: u64, byte: u8) -> Result<Descriptor, Stop> {
    exporter.must(&Command::Allocate { name: name.into(), len, device: 0, kind: Some(kind.0), bytes: None })?;
    exporter.must(&Command::Fill { name: name.into(), byte })?;
    // Waits for the write.
    exporter.must(&Command::Checksum { name: name.into() })?;
    exporter.share(name, Sharing::default())
}

/// The first and the last byte of each row of a tensor.
fn rows(tensor: &Tensor<'_>, stream: &Stream) -> Result<Vec<[u8; 2]>, Stop> {
    let bytes: Vec<u8> = tensor.to_host(stream)?;
    let rows = bytes.chunks(tensor.shape()[1] as usize);
    Ok(rows.map(|row| [row[0], row[row.len() - 1]]).collect())
}

/// Exports of two owners are mapped side by side, and are one tensor; each is replaced by itself.
pub fn several_exports_side_by_side(context: &Context) -> Outcome {
    let (unit, mut owners) = (granularity(context)?.place, [context.agent()?, context.agent()?]);
    for_each_remappable(context, |kind| {
        let stream = context.ipc().create_stream(0)?;
        let ipc = context.ipc();
        let reservation = ipc.reserve(0, 3 * unit)?;
        let range = reservation.range();
        let layout = TensorLayout::contiguous(Dtype::U8, [3, unit])?;
        let first = unit_of(&mut owners[0], kind.kind, "first", unit, 1)?;
        let second = unit_of(&mut owners[1], kind.kind, "second", unit, 2)?;
        let third = unit_of(&mut owners[0], kind.kind, "third", unit, 3)?;
        let open = |descriptor, offset| ipc.open(descriptor).reserved_in(&reservation, offset).on(&stream);
        let at_start = open(&first, 0)?;
        let at_end = open(&third, 2 * unit)?;

        // Bad offsets lose nothing.
        let overlap = format!("offset {} B, length {unit} B of the reservation overlap a mapping", 2 * unit);
        refused(open(&second, 2 * unit), "the place of another mapping", "AddressesInUse", &[&overlap])?;
        refused(open(&second, unit + 4), "an offset within a unit", "InvalidRegion", &[&format!("multiples of {unit} B")])?;
        refused(open(&second, 3 * unit), "a place behind the end", "InvalidRegion", &[&format!("{} B", 3 * unit)])?;
        refused(open(&second, u64::MAX), "an offset that overflows", "InvalidRegion", &[])?;
        is_not_held(&mut owners[1], "second")?;
        let ends = [&at_start, &at_end];
        let gap = format!("none of the mappings has memory at {unit}");
        refused(reservation.tensor(&ends, &layout), "a tensor with a part that is not mapped", "InvalidRegion", &[&gap])?;

        let mut middle = open(&second, unit)?;
        for (index, mapping) in [&at_start, &middle, &at_end].into_iter().enumerate() {
            is_at(mapping, DevicePtr::new(range.ptr.get() + index as u64 * unit), "side by side")?;
        }
        {
            let parts = [&at_end, &at_start, &middle];
            let tensor = reservation.tensor(&parts, &layout)?;
            equal(tensor.range(), range, "the addresses of the tensor")?;
            same(&rows(&tensor, &stream)?, &[[1; 2], [2; 2], [3; 2]], "the rows of the tensor")?;
            tensor.view_mut::<u8, _>(&stream)?.fill_bytes(9)?;
            stream.synchronize()?;
        }
        let first_sum = owners[0].must(&Command::Checksum { name: "first".into() })?;
        let second_sum = owners[1].must(&Command::Checksum { name: "second".into() })?;
        equal(second_sum, first_sum, "the bytes of an owner and of another one, written as one tensor")?;
        let fourth = unit_of(&mut owners[1], kind.kind, "fourth", unit, 4)?;
        let moved = ipc.open(&fourth).reserved_in(&reservation, 0);
        refused(middle.replace(moved), "another place for the next version", "Unsupported", &["addresses of a mapping stay"])?;
        middle.replace_on(&fourth, &stream)?;
        is_released(&mut owners[1], "second")?;
        let parts = [&at_start, &middle, &at_end];
        same(&rows(&reservation.tensor(&parts, &layout)?, &stream)?, &[[9; 2], [4; 2], [9; 2]], "the rows after a replacement")?;
        middle.suspend()?;
        is_released(&mut owners[1], "fourth")?;
        let parts = [&at_start, &middle, &at_end];
        refused(reservation.tensor(&parts, &layout), "a tensor with a suspended part", "Suspended", &[])?;
        refused(open(&second, unit), "the place of a suspended mapping", "AddressesInUse", &[])?;
        middle.resume(&second)?;
        drop(middle);
        // The place is free once the library has unmapped the memory.
        is_released(&mut owners[1], "second")?;
        let again = open(&second, unit)?;
        let parts = [&at_start, &again, &at_end];
        same(&rows(&reservation.tensor(&parts, &layout)?, &stream)?, &[[9; 2]; 3], "the rows after another open")?;
        drop((at_start, again, at_end));
        for (owner, name) in [(0, "first"), (1, "second"), (0, "third")] {
            is_released(&mut owners[owner], name)?;
        }
        owners[0].must(&Command::Drop { names: vec!["first".into(), "third".into()] })?;
        owners[1].must(&Command::Drop { names: vec!["second".into(), "fourth".into()] }).map(drop)
    })
}

/// The death of one owner, and the close of its memory, leave the other parts of a reservation, and the range ends with the last.
pub fn parts_end_by_themselves(context: &Context) -> Outcome {
    let unit = granularity(context)?.place;
    let mut survivor = context.agent()?;
    for_each_remappable(context, |kind| {
        let mut mortal = context.agent()?;
        let (ipc, stream) = (context.ipc(), context.ipc().create_stream(0)?);
        let reservation = ipc.reserve(0, 2 * unit)?;
        let layout = TensorLayout::contiguous(Dtype::U8, [2, unit])?;
        let gone = unit_of(&mut mortal, kind.kind, "gone", unit, 1)?;
        let kept = unit_of(&mut survivor, kind.kind, "kept", unit, 2)?;
        let mut first = ipc.open(&gone).reserved_in(&reservation, 0).on(&stream)?;
        let second = ipc.open(&kept).reserved_in(&reservation, unit).on(&stream)?;
        drop(reservation.clone());
        mortal.kill()?;
        let pins = kind.lifetime == Lifetime::Pins;
        if pins {
            same(&rows(&reservation.tensor(&[&first, &second], &layout)?, &stream)?, &[[1; 2], [2; 2]], "the rows after a death")?;
        }
        equal(unchecked::close_mappings_of(gone.exporter())?, 1, "the mappings closed by force")?;
        {
            let parts = [&first, &second];
            let tensor = reservation.tensor(&parts, &layout)?;
            refused(tensor.view::<u8, _>(&stream).map(drop), "a view with a part that was closed", "ExporterGone", &[])?;
        }
        equal(bytes_of(&second, &stream)?[0], 2, "the other part")?;
        let next = unit_of(&mut survivor, kind.kind, "next", unit, 3)?;
        first.replace(&next)?;
        same(&rows(&reservation.tensor(&[&first, &second], &layout)?, &stream)?, &[[3; 2], [2; 2]], "the rows after a replacement")?;
        // The range ends with the last mapping.
        let range = reservation.range();
        drop((reservation, second));
        is_released(&mut survivor, "kept")?;
        refused(ipc.reserve_at(aligned(context, range)?), "a range with a mapping", "AddressesInUse", &[])?;
        is_at(&first, range.ptr, "after the drop of the reservation")?;
        equal(bytes_of(&first, &stream)?[0], 3, "the bytes after the drop of the reservation")?;
        drop(first);
        is_released(&mut survivor, "next")?;
        survivor.must(&Command::Drop { names: vec!["kept".into(), "next".into()] }).map(drop)
    })
}

/// The regions of named tensors lie side by side from the offset on; of a part of an allocation, the first byte lies there.
pub fn regions_lie_at_the_offset(context: &Context) -> Outcome {
    let unit = granularity(context)?.place;
    let mut exporter = context.agent()?;
    for_each_remappable(context, |kind| {
        let ipc = context.ipc();
        let (reservation, stream) = (ipc.reserve(0, 8 * unit + LEN as u64)?, ipc.create_stream(0)?);
        let start = reservation.range().ptr.get();
        let (first, _) = bundle(&mut exporter, kind.kind, "a", 0)?;
        let (second, new) = bundle(&mut exporter, kind.kind, "b", 9)?;
        let mut named = ipc.open(&first).reserved_in(&reservation, unit).on(&stream)?;
        let mut next = start + unit;
        for region in named.regions() {
            equal(region.ptr.get(), next, "the address of the next region")?;
            next += region.len.next_multiple_of(unit);
        }
        named.replace(&second)?;
        equal(named.regions().next().map(|region| region.ptr.get()), Some(start + unit), "the address after a replacement")?;
        same(&named.get("t1")?.view::<u8, _>(&stream)?.to_vec()?, &new[1], "the bytes of a tensor")?;

        let (_, bytes) = version(&mut exporter, kind.kind, "whole", 0)?;
        let part = Sharing { offset: 512, len: Some(1024), ..Sharing::default() };
        let part = exporter.share_as("part", "whole", part)?;
        let open = |offset| ipc.open(&part).reserved_in(&reservation, offset).on(&stream);
        refused(open(0), "a part without the bytes before it", "InvalidRegion", &["begins 512 B behind the start"])?;
        refused(open(unit), "a part whose allocation begins within a unit", "InvalidRegion", &[&format!("multiples of {unit} B")])?;
        let at = next - start + 512;
        let mapping = open(at)?;
        is_at(&mapping, DevicePtr::new(start + at), "of a part of an allocation")?;
        same(&bytes_of(&mapping, &stream)?, &bytes[512..512 + 1024], "the bytes of a part")?;
        drop((named, mapping));
        for name in ["a", "b", "part"] {
            is_released(&mut exporter, name)?;
        }
        exporter.must(&Command::Drop { names: ["a", "b", "part", "whole"].map(String::from).to_vec() }).map(drop)
    })
}

/// Widens a range to whole units of addresses.
fn aligned(context: &Context, range: DeviceRange) -> Result<DeviceRange, Stop> {
    let unit = granularity(context)?.address;
    let start = range.ptr.get() - range.ptr.get() % unit;
    Ok(DeviceRange { ptr: DevicePtr::new(start), len: range.ptr.get() + range.len - start, ..range })
}

/// Memory of other kinds, memory of the same process, and copies are refused, with what to do instead.
pub fn refused_where_addresses_cannot_be_kept(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let share = memory.share()?;
    let plain = memory.ipc.open(share.descriptor());
    refused(plain.reserved().at_home(), "memory of the same process", "Unsupported", &[])?;
    let mut mapping = memory.ipc.open(share.descriptor()).at_home()?;
    refused(mapping.suspend(), "suspending a plain mapping", "Unsupported", &["not reserved"])?;
    refused(mapping.replace(share.descriptor()), "replacing a plain mapping", "Unsupported", &["not reserved"])?;
    let copy = memory.ipc.open(share.descriptor()).staged().reserved();
    refused(copy.at_home(), "a copy", "Unsupported", &["a copy is private memory"])?;
    let mut exporter = context.agent()?;
    for kind in context.usable_kinds()?.into_iter().filter(|kind| !kind.remappable) {
        let (descriptor, _) = version(&mut exporter, kind.kind, "first", 0)?;
        match memory.ipc.open(&descriptor).reserved().at_home() {
            Err(Error::Unsupported { why, .. }) => that(
                context.backend().reservations().is_none() || why.contains("MemoryUse::remappable"),
                format!("the refusal should name the remedy: {why}"),
            )?,
            other => return crate::fail(format!("memory of kind {} at reserved addresses: {other:?}", kind.name)),
        }
        exporter.must(&Command::Drop { names: vec!["first".into()] })?;
        exporter.must(&Command::Free { name: "first".into() })?;
    }
    Ok(())
}
