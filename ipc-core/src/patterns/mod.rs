//! Patterns built from exports: rings, channels, claims and keepers.

pub(crate) mod channel;
mod claims;
pub(crate) mod keeper;
pub(crate) mod ring;
