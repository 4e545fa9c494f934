//! Rings. Slots have 1024 B, each of which is the lowest byte of the sequence.

use std::os::fd::AsFd;
use std::task::Poll;
use std::time::Duration;

use device_ipc_core::{Dtype, Error, Result, Ring, RingReadSlot, RingReader, TensorLayout, TensorTable};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::{Server, gate_in};
use crate::agent::{Answer, Command, Gating, RingLoop};

/// Time limit of each wait of a reader's loop.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Bytes of a slot.
const SLOT: u64 = 1024;

/// The rings of an agent.
#[derive(Debug, Default)]
#[allow(missing_docs, reason = "the fields are called as the commands call their contents")]
pub struct Rings {
    pub ring: Option<Ring>,
    pub reader: Option<RingReader>,
    /// The slots taken for reading, the oldest first.
    pub slots: Vec<RingReadSlot>,
}

impl Rings {
    fn writer(&mut self) -> &mut Ring {
        self.ring.as_mut().expect("there is no ring")
    }

    fn reader(&mut self) -> &mut RingReader {
        self.reader.as_mut().expect("the agent has not joined a ring")
    }

    /// Keeps a slot and returns its sequence, or "closed" at the end of the ring.
    fn keep(&mut self, slot: Option<RingReadSlot>) -> Answer {
        let Some(slot) = slot else { return Answer::Text("closed".into()) };
        let sequence = slot.sequence();
        self.slots.push(slot);
        Answer::Number(sequence)
    }
}

impl Server {
    pub(super) fn carry_out_ring(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        let rings = &mut self.rings;
        match command {
            Command::Ring { slots, timeout } => {
                let memory = self.ipc.allocate(0, u64::from(slots) * SLOT)?;
                let timeout = timeout.unwrap_or(Duration::from_secs(10));
                let ring = self.ipc.ring(memory).slots(slots).timeout(timeout).start()?;
                let descriptor = ring.descriptor().to_string();
                rings.ring = Some(ring);
                Ok(Answer::Text(descriptor))
            }
            Command::RingReaders { count, timeout } => rings.writer().wait_readers(count, timeout).map(done),
            Command::RingCount => Ok(Answer::Number(rings.writer().readers() as u64)),
            Command::RingPublish { count, gate } => self.publish(count, gate).map(done),
            Command::RingPublishNow { count } => self.publish_now(count).map(done),
            Command::RingWrite => {
                let stream = self.stream(0)?;
                Ok(Answer::Number(self.rings.writer().write(&stream)?.sequence()))
            }
            Command::RingTryWrite => {
                let stream = self.stream(0)?;
                let slot = self.rings.writer().try_write(&stream)?;
                Ok(slot.map_or(Answer::Text("pending".into()), |slot| Answer::Number(slot.sequence())))
            }
            Command::RingPollWriter { timeout } => Ok(Answer::Truth(is_readable(rings.writer(), timeout))),
            Command::RingWritable { timeout } => rings.writer().wait_writable(timeout).map(done),
            Command::RingBehind => {
                let behind = rings.writer().readers_behind();
                let behind = behind.iter().map(|one| format!("{}:{}", one.pid, one.sequence));
                Ok(Answer::Text(behind.collect::<Vec<_>>().join(" ")))
            }
            Command::RingDismiss { pid } => {
                let behind = rings.writer().readers_behind();
                let reader = behind.iter().find(|one| one.pid == pid).expect("the reader is behind");
                Ok(Answer::Truth(rings.writer().dismiss(reader.lease)))
            }
            Command::RingClose { timeout } => {
                rings.ring.take().expect("there is no ring").close(timeout).map(done)
            }
            Command::RingForget => {
                *rings = Rings::default();
                Ok(Answer::Done)
            }
            other => self.carry_out_reader(other),
        }
    }

    fn carry_out_reader(&mut self, command: Command) -> Result<Answer> {
        let done = |()| Answer::Done;
        let rings = &mut self.rings;
        match command {
            Command::RingJoin { descriptor, device } => {
                let stream = self.stream(device)?;
                let reader = self.ipc.open_ring(&descriptor.parse()?).on(&stream)?;
                let start = reader.sequence();
                self.rings.reader = Some(reader);
                Ok(Answer::Number(start))
            }
            Command::RingNextAhead => {
                let stream = self.stream(0)?;
                let slot = self.rings.reader().next_ahead(&stream)?;
                Ok(self.rings.keep(Some(slot)))
            }
            Command::RingNext { timeout } => {
                let slot = rings.reader().next(timeout)?;
                Ok(rings.keep(slot))
            }
            Command::RingTryNext => match rings.reader().try_next()? {
                Poll::Ready(slot) => Ok(rings.keep(slot)),
                Poll::Pending => Ok(Answer::Text("pending".into())),
            },
            Command::RingPoll { timeout } => Ok(Answer::Truth(is_readable(rings.reader(), timeout))),
            Command::RingNextBytes { timeout } => {
                let stream = self.stream(0)?;
                let slot = published(self.rings.reader().next(timeout)?)?;
                let bytes = slot.view::<u8, _>(&stream)?.to_vec()?;
                slot.release(&stream)?;
                Ok(Answer::Bytes(bytes))
            }
            Command::RingRelease { elsewhere } => {
                let stream = if elsewhere { self.ipc.create_stream(0)? } else { self.stream(0)? };
                self.rings.slots.remove(0).release(&stream)?;
                if elsewhere {
                    stream.synchronize()?;
                }
                Ok(Answer::Done)
            }
            Command::RingView => {
                let stream = self.stream(0)?;
                self.rings.slots[0].view::<u8, _>(&stream)?;
                Ok(Answer::Done)
            }
            Command::RingCheck => rings.slots[0].check().map(done),
            Command::RingReaderCheck => rings.reader().check().map(done),
            Command::RingConsume { by } => self.consume(by).map(Answer::Number),
            Command::RingDropSlots => {
                rings.slots.clear();
                Ok(Answer::Done)
            }
            Command::RingLeave => {
                rings.slots.clear();
                rings.reader = None;
                Ok(Answer::Done)
            }
            Command::RingRead { count, timeout } => self.read_slots(count, timeout).map(Answer::Number),
            other => unreachable!("no family of commands has {other:?}"),
        }
    }

    fn publish(&mut self, count: u64, gate: Gating) -> Result<()> {
        let stream = self.stream(0)?;
        let half = TensorLayout::contiguous(Dtype::U8, [SLOT / 2])?;
        let halves = TensorTable::packed(1, [("first", half.clone()), ("second", half)])?;
        for _ in 0..count {
            let slot = self.rings.writer().write(&stream)?;
            let byte = slot.sequence() as u8;
            slot.tensor(&halves, "first")?.view_mut::<u8, _>(&stream)?.fill_bytes(byte)?;
            self.closed.extend(gate_in(&stream, gate)?);
            slot.tensor(&halves, "second")?.view_mut::<u8, _>(&stream)?.fill_bytes(byte)?;
            slot.publish()?;
        }
        Ok(())
    }

    fn publish_now(&mut self, count: u64) -> Result<()> {
        let stream = self.stream(0)?;
        for _ in 0..count {
            self.rings.writer().wait_writable(Duration::from_secs(10))?;
            let mut slot = self.rings.writer().write(&stream)?;
            let byte = slot.sequence() as u8;
            slot.view_mut::<u8, _>(&stream)?.fill_bytes(byte)?;
            stream.synchronize()?;
            slot.publish_now()?;
        }
        Ok(())
    }

    fn consume(&mut self, by: RingLoop) -> Result<u64> {
        let stream = self.stream(0)?;
        let reader = self.rings.reader();
        let mut count = 0;
        let mut process = |slot: RingReadSlot| -> Result<()> {
            let (sequence, bytes) = (slot.sequence(), slot.view::<u8, _>(&stream)?.to_vec()?);
            slot.release(&stream)?;
            count += 1;
            check_bytes(sequence, &bytes)
        };
        match by {
            RingLoop::Next => {
                while let Some(slot) = reader.next(TIMEOUT)? {
                    process(slot)?;
                }
            }
            RingLoop::Ahead => loop {
                match reader.next_ahead(&stream).and_then(&mut process) {
                    Ok(()) => {}
                    Err(Error::RingClosed { .. }) => break,
                    Err(error) => return Err(error),
                }
            },
            RingLoop::Poll => loop {
                match reader.try_next()? {
                    Poll::Ready(Some(slot)) => process(slot)?,
                    Poll::Ready(None) => break,
                    Poll::Pending if is_readable(reader, TIMEOUT) => {}
                    Poll::Pending => {
                        return Err(Error::Protocol(
                            "the reader's descriptor did not become readable".into(),
                        ));
                    }
                }
            },
        }
        Ok(count)
    }

    fn read_slots(&mut self, count: u64, timeout: Duration) -> Result<u64> {
        let stream = self.stream(0)?;
        let mut copies = Vec::new();
        for _ in 0..count {
            let copy = self.ipc.allocate(0, SLOT)?;
            let slot = published(self.rings.reader().next(timeout)?)?;
            copy.view_mut::<u8, _>(&stream)?.copy_from_device(&slot.view::<u8, _>(&stream)?)?;
            copies.push((slot.sequence(), copy));
            slot.release(&stream)?;
        }
        stream.synchronize()?;
        for (sequence, copy) in copies {
            check_bytes(sequence, &copy.view::<u8, _>(&stream)?.to_vec()?)?;
        }
        Ok(self.rings.reader().sequence())
    }
}

/// Returns the slot, where the ring has not ended.
fn published(slot: Option<RingReadSlot>) -> Result<RingReadSlot> {
    slot.ok_or_else(|| Error::Protocol("the ring was closed too early".into()))
}

/// Returns whether the descriptor becomes readable within a timeout.
fn is_readable(object: &impl AsFd, timeout: Duration) -> bool {
    let timeout = Timespec::try_from(timeout).expect("a test's timeout is short");
    poll(&mut [PollFd::new(object, PollFlags::IN)], Some(&timeout)).expect("it can be polled") == 1
}

fn check_bytes(sequence: u64, bytes: &[u8]) -> Result<()> {
    match bytes.iter().find(|byte| **byte != sequence as u8) {
        None => Ok(()),
        Some(byte) => Err(Error::Protocol(format!("sequence {sequence} has a byte {byte}"))),
    }
}
