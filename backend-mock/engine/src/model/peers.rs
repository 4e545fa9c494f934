//! Peer access between devices.
//!
//! Peer access is a property of the machine (NVLink, a PCIe switch, a cloud's isolation), is not symmetric
//! everywhere, and is the usual reason why a program that runs on one host fails on the next.

/// Peer access between physical devices.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PeerMatrix {
    /// Every device has access to every other.
    #[default]
    All,
    /// A device has access only to itself.
    None,
    /// Only these pairs `(from, to)`: device `from` may access memory of device `to`.
    Pairs(Vec<(usize, usize)>),
}

impl PeerMatrix {
    /// Returns whether device `from` may access memory of device `to`. A device may always access its own.
    pub fn allows(&self, from: usize, to: usize) -> bool {
        from == to
            || match self {
                Self::All => true,
                Self::None => false,
                Self::Pairs(pairs) => pairs.contains(&(from, to)),
            }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_directed() {
        let matrix = PeerMatrix::Pairs(vec![(0, 1)]);
        assert!(matrix.allows(0, 1));
        assert!(!matrix.allows(1, 0));
        assert!(matrix.allows(1, 1));
        assert!(!PeerMatrix::None.allows(0, 1));
        assert!(PeerMatrix::All.allows(1, 0));
    }
}
