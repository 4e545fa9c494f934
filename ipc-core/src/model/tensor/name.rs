//! Positions of tensors by name.

use std::hash::BuildHasher as _;

use hashbrown::hash_table::Entry;
use hashbrown::{DefaultHashBuilder, HashTable};

/// A hash index from names to their positions in a list that is stored elsewhere.
///
/// A peer may choose the names, so each index hashes with random seeds. Hashes never leave the process.
#[derive(Clone, Debug, Default)]
pub(crate) struct NameIndex {
    hasher: DefaultHashBuilder,
    positions: HashTable<u32>,
}

impl NameIndex {
    /// Creates an empty index with room for `count` names.
    pub(crate) fn with_room_for(count: usize) -> Self {
        Self { positions: HashTable::with_capacity(count), ..Self::default() }
    }

    /// Adds the name at `position` and returns whether it is new. `name_at` returns the name at a position.
    pub(crate) fn insert<'a>(&mut self, position: u32, name_at: impl Fn(u32) -> &'a str) -> bool {
        let Self { hasher, positions } = self;
        let (name, hash) = (name_at(position), |position: &u32| hasher.hash_one(name_at(*position)));
        match positions.entry(hash(&position), |known| name_at(*known) == name, hash) {
            Entry::Occupied(_) => false,
            Entry::Vacant(vacant) => {
                vacant.insert(position);
                true
            }
        }
    }

    /// Returns the position of a name.
    pub(crate) fn find<'a>(&self, name: &str, name_at: impl Fn(u32) -> &'a str) -> Option<u32> {
        self.positions.find(self.hasher.hash_one(name), |position| name_at(*position) == name).copied()
    }
}

#[cfg(test)]
mod tests;
