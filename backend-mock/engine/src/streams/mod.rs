//! Streams: queues of work that runs later, each on a thread.

mod stream;
mod table;

pub(crate) use stream::{Stream, Work, on_stream_thread};
pub(crate) use table::StreamTable;
