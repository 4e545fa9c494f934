//! Ranges that a process reserves: at agreed addresses, and for several exports side by side.

use device_ipc_core::backend::{HandleKind, Lifetime, ReservationGranularity};
use device_ipc_core::{Descriptor, DevicePtr, DeviceRange, Dtype, Error, Reservation, Stream, Tensor, TensorLayout};

use crate::agent::{Agent, Command, Opening, Place, Sharing};
use crate::check::{Refusal, equal, refused, same};
use crate::flows::bytes_of;
use crate::{Context, Outcome, Stop, skip, unchecked};

use super::{LEN, for_each_remappable, version, is_at, is_released, is_not_held, bundle};

/// Returns the units of reserved ranges on device 0.
fn granularity(context: &Context) -> Result<ReservationGranularity, Stop> {
    match context.backend().reservations() {
        Some(reservations) => Ok(reservations.granularity(0.into())?),
        None => skip("no kind of handle can be mapped at addresses that the importer keeps"),
    }
}

/// Reserves addresses that `others` reserve too, far from those that drivers choose.
fn agree<T>(
    context: &Context,
    bytes: u64,
    mut others: impl FnMut(DeviceRange) -> Result<Result<T, Refusal>, Stop>,
) -> Result<(Reservation, T), Stop> {
    let ipc = context.ipc();
    let unit = granularity(context)?.address;
    let mut refused = Vec::new();
    for index in 0..8 {
        let address = (16 << 40) + index * bytes.next_multiple_of(unit.max(1 << 30));
        let wanted = DeviceRange::new(0.into(), DevicePtr::new(address), bytes);
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
        refused(ipc.reserve_at(wanted), "addresses of this process", "AddressesInUse", &["agree on another"])?;
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
