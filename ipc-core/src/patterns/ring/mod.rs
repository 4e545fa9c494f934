//! Rings: memory that is shared once, and then written and read repeatedly in slots.
//!
//! Without a ring, a weight hand-over in buckets, a queue of activations or a moving KV cache would share memory again for each
//! round, or make both hosts wait. A ring is an export whose region is divided into slots. The lease of each reader has shared
//! counters ([`Timeline`](crate::Timeline)): the writer's streams signal publications, and the readers' streams signal
//! releases. `docs/spec/ring.md` specifies the counters and the descriptor.
//!
//! | file | contents |
//! |---|---|
//! | `builder` | the builder of rings |
//! | `writer` | [`Ring`], [`RingWriteSlot`] |
//! | `members` | the writer's list of readers |
//! | `reader` | [`RingReader`] |
//! | `reader_state` | the state that a reader and its slots share, and waits for publications |
//! | `read_slot` | [`RingReadSlot`] |
//! | `releases` | signals of releases, and closing a reader |
//! | `released` | the taken and released slots of a reader, in the order of sequences |
//! | `order` | ordering of host work that completes out of order |
//! | `replica` | readers of rings on other hosts: a private ring, and the thread that pulls publications into it |
//! | `slots` | the addresses of slots |

mod builder;
mod members;
mod order;
mod read_slot;
mod reader;
mod reader_state;
mod released;
mod releases;
mod replica;
mod slots;
mod writer;

pub use builder::RingBuilder;
pub use members::ReaderPosition;
pub use read_slot::RingReadSlot;
pub use reader::RingReader;
pub use writer::{Ring, RingReaders, RingWriteSlot};
