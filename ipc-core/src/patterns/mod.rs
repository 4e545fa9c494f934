//! Patterns built from exports: rings and channels.

pub(crate) mod channel;
pub(crate) mod ring;
