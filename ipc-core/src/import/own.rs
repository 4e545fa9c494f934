//! Views of memory of this very process, that a guard keeps.

#![allow(unsafe_code, reason = "views are made of ranges that their guard keeps allocated")]

use std::sync::Arc;

use super::held::check_elements;
use crate::address::DeviceRange;
use crate::backend::DeviceIpc;
use crate::device::DeviceOrdinal;
use crate::error::{Error, Result};
use crate::export::check_backend;
use crate::interop::{ViewStream, ViewTypes};
use crate::process::Owner;
use crate::stream::BorrowedStream;
use crate::tensor::{Element, TensorLayout};

/// Memory that this process allocated, and that whoever has this keeps. It is always ready, and may be written.
pub(crate) struct OwnMemory {
    backend: Arc<dyn DeviceIpc>,
    device: DeviceOrdinal,
    /// Who keeps it, for an error.
    what: &'static str,
    owner: Owner,
}

impl OwnMemory {
    pub(crate) fn new(backend: Arc<dyn DeviceIpc>, device: DeviceOrdinal, what: &'static str) -> Self {
        Self { backend, device, what, owner: Owner::current() }
    }

    /// Elements of the memory, to be read by work on `stream`.
    pub(super) fn view<T: Element, M: ViewTypes>(
        &self,
        range: DeviceRange,
        layout: Option<&TensorLayout>,
        stream: &impl ViewStream<M>,
    ) -> Result<M::View<'_, T>> {
        self.check(stream.as_stream())?;
        check_elements::<T>(range, layout)?;
        // SAFETY: the view borrows what keeps the memory, the caller names bytes in it, and size and alignment have been
        // checked.
        unsafe { stream.view(range) }
    }

    /// Elements of the memory, to be read and written by work on `stream`.
    pub(crate) fn view_mut<T: Element, M: ViewTypes>(
        &self,
        range: DeviceRange,
        layout: Option<&TensorLayout>,
        stream: &impl ViewStream<M>,
    ) -> Result<M::ViewMut<'_, T>> {
        self.check(stream.as_stream())?;
        check_elements::<T>(range, layout)?;
        // SAFETY: as in `view`; what streams do with the memory at a time is for them to order.
        unsafe { stream.view_mut(range) }
    }

    fn check(&self, stream: BorrowedStream<'_>) -> Result<()> {
        self.owner.check()?;
        check_backend("the stream", stream.backend(), self.backend.info().name)?;
        if stream.device() != self.device {
            let (stream, expected) = (stream.device(), self.device);
            return Err(Error::WrongStream { stream, what: self.what, expected });
        }
        Ok(())
    }
}

impl std::fmt::Debug for OwnMemory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OwnMemory")
            .field("of", &self.what)
            .field("device", &self.device)
            .finish_non_exhaustive()
    }
}
