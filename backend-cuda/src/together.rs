//! Several calls for one device, one after the other.
//!
//! A first export is two of them: where the allocation lies, and its handle. The context is put in place once for both, by an
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
    /// Makes calls for a device together.
    pub(crate) fn call_together(&self, device: DeviceOrdinal, calls: &mut dyn FnMut()) {
        // Where it cannot be entered, each of the calls says why.
        let _current = self.driver().enter(device);
        let _remembering = Remembering::begin();
        calls();
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
