//! Work on streams: copies, kernels, host functions, 64-bit words.
//!
//! Every call checks addresses and lengths at once, as a driver does. Whether the memory is still mapped and
//! accessible to the device is checked when the work runs; a violation fails the stream.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::state::Machine;
use crate::memory::{Mapping, Span};
use crate::model::{Address, EngineError, Operation, StreamId};
use crate::streams::{Stream, Work};
use crate::system::lock;

/// Poll interval of a wait for a word.
const POLL_INTERVAL: Duration = Duration::from_micros(50);
/// Poll interval during the first [`EARLY`] of a wait.
const EARLY_POLL_INTERVAL: Duration = Duration::from_micros(10);
const EARLY: Duration = Duration::from_millis(1);

impl Machine {
    /// Submits a copy of `len` bytes between any device memory of this process.
    ///
    /// Peer access is not needed: a driver stages such copies. The ranges may overlap.
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

    /// Submits setting `len` bytes to `byte`.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn fill(&self, address: Address, len: u64, byte: u8, stream: StreamId) -> Result<(), EngineError> {
        self.enter(Operation::Fill)?;
        let span = self.span(address, len)?;
        self.enqueue(stream, move |stream| span.fill(byte, stream.device))
    }

    /// Submits a copy of host bytes to device memory. The bytes are read during the call.
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

    /// Submits a copy of `len` bytes to the host, and waits for it.
    ///
    /// # Errors
    /// As [`copy`](Self::copy); the failure of the stream, which the stream then forgets; `NotPermitted` from a
    /// host function.
    pub fn read_to_host(&self, source: Address, len: u64, stream: StreamId) -> Result<Vec<u8>, EngineError> {
        self.enter_waiting(Operation::Read)?;
        let queue = self.stream(stream)?;
        let (send, receive) = mpsc::sync_channel(1);
        self.read_on(source, len, stream, move |bytes| {
            // Fails only if the reading thread has panicked.
            let _ = send.send(bytes);
        })?;
        let number = queue.submitted();
        receive.recv().or_else(|_| {
            queue.wait_until(number, None);
            queue.take_failure()?;
            Err(EngineError::Cancelled)
        })
    }

    /// Submits a copy of `len` bytes to the host, and passes them to `then` on the stream's thread. `then` is
    /// dropped without being called if the stream fails before.
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

    /// Submits a kernel that adds `value` to `count` 32-bit floats.
    ///
    /// # Errors
    /// As [`copy`](Self::copy), and `Misaligned` for an address that is not a multiple of 4. On the stream also
    /// `IllegalAddress` if the stream's device has no peer access to the memory.
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

    /// Submits a kernel that adds `value` to `count` bytes, wrapping around.
    ///
    /// # Errors
    /// As [`add_f32`](Self::add_f32), without `Misaligned`.
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

    /// Submits a host function, which runs on the stream's thread. Calls in it that wait for streams fail with
    /// `NotPermitted`, and a panic fails the stream. It is dropped without being called if the stream fails before.
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

    /// Submits a store of a 64-bit word. A process that reads the value sees all earlier writes of the stream.
    ///
    /// # Errors
    /// As [`add_f32`](Self::add_f32), with an alignment of 8.
    pub fn write_value64(&self, stream: StreamId, address: Address, value: u64) -> Result<(), EngineError> {
        self.enter(Operation::WriteValue)?;
        aligned(address, 8)?;
        let span = self.span(address, 8)?;
        self.enqueue_kernel(span, stream, move |span, device| span.store(value, device))
    }

    /// Makes a stream wait until a 64-bit word is at least `value`, unsigned.
    ///
    /// The wait ends only by the word, its revocation, or the drop of the machine, not by the termination of the
    /// process that should write the word.
    ///
    /// # Errors
    /// As [`write_value64`](Self::write_value64).
    pub fn wait_value64(&self, stream: StreamId, address: Address, value: u64) -> Result<(), EngineError> {
        self.enter(Operation::WaitValue)?;
        aligned(address, 8)?;
        let span = self.span(address, 8)?;
        let queue = self.stream(stream)?;
        let reachable = self.check_access(&span, queue.device);
        queue.enqueue(|| {
            Box::new(move |stream| {
                reachable?;
                let begun = Instant::now();
                while span.load(stream.device)? < value {
                    if stream.is_cancelled() {
                        return Err(EngineError::Cancelled);
                    }
                    std::thread::sleep(if begun.elapsed() < EARLY {
                        EARLY_POLL_INTERVAL
                    } else {
                        POLL_INTERVAL
                    });
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

    /// Returns the span of a 64-bit word, and a stream.
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
        let reachable = self.check_access(&span, queue.device);
        queue.enqueue(|| {
            Box::new(move |stream| {
                reachable?;
                kernel(&span, stream.device)
            })
        })
    }

    /// Checks that a kernel on `device` may access all of the memory.
    pub(crate) fn check_access(&self, span: &Span, device: usize) -> Result<(), EngineError> {
        for piece in span.pieces() {
            if !self.may_access(piece, device)? {
                return Err(EngineError::IllegalAddress { address: Address::new(piece.base()), device });
            }
        }
        Ok(())
    }

    /// Returns whether a kernel on `device` has peer access to the device in whose address space a mapping is, and
    /// to the home device of the memory.
    pub(crate) fn may_access(&self, piece: &Mapping, device: usize) -> Result<bool, EngineError> {
        // Access that is set for each device is checked when the work runs.
        if piece.device == device || piece.grants.is_some() {
            return Ok(true);
        }
        let from = self.device(device)?.physical;
        let mapped_on = self.device(piece.device)?.physical;
        let allowed = |to| self.config.peers.allows(from, to);
        Ok(allowed(mapped_on) && allowed(piece.identity.physical as usize))
    }
}

fn aligned(address: Address, alignment: u64) -> Result<(), EngineError> {
    if address.get().is_multiple_of(alignment) {
        Ok(())
    } else {
        Err(EngineError::Misaligned { address, alignment })
    }
}
