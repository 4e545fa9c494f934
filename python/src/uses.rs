//! The tensors that keep imported memory mapped, by name: for the messages about leases that a forgotten variable holds.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use crate::mapping_inner::MappingInner;
use crate::storages::Claim;

/// The numbers of tensors and exports to frameworks that use a mapping.
#[derive(Default)]
pub(crate) struct Uses {
    /// By the name of the tensor.
    named: Mutex<BTreeMap<String, usize>>,
    /// The views that were made of all tensors at a time, by the position of the tensor.
    views: OnceLock<Box<[AtomicUsize]>>,
}

impl MappingInner {
    /// Returns the names of the tensors in use.
    pub(crate) fn names_in_use(&self) -> Vec<String> {
        let named = self.uses.named.lock().unwrap_or_else(PoisonError::into_inner);
        let mut names: Vec<String> = named.keys().cloned().collect();
        drop(named);
        if let Some(views) = self.uses.views.get() {
            let used =
                self.contents.tensors().zip(views).filter(|(_, count)| count.load(Ordering::Relaxed) > 0);
            names.extend(used.map(|((name, _), _)| name.to_owned()));
            names.sort_unstable();
            names.dedup();
        }
        names
    }

    /// Counts a view of each tensor.
    pub(crate) fn count_views(&self) {
        for count in self.views() {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Counts that the view of a tensor has ended.
    pub(crate) fn uncount_view(&self, position: usize) {
        self.views()[position].fetch_sub(1, Ordering::Relaxed);
    }

    fn views(&self) -> &[AtomicUsize] {
        self.uses.views.get_or_init(|| self.contents.tensors().map(|_| AtomicUsize::new(0)).collect())
    }
}

/// A use of a mapping by a tensor.
pub(crate) struct Use {
    pub(crate) inner: Arc<MappingInner>,
    tensor: Used,
}

enum Used {
    Name(String),
    /// In a mapping that only its tensor has.
    Only,
    /// A storage in a mapping of several, which has a claim.
    Claimed {
        _claim: Claim,
    },
}

impl Use {
    pub(crate) fn new(inner: &Arc<MappingInner>, name: String) -> Arc<Self> {
        let mut named = inner.uses.named.lock().unwrap_or_else(PoisonError::into_inner);
        *named.entry(name.clone()).or_default() += 1;
        drop(named);
        Arc::new(Self { inner: Arc::clone(inner), tensor: Used::Name(name) })
    }

    /// A use by the one tensor that has the mapping, which is not counted.
    pub(crate) fn only(inner: &Arc<MappingInner>) -> Arc<Self> {
        Arc::new(Self { inner: Arc::clone(inner), tensor: Used::Only })
    }

    /// A use by a storage with a claim, which is not counted.
    pub(crate) fn claimed(inner: &Arc<MappingInner>, claim: Claim) -> Arc<Self> {
        Arc::new(Self { inner: Arc::clone(inner), tensor: Used::Claimed { _claim: claim } })
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        match &self.tensor {
            Used::Only | Used::Claimed { .. } => {}
            Used::Name(name) => {
                let mut named = self.inner.uses.named.lock().unwrap_or_else(PoisonError::into_inner);
                if let Some(count) = named.get_mut(name) {
                    *count -= 1;
                    if *count == 0 {
                        named.remove(name);
                    }
                }
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
    let is_of_export =
        |mapping: &device_ipc::Mapping| mapping.descriptor() == descriptor && !mapping.is_suspended();
    let of_export: Vec<_> =
        alive.iter().filter(|inner| inner.try_read(is_of_export).unwrap_or(false)).collect();
    let names = of_export.iter().flat_map(|inner| inner.names_in_use()).collect();
    (names, !of_export.is_empty())
}
