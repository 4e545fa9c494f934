//! The table of device addresses.
//!
//! Every call that takes an address checks it against this table before it queues work, as a driver checks copies.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::mapping::Mapping;
use super::span::Span;
use crate::model::{Address, EngineError};

/// All memory that this process has allocated, opened or registered, by first address.
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

    /// Returns the mapping that contains the page of `address`.
    pub(crate) fn page_at(&self, address: Address) -> Option<&Arc<Mapping>> {
        let (_, mapping) = self.0.range(..=address.get()).next_back()?;
        mapping.contains_page_of(address).then_some(mapping)
    }

    /// Returns whether any byte of `start..end` is in the table.
    pub(crate) fn overlaps(&self, start: u64, end: u64) -> bool {
        let last = self.0.range(..end).next_back();
        last.is_some_and(|(base, mapping)| base + mapping.size() > start)
    }

    /// Returns the mapping that contains `address`.
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

    /// Returns the mapping that begins at `address`.
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

    /// Returns `len` bytes from `address` on, which may extend over adjacent mappings.
    ///
    /// # Errors
    /// `UnknownAddress`, `OutOfRange`, `InvalidValue` for 0 bytes.
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
        // SAFETY: the first piece contains the first byte, each further piece begins at the end of the one before, and
        // the last one contains the last byte.
        Ok(unsafe { Span::new(address, len, pieces) })
    }
}
