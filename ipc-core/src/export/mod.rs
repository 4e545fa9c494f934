//! The exporter's side: the guard, how it is made, and the table that the broker answers from.

mod guard;
mod share;
mod table;

pub use guard::{Export, Hanging};
pub use share::{ShareBuilder, ShareError};

pub(crate) use share::check_backend;
pub(crate) use table::{ExportTable, Importer, LocalGrant, OpenRequest, Shared};
