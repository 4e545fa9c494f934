//! The importer's side: what is open here, how it is opened, and the guard.

mod mapping;
mod open;
mod slots;
mod table;

pub use mapping::Mapping;
pub use open::OpenBuilder;

pub(crate) use table::ImportTable;
