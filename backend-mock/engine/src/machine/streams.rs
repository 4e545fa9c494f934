//! The streams of a machine: create, synchronize, destroy.
//!
//! Work fails long after the call that submitted it. The stream keeps the first failure until a caller synchronizes
//! with it or queries it, and drops later work.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::state::Machine;
use crate::model::{EngineError, Operation, StreamId};
use crate::streams::{Stream, StreamTable};
use crate::system::lock;

impl Machine {
    /// Creates a stream. Its thread starts with its first work.
    ///
    /// # Errors
    /// `InvalidDevice`.
    pub fn create_stream(&self, device: usize) -> Result<StreamId, EngineError> {
        self.enter(Operation::CreateStream)?;
        self.device(device)?;
        Ok(self.add_stream(&mut lock(&self.streams), device))
    }

    /// Sets whether work behind a failure still runs, as on Ascend by default. Otherwise work is dropped until the
    /// failure is returned to a caller.
    ///
    /// # Errors
    /// `InvalidStream`.
    pub fn continue_on_failure(&self, stream: StreamId, continues: bool) -> Result<(), EngineError> {
        self.stream(stream)?.continues.store(continues, Ordering::Relaxed);
        Ok(())
    }

    /// Returns the device's default stream, and creates it at the first call. It cannot be destroyed.
    ///
    /// # Errors
    /// `InvalidDevice`.
    pub fn default_stream(&self, device: usize) -> Result<StreamId, EngineError> {
        let mut streams = lock(&self.streams);
        if let Some(&id) = streams.defaults.get(&device) {
            return Ok(StreamId::new(id));
        }
        self.enter(Operation::CreateStream)?;
        self.device(device)?;
        let id = self.add_stream(&mut streams, device);
        streams.defaults.insert(device, id.get());
        Ok(id)
    }

    /// Destroys a stream. Queued work still runs, and [`free`](Self::free) and
    /// [`synchronize_device`](Self::synchronize_device) wait for it; its failure is lost.
    ///
    /// # Errors
    /// `InvalidStream`; `InvalidValue` for a default stream.
    pub fn destroy_stream(&self, stream: StreamId) -> Result<(), EngineError> {
        self.enter(Operation::DestroyStream)?;
        let mut streams = lock(&self.streams);
        if streams.defaults.values().any(|&id| id == stream.get()) {
            return Err(EngineError::invalid_value("a default stream cannot be destroyed"));
        }
        let removed = streams.live.remove(&stream.get());
        let removed = removed.ok_or(EngineError::InvalidStream { stream: stream.get() })?;
        removed.close();
        streams.draining.retain(|stream| !stream.is_idle());
        streams.draining.push(removed);
        Ok(())
    }

    /// Drops the queued work of a stream. Running work continues.
    ///
    /// # Errors
    /// `InvalidStream`.
    pub fn discard_queued(&self, stream: StreamId) -> Result<(), EngineError> {
        self.stream(stream)?.discard_queued();
        Ok(())
    }

    /// Returns the ordinal of the stream's device.
    ///
    /// # Errors
    /// `InvalidStream`.
    pub fn device_of_stream(&self, stream: StreamId) -> Result<usize, EngineError> {
        self.stream(stream).map(|stream| stream.device)
    }

    /// Waits until all work submitted before the call is complete.
    ///
    /// # Errors
    /// `InvalidStream`; the failure of the stream, which the stream then forgets; `NotPermitted` from a host function.
    pub fn synchronize(&self, stream: StreamId) -> Result<(), EngineError> {
        self.enter_waiting(Operation::Synchronize)?;
        let stream = self.stream(stream)?;
        stream.wait_until(stream.submitted(), None);
        stream.take_failure()
    }

    /// Waits at most `limit` until all work submitted before the call is complete; returns `Ok(false)` if it is not.
    ///
    /// # Errors
    /// As [`synchronize`](Self::synchronize).
    pub fn synchronize_timeout(&self, stream: StreamId, limit: Duration) -> Result<bool, EngineError> {
        self.enter_waiting(Operation::Synchronize)?;
        let stream = self.stream(stream)?;
        let done = stream.wait_until(stream.submitted(), Instant::now().checked_add(limit));
        if done {
            stream.take_failure()?;
        }
        Ok(done)
    }

    /// Waits until all work submitted before the call to this process's streams of the device is complete.
    ///
    /// # Errors
    /// `InvalidDevice`; the first failure, while other streams keep theirs; `NotPermitted` from a host function.
    pub fn synchronize_device(&self, device: usize) -> Result<(), EngineError> {
        self.enter_waiting(Operation::Synchronize)?;
        self.device(device)?;
        self.wait_for_device(device).iter().try_for_each(|stream| stream.take_failure())
    }

    /// Waits until all work submitted before the call to this process's streams of all devices is complete. Streams
    /// keep their failures.
    ///
    /// # Errors
    /// `NotPermitted` from a host function.
    pub fn wait_for_streams(&self) -> Result<(), EngineError> {
        self.enter_waiting(Operation::Synchronize)?;
        for device in 0..self.devices.len() {
            self.wait_for_device(device);
        }
        Ok(())
    }

    /// Returns whether all submitted work is complete.
    ///
    /// # Errors
    /// `InvalidStream`; the failure of the stream, which the stream then forgets.
    pub fn query(&self, stream: StreamId) -> Result<bool, EngineError> {
        self.enter(Operation::Query)?;
        let stream = self.stream(stream)?;
        stream.take_failure()?;
        Ok(stream.is_idle())
    }

    pub(crate) fn stream(&self, stream: StreamId) -> Result<Arc<Stream>, EngineError> {
        let found = lock(&self.streams).live.get(&stream.get()).cloned();
        found.ok_or(EngineError::InvalidStream { stream: stream.get() })
    }

    /// Waits for the device's streams and returns them, with their failures.
    pub(crate) fn wait_for_device(&self, device: usize) -> Vec<Arc<Stream>> {
        let streams = lock(&self.streams).of_device(device);
        let numbers: Vec<u64> = streams.iter().map(|stream| stream.submitted()).collect();
        for (stream, number) in streams.iter().zip(numbers) {
            stream.wait_until(number, None);
        }
        streams
    }

    fn add_stream(&self, streams: &mut StreamTable, device: usize) -> StreamId {
        let id = self.next_id();
        let stream = Stream::new(id, device, self.config.latency, self.calls.clone());
        streams.live.insert(id, Arc::new(stream));
        StreamId::new(id)
    }
}
