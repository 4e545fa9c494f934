//! What ends beside an exchange, or keeps it from happening: exporters, other mappings, and failed versions.

use std::collections::HashSet;
use std::sync::mpsc::channel;

use device_ipc_core::backend::Lifetime;
use device_ipc_core::{Access, CopyPolicy, Error, counters};

use crate::agent::{Command, Opening, Place, Sharing};
use crate::check::{equal, refused, same, that};
use crate::flows::{Memory, SOON, bytes_of, memory_stays_free, pattern, until};
use crate::gate::Gate;
use crate::usage::Usage;
use crate::{Context, Outcome, Stop, unchecked};

use super::{LEN, for_each_remappable, version, open, is_at, is_released};

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
        let staged = ipc.open(&first).copy(CopyPolicy::Staged);
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

/// Memory of other kinds, memory of the same process, and copies are refused, with what to do instead.
pub fn refused_where_addresses_cannot_be_kept(context: &Context) -> Outcome {
    let memory = Memory::with_bytes(context, 0, &pattern(64))?;
    let share = memory.share()?;
    let plain = memory.ipc.open(share.descriptor());
    refused(plain.reserved().at_home(), "memory of the same process", "Unsupported", &[])?;
    let mut mapping = memory.ipc.open(share.descriptor()).at_home()?;
    refused(mapping.suspend(), "suspending a plain mapping", "Unsupported", &["not reserved"])?;
    refused(mapping.replace(share.descriptor()), "replacing a plain mapping", "Unsupported", &["not reserved"])?;
    let copy = memory.ipc.open(share.descriptor()).copy(CopyPolicy::Staged).reserved();
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
