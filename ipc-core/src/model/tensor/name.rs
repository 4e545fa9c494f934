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
mod tests {
    use super::*;

    #[test]
    fn name_is_inserted_once_and_found_at_its_position() {
        let names: Vec<String> = (0..5000).map(|index| format!("layer.{index}")).collect();
        let name_at = |position: u32| names[position as usize].as_str();
        for mut index in [NameIndex::default(), NameIndex::with_room_for(names.len())] {
            assert_eq!(index.find("layer.0", name_at), None);
            for position in 0..5000 {
                assert!(index.insert(position, name_at));
            }
            for position in 0..5000 {
                assert_eq!(index.find(name_at(position), name_at), Some(position));
            }
            assert_eq!(index.find("layer.5000", name_at), None);
            let again = |position: u32| if position == 5000 { "layer.17" } else { name_at(position) };
            assert!(!index.insert(5000, again), "it is there");
            assert_eq!(index.find("layer.17", name_at), Some(17));
        }
    }
}
