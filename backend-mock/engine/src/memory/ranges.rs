//! Which addresses are device memory.
//!
//! Why: every call that takes an address is checked against this table before
//! anything is queued, as a driver checks copies; the engine never trusts a number.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::mapping::Mapping;
use super::span::Span;
use crate::model::{Address, EngineError};

/// All memory that this process has allocated or opened, by its first address.
#[derive(Debug, Default)]
pub(crate) struct RangeTable(BTreeMap<u64, Arc<Mapping>>);

impl RangeTable {
    pub(crate) fn insert(&mut self, mapping: Arc<Mapping>) {
        self.0.insert(mapping.base(), mapping);
    }

    pub(crate) fn remove(&mut self, base: u64) -> Option<Arc<Mapping>> {
        self.0.remove(&base)
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Arc<Mapping>> {
        self.0.values()
    }

    /// The mapping that shows the page in which the byte at `address` lies.
    pub(crate) fn page_at(&self, address: Address) -> Option<&Arc<Mapping>> {
        let (_, mapping) = self.0.range(..=address.get()).next_back()?;
        mapping.shows(address).then_some(mapping)
    }

    /// Whether any byte from `start` to before `end` is known.
    pub(crate) fn overlaps(&self, start: u64, end: u64) -> bool {
        let last = self.0.range(..end).next_back();
        last.is_some_and(|(base, mapping)| base + mapping.size() > start)
    }

    /// The mapping in which the byte at `address` lies.
    ///
    /// # Errors
    /// `UnknownAddress`.
    pub(crate) fn find(&self, address: Address) -> Result<&Arc<Mapping>, EngineError> {
        self.0
            .range(..=address.get())
            .next_back()
            .map(|(_, mapping)| mapping)
            .filter(|mapping| address.get() - mapping.base() < mapping.size())
            .ok_or(EngineError::UnknownAddress { address })
    }

    /// The mapping that begins at `address`.
    ///
    /// # Errors
    /// `UnknownAddress`, `NotBase`.
    pub(crate) fn at_base(&self, address: Address) -> Result<&Arc<Mapping>, EngineError> {
        let mapping = self.find(address)?;
        if mapping.base() != address.get() {
            return Err(EngineError::NotBase { address, base: Address::new(mapping.base()) });
        }
        Ok(mapping)
    }

    /// `len` bytes from `address` on, which may run through neighbours.
    ///
    /// # Errors
    /// `UnknownAddress`, `OutOfRange`, `InvalidValue` for no bytes at all.
    pub(crate) fn span(&self, address: Address, len: u64) -> Result<Span, EngineError> {
        let first = self.find(address)?;
        let beyond =
            || EngineError::OutOfRange { address, len, base: Address::new(first.base()), size: first.size() };
        if len == 0 {
            return Err(EngineError::invalid_value("work on 0 bytes"));
        }
        let end = address.get().checked_add(len).ok_or_else(beyond)?;
        let mut pieces = vec![first.clone()];
        let mut reached = first.base() + first.size();
        while reached < end {
            let next = self.0.get(&reached).ok_or_else(beyond)?;
            reached += next.size();
            pieces.push(next.clone());
        }
        let len = usize::try_from(len).map_err(|_| beyond())?;
        // SAFETY: the first piece holds the first byte, each next one begins where the one before ends, and the
        // last reaches the end.
        Ok(unsafe { Span::new(address, len, pieces) })
    }
}
