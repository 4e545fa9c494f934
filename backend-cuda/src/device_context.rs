//! Drops of owners, callbacks and several calls for one device, within one entry of its context.
//!
//! A first export is two calls: where the allocation lies, and its handle. The context is put in place once for both, by an
//! entry around theirs ([`context`](crate::context)), and what memory the driver has said it to be is not asked again.

use std::cell::RefCell;

use device_ipc_core::{DeviceOrdinal, DevicePtr};

use crate::backend::CudaBackend;
use crate::export::Memory;

thread_local! {
    /// What memory the allocations at these addresses are of, as long as calls are made together.
    static FOUND: RefCell<Option<Vec<(DevicePtr, Memory)>>> = const { RefCell::new(None) };
}

/// What is found is remembered until this is dropped.
struct Remembering(Option<Vec<(DevicePtr, Memory)>>);

impl Remembering {
    fn begin() -> Self {
        Self(FOUND.replace(Some(Vec::new())))
    }
}

impl Drop for Remembering {
    fn drop(&mut self) {
        FOUND.set(self.0.take());
    }
}

/// The driver has said what memory the allocation at `base` is of.
pub(crate) fn found(base: DevicePtr, memory: Memory) {
    FOUND.with_borrow_mut(|found| found.iter_mut().for_each(|found| found.push((base, memory))));
}

/// What it has said, if that was just now.
pub(crate) fn what_was_found(base: DevicePtr) -> Option<Memory> {
    let at_base =
        |found: &Vec<(DevicePtr, Memory)>| found.iter().rev().find(|(ptr, _)| *ptr == base).copied();
    FOUND.with_borrow(|found| found.as_ref().and_then(at_base)).map(|(_, memory)| memory)
}

impl CudaBackend {
    /// Runs `body` with the primary context of a device current.
    pub(crate) fn run_in_context(&self, device: DeviceOrdinal, body: &mut dyn FnMut()) {
        // Also where the body leaves another context current, or takes ours away.
        let _caller = self.driver().keep_callers_context();
        let current = self.driver().enter_for_others(device);
        if let Err(error) = &current {
            // Calls of the backend say so themselves; an owner is dropped all the same.
            tracing::debug!(%error, %device, "the primary context cannot be entered");
        }
        let _remembering = Remembering::begin();
        body();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_found_is_forgotten_with_the_calls() {
        let (here, there) = (DevicePtr::new(0x1000), DevicePtr::new(0x2000));
        found(here, Memory::Plain);
        assert_eq!(what_was_found(here), None, "nobody calls together");
        let outer = Remembering::begin();
        found(here, Memory::Plain);
        {
            let _inner = Remembering::begin();
            assert_eq!(what_was_found(here), None);
            found(there, Memory::Foreign);
        }
        assert_eq!((what_was_found(here), what_was_found(there)), (Some(Memory::Plain), None));
        drop(outer);
        assert_eq!(what_was_found(here), None);
    }
}
