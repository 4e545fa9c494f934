//! The reasons for which an exporter refuses a request.

use serde::{Deserialize, Serialize};

use super::peer_text::short_detail;
use crate::model::access::Access;
use crate::model::error::{Error, ErrorKind};

/// The reason why a request was refused.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) enum Refusal {
    /// The export has been dropped. Numbers are never reused, so it existed.
    Dropped,
    /// The token is not the export's.
    WrongToken,
    /// The exporter does not allow the importer's user, whom the kernel reports.
    UserNotAllowed { uid: u32 },
    /// The export does not permit this access.
    Access { granted: Access },
    /// The memory was freed under a borrowed export.
    Stale { detail: String },
    /// An error of the exporter.
    Failed(Failure),
}

/// An error of the exporter, for the importer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Failure {
    pub(crate) kind: KindNumber,
    pub(crate) detail: String,
}

/// The number of a kind. A number that this version does not know is read as that of [`ErrorKind::System`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "u8", into = "u8")]
pub(crate) struct KindNumber(pub(crate) ErrorKind);

/// The kinds by their numbers, which `docs/spec/protocol.md` lists. A further kind has the next number.
const KINDS: [ErrorKind; 19] = [
    ErrorKind::System,
    ErrorKind::Backend,
    ErrorKind::Unsupported,
    ErrorKind::InvalidInput,
    ErrorKind::InvalidState,
    ErrorKind::InUse,
    ErrorKind::Descriptor,
    ErrorKind::Layout,
    ErrorKind::Placement,
    ErrorKind::NotFound,
    ErrorKind::OutOfMemory,
    ErrorKind::QuotaExceeded,
    ErrorKind::NotPermitted,
    ErrorKind::Stale,
    ErrorKind::Gone,
    ErrorKind::Closed,
    ErrorKind::Timeout,
    ErrorKind::Forked,
    ErrorKind::Protocol,
];

impl From<u8> for KindNumber {
    fn from(number: u8) -> Self {
        Self(KINDS.get(usize::from(number)).copied().unwrap_or(ErrorKind::System))
    }
}

impl From<KindNumber> for u8 {
    fn from(KindNumber(kind): KindNumber) -> Self {
        KINDS.iter().position(|known| *known == kind).unwrap_or(0) as Self
    }
}

impl Failure {
    pub(crate) fn quota(detail: String) -> Self {
        Self { kind: KindNumber(ErrorKind::QuotaExceeded), detail }
    }

    /// Returns the error of the importer, whose text bounds that of the exporter with this process id.
    pub(crate) fn into_error(self, pid: u32) -> Error {
        Error::Refused { pid, kind: self.kind.0, detail: short_detail(&self.detail) }
    }
}

impl From<&Error> for Failure {
    fn from(error: &Error) -> Self {
        Self { kind: KindNumber(error.kind()), detail: error.to_string() }
    }
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        match error {
            Error::ExportDropped { .. } => Self::Dropped,
            Error::StaleGeneration(detail) => Self::Stale { detail },
            error => Self::Failed(Failure::from(&error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{KINDS, KindNumber};
    use crate::model::error::ErrorKind;

    #[test]
    fn each_kind_has_its_number_and_unknown_numbers_are_errors_of_the_system() {
        for (number, kind) in KINDS.iter().enumerate() {
            let number = number as u8;
            assert_eq!((KindNumber::from(number).0, u8::from(KindNumber(*kind))), (*kind, number));
        }
        assert_eq!(KindNumber::from(KINDS.len() as u8), KindNumber(ErrorKind::System));
        assert_eq!(KindNumber::from(u8::MAX), KindNumber(ErrorKind::System));
    }
}
