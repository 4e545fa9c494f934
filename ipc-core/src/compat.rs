//! Names of before, which forward to the present ones.

use crate::ipc::Ipc;
use crate::patterns::ring::RingReadSlot;
use crate::sharing::ErrorWith;
use crate::sharing::bundle::{BundleBuilder, Draft};
use crate::sharing::import::Mapping;

#[doc(hidden)]
pub type BundleError = ErrorWith<Draft>;
#[doc(hidden)]
pub type ReleaseError<M = Mapping> = ErrorWith<M>;
#[doc(hidden)]
pub type RingReleaseError = ErrorWith<RingReadSlot>;
#[doc(hidden)]
pub type ShareError<O> = ErrorWith<O>;

impl<T> ErrorWith<T> {
    #[doc(hidden)]
    pub fn into_owner(self) -> T {
        self.into_inner()
    }

    #[doc(hidden)]
    pub fn into_mapping(self) -> T {
        self.into_inner()
    }

    #[doc(hidden)]
    pub fn into_slot(self) -> T {
        self.into_inner()
    }
}

impl ErrorWith<Draft> {
    #[doc(hidden)]
    pub fn into_builder(self, ipc: &Ipc) -> BundleBuilder<'_> {
        BundleBuilder::with_draft(ipc.session(), self.into_inner())
    }
}
