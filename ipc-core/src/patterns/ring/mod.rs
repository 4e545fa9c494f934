//! Rings: memory that is shared once, and then written and read again and again, in slots.
//!
//! Why: a weight hand-over in buckets, a queue of activations or a KV cache that moves would otherwise share memory anew for
//! each round, or have both hosts wait. A ring is an export whose region is cut into slots; each reader's lease has its words
//! ([`Timeline`](crate::Timeline)), by which the writer's streams tell of publications and the readers' streams of releases.
//! `docs/spec/ring.md` specifies the words and the descriptor.
//!
//! | file | what it is |
//! |---|---|
//! | `builder` | how a ring is made, and how a reader joins |
//! | `writer` | [`Ring`], [`RingWriteSlot`] |
//! | `members` | the readers, as the writer knows them |
//! | `reader` | [`RingReader`]: joining, and waiting for publications |
//! | `read_slot` | [`RingReadSlot`] |
//! | `releases` | how a reader tells of releases, and leaves |
//! | `released` | what a reader has taken and released, in the order of sequences |
//! | `order` | host work that ends in any order, told in one |
//! | `slots` | where slots lie |

mod builder;
mod members;
mod order;
mod read_slot;
mod reader;
mod released;
mod releases;
mod slots;
mod writer;

pub use builder::{RingBuilder, RingOpenBuilder};
pub use members::ReaderPosition;
pub use read_slot::RingReadSlot;
pub use reader::RingReader;
pub use writer::{Ring, RingReaders, RingWriteSlot};
