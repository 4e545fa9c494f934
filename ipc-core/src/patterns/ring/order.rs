//! Host work that ends in any order, told in the order in which it began.

/// Sequences that are done, of which those count before which all are.
#[derive(Debug)]
pub(super) struct InOrder {
    next: u64,
    early: Vec<u64>,
}

impl InOrder {
    pub(super) const fn from(next: u64) -> Self {
        Self { next, early: Vec::new() }
    }

    /// The first that is not done.
    pub(super) const fn next(&self) -> u64 {
        self.next
    }

    /// Notes that a sequence is done; the first that is not.
    pub(super) fn done(&mut self, sequence: u64) -> u64 {
        self.early.push(sequence);
        while let Some(at) = self.early.iter().position(|early| *early == self.next) {
            self.early.swap_remove(at);
            self.next += 1;
        }
        self.next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_early_counts_with_what_came_before_it() {
        let mut order = InOrder::from(5);
        let told: Vec<_> = [7, 5, 6, 9, 8].into_iter().map(|sequence| order.done(sequence)).collect();
        assert_eq!(told, [5, 6, 8, 8, 10]);
    }
}
