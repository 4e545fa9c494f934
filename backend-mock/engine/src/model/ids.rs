//! Names for things that would otherwise all be a `u64`.
//!
//! Why: an address, a stream and an event travel side by side through every
//! call. A vendor's C interface gives them all one integer type, and swaps go
//! unnoticed; here they do not compile.

use std::fmt;

/// A device address: where memory is mapped in **this** process.
///
/// Meaningless in any other process. Nothing outside the engine may dereference it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(u64);

impl Address {
    /// The address with this value, as it came from a caller's pointer.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The value.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// The address `bytes` further on. Wraps around at the end of the address
    /// space, where no range is known.
    #[must_use]
    pub const fn add(self, bytes: u64) -> Self {
        Self(self.0.wrapping_add(bytes))
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Address({:#x})", self.0)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}", self.0)
    }
}

/// A stream of one [`Machine`](crate::Machine); never zero, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamId(u64);

impl StreamId {
    /// The stream with this value, as it came back from a C caller.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The value.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// An event of one [`Machine`](crate::Machine); never zero, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(u64);

impl EventId {
    /// The event with this value, as it came back from a C caller.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The value.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// A block of physical memory of one [`Machine`](crate::Machine); never zero, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u64);

impl BlockId {
    /// The block with this value, as it came back from a C caller.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// The value.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// What work may do with memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Mapped without the right to write; stream work that writes fails with
    /// [`EngineError::ReadOnly`](crate::EngineError::ReadOnly).
    ReadOnly,
    /// Mapped for both.
    ReadWrite,
}
