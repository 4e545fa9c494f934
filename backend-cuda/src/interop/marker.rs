//! The marker of the implementations for cudarc's types.

/// A marker for the implementations for cudarc's types. Callers never name it; the compiler infers it.
#[derive(Clone, Copy, Debug)]
pub enum Cudarc {}
