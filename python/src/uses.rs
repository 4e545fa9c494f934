//! The tensors that keep imported memory mapped, by name: for the messages about leases that a forgotten variable holds.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::mapping::MappingInner;

/// The number of tensors and exports to frameworks that use a mapping, by the name of the tensor.
#[derive(Default)]
pub(crate) struct Uses(Mutex<BTreeMap<String, usize>>);

impl Uses {
    /// Returns the names in use.
    pub(crate) fn names(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).keys().cloned().collect()
    }
}

/// A use of a mapping by a tensor of this name.
pub(crate) struct Use {
    pub(crate) inner: Arc<MappingInner>,
    name: String,
}

impl Use {
    pub(crate) fn new(inner: &Arc<MappingInner>, name: String) -> Arc<Self> {
        let mut uses = inner.uses.0.lock().unwrap_or_else(PoisonError::into_inner);
        *uses.entry(name.clone()).or_default() += 1;
        drop(uses);
        Arc::new(Self { inner: Arc::clone(inner), name })
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        let mut uses = self.inner.uses.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = uses.get_mut(&self.name) {
            *count -= 1;
            if *count == 0 {
                uses.remove(&self.name);
            }
        }
    }
}

/// The mappings of this process.
static MAPPINGS: Mutex<Vec<Weak<MappingInner>>> = Mutex::new(Vec::new());

/// Notes a mapping.
pub(crate) fn note(inner: &Arc<MappingInner>) {
    let mut mappings = MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner);
    if mappings.len() == mappings.capacity() {
        mappings.retain(|mapping| mapping.strong_count() > 0);
    }
    mappings.push(Arc::downgrade(inner));
}

/// Returns the names of the tensors by which this process has an export open, and whether a mapping of it is not closed.
pub(crate) fn of(descriptor: &device_ipc::Descriptor) -> (Vec<String>, bool) {
    let mappings = MAPPINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let alive: Vec<_> = mappings.iter().filter_map(Weak::upgrade).collect();
    // The last reference ends a lease, which is done without the lock.
    drop(mappings);
    let of_export: Vec<_> = alive.iter().filter(|inner| inner.mapping.descriptor() == descriptor).collect();
    let names = of_export.iter().flat_map(|inner| inner.uses.names()).collect();
    (names, !of_export.is_empty())
}
