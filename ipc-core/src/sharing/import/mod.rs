//! The importer's side: import cache, builder, and guard.

mod addresses;
mod builder;
mod cache;
#[cfg(all(loom, test))]
mod cache_loom;
mod copy_policy;
mod ended_grants;
mod grant;
mod link;
mod link_pages;
mod mapped_tensors;
mod mapping;
mod mapping_source;
mod notices;
mod open;
mod open_export;
mod open_part;
mod own;
mod place;
mod pull_into;
mod reservation;
mod reserved;
mod reserved_open;
mod same_layout;
mod staged;
mod table;
mod tensor;
mod view_owner;

pub use builder::OpenBuilder;
pub use cache::CacheLimits;
pub use copy_policy::{CopyPolicy, CopyProgress};
pub use mapping::Mapping;
pub use reservation::Reservation;
pub use tensor::Tensor;

pub(crate) use builder::Openable;
pub(crate) use grant::{GrantReturn, UnusedGrant};
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) use link::Link;
pub(crate) use open::{Delivery, OpenOptions};
pub(crate) use open_export::Replicate;
pub(crate) use own::OwnMemory;
pub(crate) use reserved_open::KeeperAddress;
pub(crate) use table::ImportTable;
pub(crate) use view_owner::ViewOwner;
