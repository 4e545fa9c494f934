//! Ordering of host work that completes out of order.

/// Completed sequences, reported in order: a sequence counts once all earlier ones are complete.
#[derive(Debug)]
pub(super) struct CompletionOrder {
    next: u64,
    early: Vec<u64>,
}

impl CompletionOrder {
    pub(super) const fn from(next: u64) -> Self {
        Self { next, early: Vec::new() }
    }

    /// Returns the first incomplete sequence.
    pub(super) const fn next(&self) -> u64 {
        self.next
    }

    /// Records the completion of a sequence and returns the first incomplete one.
    pub(super) fn complete(&mut self, sequence: u64) -> u64 {
        self.early.push(sequence);
        while let Some(at) = self.early.iter().position(|early| *early == self.next) {
            self.early.swap_remove(at);
            self.next += 1;
        }
        self.next
    }
}

#[cfg(test)]
mod tests;
