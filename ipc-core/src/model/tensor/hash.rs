//! A hash of names that nobody outside of this process can foresee.
//!
//! Names may come from anybody, and a table has a million of them: who could make them fall into one place would have the
//! reader look at each beside each other. The standard library's hash is safe and takes longer than all else that is done
//! with a name; this one multiplies sixteen bytes at a time by secret numbers and folds the halves of the product, as
//! wyhash does.

use std::hash::{BuildHasher as _, RandomState};

/// The secret numbers of a table.
#[derive(Clone, Debug)]
pub(super) struct NameHasher {
    secrets: [u64; 3],
}

impl Default for NameHasher {
    /// At random, from where the standard library has it.
    fn default() -> Self {
        let random = RandomState::new();
        Self { secrets: [0_u8, 1, 2].map(|number| random.hash_one(number)) }
    }
}

impl NameHasher {
    pub(super) fn hash(&self, name: &str) -> u32 {
        let [first, second, last] = self.secrets;
        let (whole, rest) = name.as_bytes().as_chunks::<16>();
        let mut state = first ^ name.len() as u64;
        for bytes in whole {
            state = mix(state, second, bytes);
        }
        if !rest.is_empty() {
            let mut bytes = [0; 16];
            bytes[..rest.len()].copy_from_slice(rest);
            state = mix(state, second, &bytes);
        }
        fold(state ^ first, last) as u32
    }
}

fn mix(state: u64, secret: u64, bytes: &[u8; 16]) -> u64 {
    let both = u128::from_le_bytes(*bytes);
    fold(both as u64 ^ secret, (both >> 64) as u64 ^ state)
}

/// Both halves of the product.
fn fold(left: u64, right: u64) -> u64 {
    let product = u128::from(left) * u128::from(right);
    product as u64 ^ (product >> 64) as u64
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn names_that_differ_in_one_place_or_in_length_fall_apart() {
        let hasher = NameHasher::default();
        let mut names: Vec<String> =
            (0..10_000).map(|index| format!("model.layers.{index}.weight")).collect();
        names.extend((1..200).map(|length| "\0".repeat(length)));
        let low: HashSet<u32> = names.iter().map(|name| hasher.hash(name) & 0xffff).collect();
        // By chance about 9400 of the 65,536 places are taken.
        assert!(low.len() > 9000, "{} places", low.len());
        let all: HashSet<u32> = names.iter().map(|name| hasher.hash(name)).collect();
        assert!(all.len() + 3 > names.len(), "{} of {}", all.len(), names.len());
    }

    #[test]
    fn tables_have_secrets_of_their_own() {
        let hashes: HashSet<u32> = (0..8).map(|_| NameHasher::default().hash("embed.weight")).collect();
        assert!(hashes.len() > 1);
    }
}
