//! Which device reaches the memory of which.
//!
//! Why: peer access is a property of the machine (NVLink, a PCIe switch, a
//! cloud's isolation), is not symmetric everywhere, and is the usual reason why
//! a program that runs on one host fails on the next.

/// Who may access whose memory, by physical device.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum PeerMatrix {
    /// Every device reaches every other.
    #[default]
    All,
    /// A device reaches only itself.
    None,
    /// Only these pairs `(from, to)`: device `from` may access memory of device `to`.
    Pairs(Vec<(usize, usize)>),
}

impl PeerMatrix {
    /// Whether device `from` may access memory of device `to`. A device always reaches itself.
    pub fn reaches(&self, from: usize, to: usize) -> bool {
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
    fn pairs_have_a_direction() {
        let matrix = PeerMatrix::Pairs(vec![(0, 1)]);
        assert!(matrix.reaches(0, 1));
        assert!(!matrix.reaches(1, 0));
        assert!(matrix.reaches(1, 1));
        assert!(!PeerMatrix::None.reaches(0, 1));
        assert!(PeerMatrix::All.reaches(1, 0));
    }
}
