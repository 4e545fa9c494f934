//! Identifiers as types of their own.
//!
//! Addresses, streams and events are arguments of the same calls. A vendor's C interface gives all of them one
//! integer type, so that swapped arguments go unnoticed; with these types they do not compile.

use std::fmt;

/// A device address: the address at which memory is mapped in **this** process.
///
/// It has no meaning in other processes, and only the engine may dereference it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address(u64);

impl Address {
    /// Creates an address from a pointer value.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// Returns the value.
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the address `bytes` bytes behind this one. It wraps around at the end of the address space.
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
    /// Creates the identifier from a number that a C caller passed back.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// Returns the value.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// An event of one [`Machine`](crate::Machine); never zero, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventId(u64);

impl EventId {
    /// Creates the identifier from a number that a C caller passed back.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// Returns the value.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// A block of physical memory of one [`Machine`](crate::Machine); never zero, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u64);

impl BlockId {
    /// Creates the identifier from a number that a C caller passed back.
    pub const fn new(value: u64) -> Self {
        Self(value)
    }

    /// Returns the value.
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The access of work to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Access {
    /// Read access; stream work that writes fails with
    /// [`EngineError::ReadOnly`](crate::EngineError::ReadOnly).
    ReadOnly,
    /// Read and write access.
    ReadWrite,
}
