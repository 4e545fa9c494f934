//! What streams can be asked to do.
//!
//! Why every call checks twice: addresses and lengths are refused at once, as a driver refuses them;
//! whether the memory is still there, still granted and within the device's reach is known only
//! when the work runs, and fails the stream.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::state::Machine;
use crate::memory::{Mapping, Span};
use crate::model::{Address, EngineError, Operation, StreamId};
use crate::streams::{Stream, Work};
use crate::system::lock;

/// A word that has not come is looked at this often; within the first millisecond more often.
const POLL: Duration = Duration::from_micros(50);
const EARLY_POLL: Duration = Duration::from_micros(10);
const EARLY: Duration = Duration::from_millis(1);

impl Machine {
    /// Copies `len` bytes on a stream, from and to any device memory that this process has mapped. Peer access
    /// is not needed: a driver stages such copies. The two may overlap.
    ///
    /// # Errors
    /// `UnknownAddress`, `OutOfRange`, `InvalidValue` for 0 bytes, `InvalidStream`. On the stream: `IllegalAddress`,
    /// `Revoked`, `ReadOnly`.
    pub fn copy(
        &self,
        destination: Address,
        source: Address,
        len: u64,
        stream: StreamId,
    ) -> Result<(), EngineError> {
        self.enter(Operation::Copy)?;
        let destination = self.span(destination, len)?;
        let source = self.span(source, len)?;
        self.enqueue(stream, move |stream| destination.copy_from(&source, stream.device))
    }

    /// Sets `len` bytes on a stream.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn fill(&self, address: Address, len: u64, byte: u8, stream: StreamId) -> Result<(), EngineError> {
        self.enter(Operation::Fill)?;
        let span = self.span(address, len)?;
        self.enqueue(stream, move |stream| span.fill(byte, stream.device))
    }

    /// Writes bytes of the host on a stream. They are taken during the call.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn write_from_host(
        &self,
        destination: Address,
        bytes: &[u8],
        stream: StreamId,
    ) -> Result<(), EngineError> {
        self.enter(Operation::Write)?;
        let span = self.span(destination, bytes.len() as u64)?;
        let bytes = bytes.to_vec();
        self.enqueue(stream, move |stream| span.write(&bytes, stream.device))
    }

    /// Reads `len` bytes on a stream, behind all that is queued, and waits for them.
    ///
    /// # Errors
    /// As [`copy`](Self::copy), and what fails on the stream, which is thereby read; `NotPermitted` from a
    /// host function.
    pub fn read_to_host(&self, source: Address, len: u64, stream: StreamId) -> Result<Vec<u8>, EngineError> {
        self.enter_waiting(Operation::Read)?;
        let queue = self.stream(stream)?;
        let (send, receive) = mpsc::sync_channel(1);
        self.read_on(source, len, stream, move |bytes| {
            // Nobody listens if the reader's thread has gone, which is its affair.
            let _ = send.send(bytes);
        })?;
        let number = queue.submitted();
        receive.recv().or_else(|_| {
            queue.wait_until(number, None);
            queue.take_failure()?;
            Err(EngineError::Cancelled)
        })
    }

    /// Reads `len` bytes on a stream and hands them to `then` on the stream's thread. `then` is dropped unrun if the
    /// stream fails before.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn read_then(
        &self,
        source: Address,
        len: u64,
        stream: StreamId,
        then: impl FnOnce(Vec<u8>) + Send + 'static,
    ) -> Result<(), EngineError> {
        self.enter(Operation::Read)?;
        self.read_on(source, len, stream, then)
    }

    /// The kernel: adds `value` to `count` 32-bit floats on a stream.
    ///
    /// # Errors
    /// As [`copy`](Self::copy), and `Misaligned` for an address that is no multiple of 4. On the stream also
    /// `IllegalAddress` if the memory is on another device to which the stream's has no peer access.
    pub fn add_f32(
        &self,
        address: Address,
        count: u64,
        value: f32,
        stream: StreamId,
    ) -> Result<(), EngineError> {
        self.enter(Operation::Kernel)?;
        aligned(address, 4)?;
        let len = count.checked_mul(4).ok_or_else(|| EngineError::invalid_value("a count this large"))?;
        let span = self.span(address, len)?;
        self.enqueue_kernel(span, stream, move |span, device| span.add_f32(value, device))
    }

    /// The kernel for bytes: adds `value` to `count` bytes on a stream, wrapping around.
    ///
    /// # Errors
    /// As [`add_f32`](Self::add_f32), without an alignment.
    pub fn add_u8(
        &self,
        address: Address,
        count: u64,
        value: u8,
        stream: StreamId,
    ) -> Result<(), EngineError> {
        self.enter(Operation::Kernel)?;
        let span = self.span(address, count)?;
        self.enqueue_kernel(span, stream, move |span, device| span.add_u8(value, device))
    }

    /// Keeps a stream busy.
    ///
    /// # Errors
    /// `InvalidStream`.
    pub fn delay(&self, duration: Duration, stream: StreamId) -> Result<(), EngineError> {
        self.enter(Operation::Delay)?;
        self.enqueue(stream, move |stream| stream.sleep(duration))
    }

    /// Runs a function of the host on a stream's thread. It must not wait for a stream: such calls
    /// refuse with `NotPermitted`. A panic fails the stream. It is dropped unrun if the stream fails before.
    ///
    /// # Errors
    /// `InvalidStream`. On the stream: `HostFunctionPanicked`.
    pub fn host_fn(&self, function: Box<dyn FnOnce() + Send>, stream: StreamId) -> Result<(), EngineError> {
        self.enter(Operation::HostFn)?;
        self.enqueue(stream, move |_| {
            function();
            Ok(())
        })
    }

    /// Stores a 64-bit word on a stream. Who sees it, in whichever process, sees all that the stream wrote before.
    ///
    /// # Errors
    /// As [`add_f32`](Self::add_f32), with an alignment of 8.
    pub fn write_value64(&self, stream: StreamId, address: Address, value: u64) -> Result<(), EngineError> {
        self.enter(Operation::WriteValue)?;
        aligned(address, 8)?;
        let span = self.span(address, 8)?;
        self.enqueue_kernel(span, stream, move |span, device| span.store(value, device))
    }

    /// Makes a stream wait until a 64-bit word is `value` or more, unsigned. Nothing but the word, its
    /// revocation, or the end of the machine lets the stream go on: not the end of the process that should
    /// write it.
    ///
    /// # Errors
    /// As [`write_value64`](Self::write_value64).
    pub fn wait_value64(&self, stream: StreamId, address: Address, value: u64) -> Result<(), EngineError> {
        self.enter(Operation::WaitValue)?;
        aligned(address, 8)?;
        let span = self.span(address, 8)?;
        let queue = self.stream(stream)?;
        let reachable = self.in_reach(&span, queue.device);
        queue.enqueue(|| {
            Box::new(move |stream| {
                reachable?;
                let begun = Instant::now();
                while span.load(stream.device)? < value {
                    if stream.is_cancelled() {
                        return Err(EngineError::Cancelled);
                    }
                    std::thread::sleep(if begun.elapsed() < EARLY { EARLY_POLL } else { POLL });
                }
                Ok(())
            })
        })
    }

    fn read_on(
        &self,
        source: Address,
        len: u64,
        stream: StreamId,
        then: impl FnOnce(Vec<u8>) + Send + 'static,
    ) -> Result<(), EngineError> {
        let span = self.span(source, len)?;
        self.enqueue(stream, move |stream| {
            then(span.read(stream.device)?);
            Ok(())
        })
    }

    /// A 64-bit word, and the stream that shall work on it.
    pub(crate) fn word_on(
        &self,
        stream: StreamId,
        address: Address,
    ) -> Result<(Span, Arc<Stream>), EngineError> {
        aligned(address, 8)?;
        Ok((self.span(address, 8)?, self.stream(stream)?))
    }

    fn span(&self, address: Address, len: u64) -> Result<Span, EngineError> {
        lock(&self.memory).ranges.span(address, len)
    }

    fn enqueue(
        &self,
        stream: StreamId,
        work: impl FnOnce(&Stream) -> Result<(), EngineError> + Send + 'static,
    ) -> Result<(), EngineError> {
        self.stream(stream)?.enqueue(|| Box::new(work) as Work)
    }

    fn enqueue_kernel(
        &self,
        span: Span,
        stream: StreamId,
        kernel: impl FnOnce(&Span, usize) -> Result<(), EngineError> + Send + 'static,
    ) -> Result<(), EngineError> {
        let queue = self.stream(stream)?;
        let reachable = self.in_reach(&span, queue.device);
        queue.enqueue(|| {
            Box::new(move |stream| {
                reachable?;
                kernel(&span, stream.device)
            })
        })
    }

    /// Whether a kernel on `device` reaches all of the memory: both the device in whose address space it is,
    /// and the one where the bytes live.
    pub(crate) fn in_reach(&self, span: &Span, device: usize) -> Result<(), EngineError> {
        for piece in span.pieces() {
            if !self.mapping_in_reach(piece, device)? {
                return Err(EngineError::IllegalAddress { address: Address::new(piece.base()), device });
            }
        }
        Ok(())
    }

    /// As [`in_reach`](Self::in_reach), for one mapping.
    pub(crate) fn mapping_in_reach(&self, piece: &Mapping, device: usize) -> Result<bool, EngineError> {
        // Where access is set for each device, that says who reaches the memory, and is looked at when the work runs.
        if piece.device == device || piece.grants.is_some() {
            return Ok(true);
        }
        let from = self.device(device)?.physical;
        let mapped_on = self.device(piece.device)?.physical;
        let reaches = |to| self.config.peers.reaches(from, to);
        Ok(reaches(mapped_on) && reaches(piece.identity.physical as usize))
    }
}

fn aligned(address: Address, alignment: u64) -> Result<(), EngineError> {
    if address.get().is_multiple_of(alignment) {
        Ok(())
    } else {
        Err(EngineError::Misaligned { address, alignment })
    }
}
