//! The memory of a mapping is exchanged: suspended, resumed, and replaced by another version.

use std::time::Duration;

use device_ipc_core::backend::HandleKindInfo;
use device_ipc_core::{Access, Mapping};

use crate::agent::{Command, Opening, Place, Sharing};
use crate::check::{equal, refused, same, that};
use crate::flows::{OLD, SOON, bytes_of, float_bytes, pattern};
use crate::gate::Gate;
use crate::{Context, Outcome, Stop};

use super::{LEN, for_each_remappable, version, open, is_at, is_released, is_not_held, bundle};

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
