//! Patterns built from exports: rings, channels and keepers.

pub(crate) mod channel;
pub(crate) mod keeper;
pub(crate) mod ring;
