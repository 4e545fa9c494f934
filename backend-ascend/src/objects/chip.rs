//! The family of a chip, which some rules depend on.

/// A family of chips in the manual ("Product Support" of each page), by the name of `aclrtGetSocName`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Chip {
    /// Atlas A2: `Ascend910B…`.
    A2,
    /// Atlas A3: `Ascend910_93…`.
    A3,
    /// `Ascend950…`.
    Ascend950,
    /// Atlas inference series: `Ascend310P…`.
    Ascend310P,
    /// Any other: 910 of the first generation, 310B, later chips.
    Other,
}

impl Chip {
    /// Returns the family of the chip with this name.
    pub(crate) fn of(soc: &str) -> Self {
        let name = soc.strip_prefix("Ascend").unwrap_or(soc);
        if name.starts_with("910_93") {
            Self::A3
        } else if let Some(variant) = name.strip_prefix("910B") {
            // The first generation also has a 910B. A2 names have a digit after it: 910B1, 910B2C, 910B4.
            if variant.starts_with(|next: char| next.is_ascii_digit()) { Self::A2 } else { Self::Other }
        } else if name.starts_with("950") {
            Self::Ascend950
        } else if name.starts_with("310P") {
            Self::Ascend310P
        } else {
            Self::Other
        }
    }

    /// Returns whether memory for access by other cards needs the page policies named P2P: on 310P
    /// (`aclrtIpcMemGetExportKey`, "Restrictions").
    pub(crate) const fn needs_peer_pages(self) -> bool {
        matches!(self, Self::Ascend310P)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn family_follows_from_the_name() {
        for (soc, chip) in [
            ("Ascend910B1", Chip::A2),
            ("Ascend910B2C", Chip::A2),
            ("Ascend910_9391", Chip::A3),
            ("Ascend910A", Chip::Other),
            ("Ascend910B", Chip::Other),
            ("Ascend310P3", Chip::Ascend310P),
            ("Ascend310B4", Chip::Other),
            ("Ascend950PR_9589", Chip::Ascend950),
            ("", Chip::Other),
            ("Ascend", Chip::Other),
        ] {
            assert_eq!(Chip::of(soc), chip, "{soc}");
        }
    }
}
