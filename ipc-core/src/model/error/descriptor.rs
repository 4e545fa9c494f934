//! Why some bytes are not a descriptor.

use std::fmt;

use crate::model::layout::LayoutError;

/// Why bytes or a text are not a descriptor that this version can read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The text does not begin as a descriptor does.
    #[error("not a device-ipc descriptor: expected the prefix \"dipc1:\"")]
    NotText,
    /// A character that no descriptor holds.
    #[error("the descriptor's text is damaged at character {position}; copy it whole, as one line")]
    BadCharacter {
        /// Counted from 0, behind the prefix.
        position: usize,
    },
    /// The bytes do not begin as a descriptor does.
    #[error("these bytes are no device-ipc descriptor")]
    BadMagic,
    /// Another layout.
    #[error(
        "the descriptor has format {found}, and this library reads {readable}; update device-ipc in the {} process",
        if found.major > readable.major { "receiving" } else { "exporting" }
    )]
    Version {
        /// Its format.
        found: FormatVersion,
        /// What this library reads.
        readable: FormatVersion,
    },
    /// It needs something that this version does not know.
    #[error("the descriptor uses features {flags:#06x} that this library does not know; update the receiver")]
    UnknownFeatures {
        /// The bits.
        flags: u16,
    },
    /// A section that this version does not know, and must not skip.
    #[error(
        "the descriptor has a section of kind {kind} that this library does not know; update the receiver"
    )]
    UnknownSection {
        /// Its kind.
        kind: u16,
    },
    /// The descriptor names other memory than the caller expects.
    #[error("expected the descriptor of {expected}, found that of {found}; {remedy}")]
    Kind {
        /// The expected kind: `a ring`, `named tensors`.
        expected: &'static str,
        /// The kind found.
        found: &'static str,
        /// What to do with it.
        remedy: &'static str,
    },
    /// Bytes are missing at the end. Bytes that are all there, with a damaged length, are [`BadChecksum`](Self::BadChecksum).
    #[error("the descriptor is cut off: {found} of {expected} bytes")]
    Truncated {
        /// Bytes that there are.
        found: usize,
        /// Bytes that there should be, as far as can be told.
        expected: usize,
    },
    /// Bytes are left over at the end.
    #[error("{extra} bytes follow the descriptor")]
    TrailingBytes {
        /// How many.
        extra: usize,
    },
    /// Larger than any descriptor.
    #[error("{found} B is more than any descriptor has")]
    TooLarge {
        /// How many bytes.
        found: usize,
    },
    /// The checksum does not fit.
    #[error("the descriptor is damaged: its checksum does not fit; copy it again")]
    BadChecksum,
    /// A field makes no sense.
    #[error("the descriptor's {field} makes no sense: {why}")]
    BadField {
        /// Which.
        field: &'static str,
        /// Why.
        why: String,
    },
    /// The tensor's layout makes no sense, or does not fit the region.
    #[error("the descriptor's tensor makes no sense: {0}")]
    Layout(LayoutError),
    /// A tensor of a table or a bundle cannot be called so.
    #[error("a tensor cannot be called {name:?}: {why}")]
    TensorName {
        /// The name, or its beginning.
        name: String,
        /// Why not.
        why: &'static str,
    },
    /// The layout of a tensor of a table or a bundle makes no sense, or does not fit.
    #[error("the tensor {name:?} makes no sense: {cause}")]
    Tensor {
        /// Its name.
        name: String,
        /// Why.
        cause: LayoutError,
    },
}

impl From<LayoutError> for DescriptorError {
    fn from(cause: LayoutError) -> Self {
        Self::Layout(cause)
    }
}

/// The version of a layout. A reader of the same major version reads every minor one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FormatVersion {
    /// Another number: another layout.
    pub major: u8,
    /// A higher number: more fields at the end, which an older reader passes over.
    pub minor: u8,
}

impl fmt::Display for FormatVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
