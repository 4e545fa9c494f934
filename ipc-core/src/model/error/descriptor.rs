//! Errors of descriptors.

use std::fmt;

use super::Remedy;
use crate::model::layout::LayoutError;

/// The reason why bytes or a text are not a descriptor that this version can read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The text does not begin with the prefix of descriptors, or of grants.
    #[error("not a device-ipc {name}: expected the prefix {prefix:?}, found {found}; pass the {name} alone")]
    NotText {
        /// The expected kind: `descriptor`, `grant`.
        name: &'static str,
        /// The prefix of its text form.
        prefix: &'static str,
        /// A description of the text, with a few of its characters.
        found: String,
    },
    /// A character that does not occur in the text form, or not there.
    #[error(
        "the text is damaged at character {position}: found {found:?}; copy it whole, and nothing behind it"
    )]
    BadCharacter {
        /// The position after the prefix, counted from 0, without white space.
        position: usize,
        /// The character.
        found: char,
    },
    /// The bytes do not begin with the magic bytes of descriptors.
    #[error("not a device-ipc descriptor: wrong magic bytes")]
    BadMagic,
    /// The format version is not supported.
    #[error(
        "the descriptor has format {found}, and this library reads {readable}; update device-ipc in the {} process",
        if found.major > readable.major { "receiving" } else { "exporting" }
    )]
    Version {
        /// The version of the descriptor.
        found: FormatVersion,
        /// The version that this library reads.
        readable: FormatVersion,
    },
    /// The descriptor requires features that this version does not have.
    #[error("the descriptor uses features {flags:#06x} that this library does not know; update the receiver")]
    UnknownFeatures {
        /// The unknown flags.
        flags: u16,
    },
    /// A critical section that this version does not know.
    #[error(
        "the descriptor has a section of kind {kind} that this library does not know; update the receiver"
    )]
    UnknownSection {
        /// The kind of the section.
        kind: u16,
    },
    /// The descriptor names other memory than the caller expects.
    #[error("expected the descriptor of {expected}, found that of {found}; {remedy}")]
    Kind {
        /// The expected kind: `a ring`, `named tensors`.
        expected: &'static str,
        /// The kind found.
        found: &'static str,
        /// What opens it.
        remedy: Remedy,
    },
    /// Bytes are missing at the end. Complete bytes with a damaged length are [`BadChecksum`](Self::BadChecksum).
    #[error("the descriptor is cut off: {found} of {expected} bytes")]
    Truncated {
        /// The number of bytes found.
        found: usize,
        /// The expected number of bytes, as far as it is known.
        expected: usize,
    },
    /// Bytes are left over at the end.
    #[error("{extra} bytes follow the descriptor")]
    TrailingBytes {
        /// The number of extra bytes.
        extra: usize,
    },
    /// The descriptor exceeds the maximum size.
    #[error("the descriptor of {found} B exceeds the maximum size")]
    TooLarge {
        /// The size in bytes.
        found: usize,
    },
    /// The checksum is wrong.
    #[error("the descriptor is damaged: its checksum is wrong; copy it again")]
    BadChecksum,
    /// The value of a field is invalid.
    #[error("invalid descriptor: {field}: {why}")]
    BadField {
        /// The field.
        field: &'static str,
        /// The reason.
        why: String,
    },
    /// The tensor's layout is invalid, or does not fit the region.
    #[error("invalid descriptor: tensor: {0}")]
    Layout(LayoutError),
    /// The name of a tensor is invalid.
    #[error("invalid tensor name {name:?}: {why}")]
    TensorName {
        /// The name, or its beginning.
        name: String,
        /// The reason.
        why: &'static str,
    },
    /// The layout of a named tensor is invalid, or does not fit.
    #[error("invalid tensor {name:?}: {cause}")]
    Tensor {
        /// The name of the tensor.
        name: String,
        /// The reason.
        cause: LayoutError,
    },
    /// A text, or bytes, that are passed as a grant are not one, or that of another export.
    #[error("not a device-ipc grant: {why}; pass the text or the bytes of the grant unchanged")]
    BadGrant {
        /// Why not.
        why: &'static str,
    },
}

impl From<LayoutError> for DescriptorError {
    fn from(cause: LayoutError) -> Self {
        Self::Layout(cause)
    }
}

/// A format version. A reader of a major version reads all its minor versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct FormatVersion {
    /// A different number means a different layout.
    pub major: u8,
    /// A higher number means more fields at the end, which an older reader ignores.
    pub minor: u8,
}

impl fmt::Display for FormatVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}
