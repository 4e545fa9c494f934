//! The streams of a process.

use std::collections::HashMap;
use std::sync::Arc;

use super::stream::Stream;

/// The streams of a process.
#[derive(Debug, Default)]
pub(crate) struct StreamTable {
    pub(crate) live: HashMap<u64, Arc<Stream>>,
    /// Destroyed streams with unfinished work.
    pub(crate) draining: Vec<Arc<Stream>>,
    /// Default streams by device ordinal.
    pub(crate) defaults: HashMap<usize, u64>,
}

impl StreamTable {
    /// Cancels all streams and joins their threads.
    pub(crate) fn stop_all(&mut self) {
        let streams: Vec<_> =
            self.live.drain().map(|(_, stream)| stream).chain(self.draining.drain(..)).collect();
        streams.iter().for_each(|stream| stream.cancel());
        streams.iter().for_each(|stream| stream.join());
    }

    /// Returns the streams of a device, including destroyed ones with unfinished work.
    pub(crate) fn of_device(&mut self, device: usize) -> Vec<Arc<Stream>> {
        self.draining.retain(|stream| !stream.is_idle());
        self.live.values().chain(&self.draining).filter(|stream| stream.device == device).cloned().collect()
    }
}
