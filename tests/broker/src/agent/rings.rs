//! What an agent does with rings. Its slots hold 1024 bytes, each of which is the sequence's last.

use std::time::Duration;

use device_ipc_core::{Dtype, Error, Result, Ring, RingReadSlot, RingReader, TensorLayout, TensorTable};

use super::{Agent, Words};

/// Bytes of a slot.
const SLOT: u64 = 1024;

/// What an agent has of rings.
#[derive(Default)]
pub(super) struct Rings {
    ring: Option<Ring>,
    reader: Option<RingReader>,
    /// Slots that were taken, the oldest first.
    slots: Vec<RingReadSlot>,
}

impl Agent {
    /// `ring SLOTS [timeout=MS]`: the descriptor.
    pub(super) fn ring(&mut self, words: &Words<'_>) -> Result<String> {
        let slots = words.number(0) as u32;
        let memory = self.ipc().allocate(0, u64::from(slots) * SLOT)?;
        let timeout = words.number_of("timeout").map_or(Duration::from_secs(10), Duration::from_millis);
        let ring = self.ipc().ring(memory).slots(slots).timeout(timeout).start()?;
        let descriptor = ring.descriptor().to_string();
        self.rings.ring = Some(ring);
        Ok(descriptor)
    }

    /// `ring-readers COUNT MS`: waits for so many.
    pub(super) fn ring_readers(&mut self, words: &Words<'_>) -> Result<String> {
        self.writer().wait_readers(words.number(0), words.time(1))?;
        Ok(String::new())
    }

    /// `ring-count`: how many readers there are.
    pub(super) fn ring_count(&mut self) -> Result<String> {
        Ok(self.writer().readers().to_string())
    }

    /// `ring-publish COUNT [pause=US]`: so many sequences; the stream pauses within each.
    pub(super) fn ring_publish(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let half = TensorLayout::contiguous(Dtype::U8, [SLOT / 2])?;
        let halves = TensorTable::packed(1, [("first", half.clone()), ("second", half)])?;
        for _ in 0..words.number(0) {
            let slot = self.writer().write(&stream)?;
            let byte = slot.sequence() as u8;
            slot.tensor(&halves, "first")?.view_mut::<u8, _>(&stream)?.fill_bytes(byte)?;
            stream.delay(Duration::from_micros(words.number_of("pause").unwrap_or(0)))?;
            slot.tensor(&halves, "second")?.view_mut::<u8, _>(&stream)?.fill_bytes(byte)?;
            slot.publish(&stream)?;
        }
        Ok(String::new())
    }

    /// `ring-publish-now COUNT`: so many sequences, by the host, whose bytes were written by a stream that has finished.
    pub(super) fn ring_publish_now(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        for _ in 0..words.number(0) {
            self.writer().wait_writable(Duration::from_secs(10))?;
            let mut slot = self.writer().write(&stream)?;
            let byte = slot.sequence() as u8;
            slot.view_mut::<u8, _>(&stream)?.fill_bytes(byte)?;
            stream.synchronize()?;
            slot.publish_now()?;
        }
        Ok(String::new())
    }

    /// `ring-write`: a slot that is given back.
    pub(super) fn ring_write(&mut self) -> Result<String> {
        let stream = self.stream()?;
        Ok(self.writer().write(&stream)?.sequence().to_string())
    }

    /// `ring-writable MS`: waits on the host for the next slot.
    pub(super) fn ring_writable(&mut self, words: &Words<'_>) -> Result<String> {
        self.writer().wait_writable(words.time(0))?;
        Ok(String::new())
    }

    /// `ring-behind`: process and sequence of each reader that the next write waits for.
    pub(super) fn ring_behind(&mut self) -> Result<String> {
        let behind = self.writer().readers_behind();
        Ok(behind.iter().map(|one| format!("{}:{}", one.pid, one.sequence)).collect::<Vec<_>>().join(" "))
    }

    /// `ring-dismiss PID`
    pub(super) fn ring_dismiss(&mut self, words: &Words<'_>) -> Result<String> {
        let pid = words.number(0) as u32;
        let behind = self.writer().readers_behind();
        let reader = behind.iter().find(|one| one.pid == pid).expect("it is behind");
        Ok(self.writer().dismiss(reader.lease).to_string())
    }

    /// `ring-close MS`
    pub(super) fn ring_close(&mut self, words: &Words<'_>) -> Result<String> {
        self.rings.ring.take().expect("there is a ring").close(words.time(0))?;
        Ok(String::new())
    }

    /// `ring-join DESCRIPTOR`: the sequence that it begins with.
    pub(super) fn ring_join(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let descriptor = words.name(0).parse()?;
        let reader = self.ipc().open_ring(&descriptor).on(&stream)?;
        let start = reader.sequence().to_string();
        self.rings.reader = Some(reader);
        Ok(start)
    }

    /// `ring-next`: takes a slot, whose sequence is the answer.
    pub(super) fn ring_next(&mut self) -> Result<String> {
        let stream = self.stream()?;
        let slot = self.reader().next(&stream)?;
        let sequence = slot.sequence().to_string();
        self.rings.slots.push(slot);
        Ok(sequence)
    }

    /// `ring-release`: the oldest slot that was taken.
    pub(super) fn ring_release(&mut self) -> Result<String> {
        let stream = self.stream()?;
        self.rings.slots.remove(0).release(&stream)?;
        Ok(String::new())
    }

    /// `ring-release-elsewhere`: the oldest slot that was taken, on a stream of its own, which is waited for.
    pub(super) fn ring_release_elsewhere(&mut self) -> Result<String> {
        let stream = self.ipc().create_stream(0)?;
        self.rings.slots.remove(0).release(&stream)?;
        stream.synchronize()?;
        Ok(String::new())
    }

    /// `ring-view`: views the oldest slot that was taken.
    pub(super) fn ring_view(&mut self) -> Result<String> {
        let stream = self.stream()?;
        self.rings.slots[0].view::<u8, _>(&stream)?;
        Ok(String::new())
    }

    /// `ring-reader-check`: whether everything that was released had been published.
    pub(super) fn ring_reader_check(&mut self) -> Result<String> {
        self.reader().check()?;
        Ok(String::new())
    }

    /// `ring-consume`: reads slots until the writer closes the ring, by the loop that the documentation shows. Returns the
    /// number of slots read.
    pub(super) fn ring_consume(&mut self) -> Result<String> {
        let stream = self.stream()?;
        let mut read = || -> Result<(u64, Vec<u8>)> {
            let slot = self.reader().next(&stream)?;
            let bytes = slot.view::<u8, _>(&stream)?.to_vec()?;
            let sequence = slot.sequence();
            slot.release(&stream)?;
            Ok((sequence, bytes))
        };
        let mut count = 0_u64;
        loop {
            match read() {
                Ok((sequence, bytes)) if bytes.iter().all(|byte| *byte == sequence as u8) => count += 1,
                Ok((sequence, bytes)) => {
                    return Err(Error::Protocol(format!(
                        "sequence {sequence} was read as {:?}",
                        &bytes[..8]
                    )));
                }
                Err(Error::RingClosed { .. }) => return Ok(count.to_string()),
                Err(error) => return Err(error),
            }
        }
    }

    /// `ring-check`: the oldest slot that was taken.
    pub(super) fn ring_check(&mut self) -> Result<String> {
        self.rings.slots[0].check()?;
        Ok(String::new())
    }

    /// `ring-drop-slots`
    pub(super) fn ring_drop_slots(&mut self) -> Result<String> {
        self.rings.slots.clear();
        Ok(String::new())
    }

    /// `ring-leave`
    pub(super) fn ring_leave(&mut self) -> Result<String> {
        self.rings.slots.clear();
        self.rings.reader = None;
        Ok(String::new())
    }

    /// `ring-read COUNT MS`: takes so many sequences, copies each on the stream and releases it; then looks at the copies. The
    /// sequence after the last.
    pub(super) fn ring_read(&mut self, words: &Words<'_>) -> Result<String> {
        let stream = self.stream()?;
        let mut copies = Vec::new();
        for _ in 0..words.number(0) {
            let copy = self.ipc().allocate(0, SLOT)?;
            let slot = self.reader().wait_next(words.time(1))?;
            copy.view_mut::<u8>(&stream)?.copy_from_device(&slot.view::<u8, _>(&stream)?)?;
            copies.push((slot.sequence(), copy));
            slot.release(&stream)?;
        }
        stream.synchronize()?;
        for (sequence, copy) in copies {
            let bytes = copy.view::<u8>(&stream)?.to_vec()?;
            if bytes.iter().any(|byte| *byte != sequence as u8) {
                return Err(Error::Protocol(format!("sequence {sequence} is torn: {bytes:?}")));
            }
        }
        Ok(self.reader().sequence().to_string())
    }

    /// `ring-forget`: everything, without waiting.
    pub(super) fn ring_forget(&mut self) -> Result<String> {
        self.rings = Rings::default();
        Ok(String::new())
    }

    /// Tries the guards that the parent has, and drops them.
    pub(super) fn try_rings_in_the_child(&mut self, told: fn(&str, Result<()>)) {
        const TIME: Duration = Duration::from_secs(5);
        let Some(stream) = self.stream.clone() else { return };
        let Rings { ring, reader, slots } = std::mem::take(&mut self.rings);
        if let Some(mut ring) = ring {
            told("ring-write", ring.write(&stream).map(drop));
            told("ring-writable", ring.wait_writable(TIME));
            told("ring-readers", ring.wait_readers(1, TIME));
            told("ring-close", ring.close(TIME));
        }
        if let Some(mut reader) = reader {
            told("ring-next", reader.next(&stream).map(drop));
            told("ring-wait-next", reader.wait_next(TIME).map(drop));
        }
        for slot in slots {
            told("ring-check", slot.check());
            let Err(refused) = slot.release(&stream) else { return told("ring-release", Ok(())) };
            told("ring-release-now", refused.into_slot().release_now().map_err(Error::from));
        }
    }

    fn writer(&mut self) -> &mut Ring {
        self.rings.ring.as_mut().expect("there is a ring")
    }

    fn reader(&mut self) -> &mut RingReader {
        self.rings.reader.as_mut().expect("it has joined")
    }
}
