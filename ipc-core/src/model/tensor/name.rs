//! Names of tensors, found by a table of positions.

use super::hash::NameHasher;

/// Positions of names in a list that lies elsewhere: a hash table with open addressing. The names may come from anybody, so
/// the hash is seeded.
#[derive(Clone, Debug, Default)]
pub(crate) struct NameIndex {
    hasher: NameHasher,
    /// A power of two of them, or none; at most half of them are taken.
    slots: Vec<Option<Slot>>,
    taken: usize,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// Some of the hash's bits, so that hardly any other name is looked at.
    hash: u32,
    position: u32,
}

impl NameIndex {
    /// An empty one, with room for so many names.
    pub(crate) fn with_room_for(count: usize) -> Self {
        let mut index = Self::default();
        index.resize((count * 2).next_power_of_two());
        index
    }

    /// Adds the name at this position, unless it is that of another one. `name_at` gives the names by their positions.
    pub(crate) fn insert<'a>(&mut self, position: u32, name_at: impl Fn(u32) -> &'a str) -> bool {
        if (self.taken + 1) * 2 > self.slots.len() {
            self.resize((self.slots.len() * 2).max(16));
        }
        let name = name_at(position);
        let hash = self.hasher.hash(name);
        match self.look_for(hash, |known| name_at(known) == name) {
            Ok(_) => false,
            Err(free) => {
                self.slots[free] = Some(Slot { hash, position });
                self.taken += 1;
                true
            }
        }
    }

    /// The position of this name.
    pub(crate) fn find<'a>(&self, name: &str, name_at: impl Fn(u32) -> &'a str) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        let hash = self.hasher.hash(name);
        self.look_for(hash, |position| name_at(position) == name).ok()
    }

    /// The position that `is_it`, or the slot that is free for it. There is a free one.
    fn look_for(&self, hash: u32, is_it: impl Fn(u32) -> bool) -> Result<u32, usize> {
        let mask = self.slots.len() - 1;
        let mut at = hash as usize & mask;
        while let Some(slot) = self.slots[at] {
            if slot.hash == hash && is_it(slot.position) {
                return Ok(slot.position);
            }
            at = (at + 1) & mask;
        }
        Err(at)
    }

    fn resize(&mut self, slots: usize) {
        let old = std::mem::replace(&mut self.slots, vec![None; slots]);
        for slot in old.into_iter().flatten() {
            // All of them differ.
            if let Err(free) = self.look_for(slot.hash, |_| false) {
                self.slots[free] = Some(slot);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_found_at_its_position_and_none_twice() {
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
