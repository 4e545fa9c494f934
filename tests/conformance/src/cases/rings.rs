//! Rings: memory that is shared once, and then written and read repeatedly, by streams that wait for each other, or by hosts if
//! the device has no timelines.

use std::task::Poll;
use std::time::Duration;

use device_ipc_core::{Dtype, Error, Ring, RingReadSlot, RingReader, Stream, TensorLayout, TensorTable};

use crate::agent::{Agent, Command};
use crate::check::{equal, refused, same, that};
use crate::flows::{SOON, happens_soon};
use crate::gate::Gate;
use crate::{Context, Outcome, PATIENCE, Stop, fail};

/// Bytes of a slot.
const SLOT: u64 = 4096;
const SHORT: Duration = Duration::from_millis(50);

fn ring_of(context: &Context, slots: u32) -> Result<(Ring, Stream), Stop> {
    let ipc = context.ipc();
    let stream = ipc.create_stream(0)?;
    let ring = ipc.ring(ipc.allocate(0, SLOT * u64::from(slots))?).slots(slots).start()?;
    Ok((ring, stream))
}

/// Returns the slot, where the ring has not ended.
fn published(slot: Option<RingReadSlot>) -> Result<RingReadSlot, Stop> {
    slot.map_or_else(|| fail("the ring was closed too early"), Ok)
}

fn publish(ring: &mut Ring, stream: &Stream) -> Outcome {
    let mut slot = ring.write(stream)?;
    let byte = slot.sequence() as u8;
    slot.view_mut::<u8, _>(stream)?.fill_bytes(byte)?;
    Ok(slot.publish()?)
}

fn joined(context: &Context, ring: &Ring) -> Result<(Agent, u64), Stop> {
    let mut reader = context.agent()?;
    reader.prepare(0)?;
    let descriptor = ring.descriptor().to_string();
    let start = reader.get(&Command::RingJoin { descriptor, device: 0 })?;
    Ok((reader, start))
}

/// Reads and releases the reader's next slot, and checks its bytes.
fn read(reader: &mut Agent, sequence: u64) -> Outcome {
    let bytes: Vec<u8> = reader.get(&Command::RingNextBytes { timeout: PATIENCE })?;
    same(&bytes, &vec![sequence as u8; SLOT as usize], format!("the bytes of sequence {sequence}"))
}

/// Two readers get every publication in order, through one, two and three slots.
pub fn two_readers_get_everything(context: &Context) -> Outcome {
    const ROUNDS: u64 = 20;
    for slots in 1..=3 {
        let (mut ring, stream) = ring_of(context, slots)?;
        let mut readers = [joined(context, &ring)?.0, joined(context, &ring)?.0];
        ring.wait_readers(2, PATIENCE)?;
        equal(ring.readers(), 2, "the number of readers")?;
        for sequence in 0..ROUNDS {
            publish(&mut ring, &stream)?;
            for reader in &mut readers {
                read(reader, sequence)?;
            }
        }
        for reader in &mut readers {
            reader.must(&Command::RingLeave)?;
        }
        ring.close(SOON)?;
    }
    Ok(())
}

/// A reader begins with the first publication after it has joined, also between a write and its publication.
pub fn late_reader_begins_with_next_publication(context: &Context) -> Outcome {
    let (mut ring, stream) = ring_of(context, 2)?;
    for _ in 0..3 {
        publish(&mut ring, &stream)?;
    }
    let descriptor = ring.descriptor().to_string();
    let mut reader = context.agent()?;
    reader.prepare(0)?;
    let mut slot = ring.write(&stream)?;
    slot.view_mut::<u8, _>(&stream)?.fill_bytes(3)?;
    let start: u64 = reader.get(&Command::RingJoin { descriptor, device: 0 })?;
    equal(start, 3, "the sequence that the reader begins with")?;
    slot.publish()?;
    read(&mut reader, 3)
}

/// Neither side's host waits for the other side's stream, where there are timelines.
pub fn hosts_do_not_wait(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let (mut ring, stream) = ring_of(context, 2)?;
    let ipc = context.ipc();
    let reading = ipc.create_stream(0)?;
    let mut reader = ipc.open_ring(ring.descriptor()).on(&reading)?;
    that(!ring.waits_on_host() && !reader.waits_on_host(), "streams should do the waiting")?;
    let gate = Gate::close(&stream)?;
    for _ in 0..4 {
        publish(&mut ring, &stream)?;
        let slot = reader.next_ahead(&reading)?;
        slot.release(&reading)?;
    }
    gate.open("writing, publishing, taking and releasing")?;
    stream.synchronize()?;
    reading.synchronize()?;
    equal(ring.sequence(), 4, "the next sequence")
}

/// A slot that is dropped is written again under the same sequence, and no reader has seen it.
pub fn slot_dropped_unpublished(context: &Context) -> Outcome {
    let (mut ring, stream) = ring_of(context, 2)?;
    let ipc = context.ipc();
    let mut reader = ipc.open_ring(ring.descriptor()).on(&stream)?;
    drop(ring.write(&stream)?);
    that(reader.try_next()?.is_pending(), "a slot that was given back should not be read")?;
    let phrases = ["sequence 0", &format!("process {} ", std::process::id())];
    refused(reader.next(SHORT).map(drop), "the same on the host", "Timeout", &phrases)?;
    publish(&mut ring, &stream)?;
    equal(published(reader.next(PATIENCE)?)?.sequence(), 0, "the first sequence")
}

/// A publication on the host does not overtake publications on a stream.
pub fn host_publishes_in_turn(context: &Context) -> Outcome {
    let (mut ring, stream) = ring_of(context, 2)?;
    let ipc = context.ipc();
    let writing = ipc.create_stream(0)?;
    let mut reader = ipc.open_ring(ring.descriptor()).on(&writing)?;
    let on_host = ring.waits_on_host();
    let mut slot = ring.write(&stream)?;
    slot.view_mut::<u8, _>(&stream)?.fill_bytes(0)?;
    let gate = Gate::close(&stream)?;
    if on_host {
        // The publication waits for the stream.
        gate.open_soon();
    }
    slot.publish()?;
    let mut slot = ring.write(&writing)?;
    slot.view_mut::<u8, _>(&writing)?.fill_bytes(1)?;
    writing.synchronize()?;
    let published = slot.publish_now();
    if on_host {
        published?;
        return read_both(&mut reader, &writing);
    }
    gate.open("publishing by the host")?;
    refused(published, "overtaking a stream", "RingNotYet", &["synchronise that stream"])?;
    stream.synchronize()?;
    equal(ring.sequence(), 1, "the next sequence")?;
    ring.write(&writing)?.publish_now()?;
    read_both(&mut reader, &writing)
}

/// Takes the first two slots of a ring, and has the host release them.
fn read_both(reader: &mut RingReader, stream: &Stream) -> Outcome {
    for sequence in [0, 1] {
        let slot = published(reader.next(PATIENCE)?)?;
        equal(slot.sequence(), sequence, "the sequence")?;
        let bytes = slot.view::<u8, _>(stream)?.to_vec()?;
        same(&bytes, &[sequence as u8; SLOT as usize], format!("the bytes of sequence {sequence}"))?;
        slot.release_now().map_err(Error::from)?;
    }
    Ok(())
}

/// A release on the host does not overtake releases on a stream, older or younger.
pub fn host_releases_in_turn(context: &Context) -> Outcome {
    released_beside_a_stream(context, true)
}

/// The same, where the host releases the earlier slot. A case of its own: while a driver frees the memory of another ring, it may hold up
/// the calls of this one until the stream is idle.
pub fn host_releases_before_a_stream(context: &Context) -> Outcome {
    released_beside_a_stream(context, false)
}

fn released_beside_a_stream(context: &Context, stream_first: bool) -> Outcome {
    let (mut ring, stream) = ring_of(context, 2)?;
    let ipc = context.ipc();
    let late = ipc.create_stream(0)?;
    let mut reader = ipc.open_ring(ring.descriptor()).on(&stream)?;
    publish(&mut ring, &stream)?;
    publish(&mut ring, &stream)?;
    let (first, second) = (published(reader.next(PATIENCE)?)?, published(reader.next(PATIENCE)?)?);
    let (by_stream, by_host) = if stream_first { (first, second) } else { (second, first) };
    let gate = Gate::close(&late)?;
    if reader.waits_on_host() {
        gate.open_soon();
    }
    by_stream.release(&late).map_err(Error::from)?;
    let released = by_host.release_now();
    gate.open("releasing by the host")?;
    match released {
        Ok(()) if reader.waits_on_host() => {}
        Ok(()) => {
            return fail("a release by the host should be refused while a stream has yet to release");
        }
        Err(early) => {
            let phrases = ["released by the host", "synchronise that stream"];
            let missing = phrases.iter().find(|phrase| !early.to_string().contains(**phrase));
            that(missing.is_none(), format!("the error should say {missing:?}, and says: {early}"))?;
            late.synchronize()?;
            early.into_inner().release_now().map_err(Error::from)?;
        }
    }
    for _ in 0..2 {
        ring.wait_writable(PATIENCE)?;
        publish(&mut ring, &stream)?;
    }
    Ok(())
}

/// A slot that a reader has not released is not published by the host.
pub fn host_publishes_over_nothing(context: &Context) -> Outcome {
    context.needs_timelines(1)?;
    let (mut ring, stream) = ring_of(context, 1)?;
    let ipc = context.ipc();
    let mut reader = ipc.open_ring(ring.descriptor()).on(&stream)?;
    publish(&mut ring, &stream)?;
    let held = published(reader.next(PATIENCE)?)?;
    let writing = ipc.create_stream(0)?;
    let early = ring.write(&writing)?.publish_now();
    let phrases = ["sequence 0", "has not been released", "wait_writable"];
    refused(early, "publishing over what is read", "RingNotYet", &phrases)?;
    held.release_now().map_err(Error::from)?;
    ring.wait_writable(PATIENCE)?;
    ring.write(&writing)?.publish_now()?;
    equal(published(reader.next(PATIENCE)?)?.sequence(), 1, "the next sequence")
}

/// Slots are released in any order, and the writer sees the releases in the order of the sequences.
pub fn released_out_of_order(context: &Context) -> Outcome {
    let (mut ring, stream) = ring_of(context, 2)?;
    let ipc = context.ipc();
    let (one, other) = (ipc.create_stream(0)?, ipc.create_stream(0)?);
    let mut reader = ipc.open_ring(ring.descriptor()).on(&one)?;
    publish(&mut ring, &stream)?;
    publish(&mut ring, &stream)?;
    let (first, second) = (published(reader.next(PATIENCE)?)?, published(reader.next(PATIENCE)?)?);
    refused(reader.next(SHORT).map(drop), "a third slot of two", "RingSlotsHeld", &["all 2 slots"])?;
    second.release(&other)?;
    refused(ring.wait_writable(SHORT), "writing what is still held", "Timeout", &["sequence 0"])?;
    first.release(&one)?;
    ring.wait_writable(PATIENCE)?;
    happens_soon("a ring without readers that are behind", || Ok(ring.readers_behind().is_empty()))
}

/// A closed ring returns every publication, then its end.
pub fn closed_after_the_last(context: &Context) -> Outcome {
    let (mut ring, stream) = ring_of(context, 2)?;
    let ipc = context.ipc();
    let mut reader = ipc.open_ring(ring.descriptor()).on(&stream)?;
    publish(&mut ring, &stream)?;
    let descriptor = ring.descriptor().clone();
    drop(ring);
    let slot = published(reader.next(PATIENCE)?)?;
    let bytes = slot.view::<u8, _>(&stream)?.to_vec()?;
    same(&bytes, &[0; SLOT as usize], "the bytes of a closed ring's last publication")?;
    slot.check()?;
    slot.release(&stream)?;
    that(reader.next(PATIENCE)?.is_none(), "the reader should find the ring closed")?;
    that(matches!(reader.try_next()?, Poll::Ready(None)), "the same without waiting")?;
    refused(reader.next_ahead(&stream).map(drop), "a slot ahead", "RingClosed", &["closed the ring"])?;
    refused(ipc.open_ring(&descriptor).on(&stream), "joining a closed ring", "ExportDropped", &["dropped"])
}

/// Senseless slots give the memory back, with the reason. A ring is opened as a ring only, and other memory is not.
pub fn senseless_slots(context: &Context) -> Outcome {
    let ipc = context.ipc();
    let mut memory = ipc.allocate(0, 1024)?;
    for slots in [0, 5, 1 << 17] {
        match ipc.ring(memory).slots(slots).start() {
            Ok(_) => return fail(format!("{slots} slots in 1024 bytes should be refused")),
            Err(error) => {
                that(matches!(error.error(), Error::InvalidRegion(_)), format!("{slots} slots: {error}"))?;
                memory = error.into_inner();
            }
        }
    }
    let ring = ipc.ring(memory).slots(4).start()?;
    let slots = ring.descriptor().ring().map(|ring| (ring.slots(), ring.slot_bytes()));
    equal(slots, Some((4, 256)), "four slots in 1024 bytes")?;
    let opened = ipc.open(ring.descriptor()).at_home();
    refused(opened, "a ring opened as other memory", "Descriptor", &["a ring", "Ipc::open_ring"])?;
    let export = ipc.share(ipc.allocate(0, 1024)?).start()?;
    let joined = ipc.open_ring(export.descriptor()).at_home();
    refused(joined, "other memory opened as a ring", "Descriptor", &["a ring", "Ipc::open"])
}

/// Tensors that a table names are written and read in a slot, with the checks of those in a mapping.
pub fn tensors_of_a_table_in_a_slot(context: &Context) -> Outcome {
    let (mut ring, stream) = ring_of(context, 2)?;
    let ipc = context.ipc();
    let mut reader = ipc.open_ring(ring.descriptor()).on(&stream)?;
    let (small, large) =
        (TensorLayout::contiguous(Dtype::U8, [3])?, TensorLayout::contiguous(Dtype::F32, [2, 3])?);
    let none = TensorLayout::contiguous(Dtype::F32, [0, 3])?;
    let table = TensorTable::packed(256, [("small", small), ("large", large), ("none", none)])?;
    for number in [1.0, 2.0] {
        let slot = ring.write(&stream)?;
        slot.tensor(&table, "small")?.view_mut::<u8, _>(&stream)?.copy_from(&[number as u8; 3])?;
        slot.tensor(&table, "large")?.view_mut::<f32, _>(&stream)?.copy_from(&[number; 6])?;
        slot.tensor(&table, "none")?.view_mut::<f32, _>(&stream)?.copy_from(&[])?;
        slot.publish()?;
        let slot = published(reader.next(PATIENCE)?)?;
        let none = slot.tensor(&table, "none")?.view::<f32, _>(&stream)?.to_vec()?;
        equal(none, Vec::new(), "the numbers of a tensor without elements")?;
        let tensor = slot.tensor(&table, "large")?;
        equal(tensor.range().ptr.get(), slot.range().ptr.get() + 256, "where the tensor lies")?;
        equal(tensor.view::<f32, _>(&stream)?.to_vec()?, vec![number; 6], "the numbers of the large one")?;
        let small = slot.tensor(&table, "small")?.view::<u8, _>(&stream)?.to_vec()?;
        equal(small, vec![number as u8; 3], "those of the small one")?;
        slot.release(&stream).map_err(Error::from)?;
    }
    let too_large = TensorLayout::contiguous(Dtype::U8, [SLOT + 1])?;
    let senseless = TensorTable::packed(256, [("too large", too_large)])?;
    let slot = ring.write(&stream)?;
    refused(slot.tensor(&senseless, "too large"), "a tensor beyond the slot", "Descriptor", &["too large"])?;
    refused(slot.tensor(&table, "middle"), "a tensor that is not there", "NoSuchTensor", &["middle"])?;
    let other_type = slot.tensor(&table, "large")?.view_mut::<u8, _>(&stream).map(drop);
    refused(other_type, "a view of another type", "Layout", &["float32"])
}

/// A reader's descriptor is readable until nothing can be taken, and becomes readable at a publication and at the end.
pub fn reader_in_an_event_loop(context: &Context) -> Outcome {
    let (mut ring, stream) = ring_of(context, 2)?;
    let (mut reader, _) = joined(context, &ring)?;
    ring.wait_readers(1, PATIENCE)?;
    let polled = |reader: &mut Agent, timeout| reader.get::<bool>(&Command::RingPoll { timeout });
    that(polled(&mut reader, Duration::ZERO)?, "a new descriptor should be readable")?;
    let taken = |reader: &mut Agent| Ok::<_, Stop>(reader.must(&Command::RingTryNext)?.to_string());
    equal(taken(&mut reader)?, "pending".to_owned(), "the first publication")?;
    that(!polled(&mut reader, SHORT)?, "it should not be readable any more")?;
    for sequence in 0..3 {
        publish(&mut ring, &stream)?;
        let readable = polled(&mut reader, PATIENCE)?;
        that(readable, format!("sequence {sequence} should make the descriptor readable"))?;
        equal(taken(&mut reader)?, sequence.to_string(), "the sequence")?;
        reader.must(&Command::RingRelease { elsewhere: false })?;
        equal(taken(&mut reader)?, "pending".to_owned(), "the next publication")?;
    }
    // A wait that times out, and a slot that is taken without the descriptor, lose nothing.
    that(!polled(&mut reader, SHORT)?, "it should not be readable any more")?;
    publish(&mut ring, &stream)?;
    publish(&mut ring, &stream)?;
    read(&mut reader, 3)?;
    let mut next = taken(&mut reader)?;
    while next == "pending" {
        that(polled(&mut reader, PATIENCE)?, "sequence 4 should make the descriptor readable")?;
        next = taken(&mut reader)?;
    }
    equal(next, "4".to_owned(), "the sequence")?;
    reader.must(&Command::RingRelease { elsewhere: false })?;
    equal(taken(&mut reader)?, "pending".to_owned(), "the next publication")?;
    drop(ring);
    that(polled(&mut reader, PATIENCE)?, "the end should make it readable")?;
    equal(taken(&mut reader)?, "closed".to_owned(), "the end of the ring")
}
