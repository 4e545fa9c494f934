//! The forms of a grant that travels beside a descriptor. `docs/spec/grant.md` specifies it; the two change together.

use std::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::Token;
use super::descriptor::{DescriptorError, ExportId, MAX_REGIONS_SECTIONS};
use crate::model::error::Result;
use crate::model::one_or_many::OneOrMany;
use crate::os::process::ProcessIdentity;
use crate::wire::text::TextForm;

const MAGIC: [u8; 4] = *b"DIPG";

const VERSION: u8 = 1;

const CUT_OFF: &str = "it is damaged or cut off";

/// The bytes behind the last part: CRC-32 of all before them.
const CHECKSUM_BYTES: usize = 4;

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct GrantPreamble {
    magic: [u8; 4],
    version: u8,
    parts: u8,
    reserved: U16,
    pid: U32,
    start_time: U64,
    pid_namespace: U64,
}

#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct PartBytes {
    export: U64,
    token: [u8; 16],
}

/// The text form, with the maximum size of the binary form.
const FORM: TextForm = TextForm {
    prefix: "dipcg1:",
    name: "grant",
    max_bytes: size_of::<GrantPreamble>() + MAX_REGIONS_SECTIONS * size_of::<PartBytes>() + CHECKSUM_BYTES,
};

/// A right to open an export once, as one line of text or as bytes, which travel beside the descriptor over any transport.
///
/// [`Export::grant`](crate::Export::grant) makes one, and from then on it keeps the memory as a lease does, also when the
/// export is dropped. It ends when an open uses it ([`OpenBuilder::grant`](crate::OpenBuilder::grant)), when its receiver gives it
/// back ([`give_back`](Self::give_back)), or at its time limit. It opens nothing without the descriptor. The value itself is plain
/// bytes: cloning it copies the right to the same single open, and dropping it ends nothing.
///
/// `Display` and `FromStr` are the text form, [`to_bytes`](Self::to_bytes) and [`from_bytes`](Self::from_bytes) the binary one. Both
/// contain secrets, so treat them as a password. `Debug` does not show the secrets.
///
/// # Examples
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let ipc = device_ipc_core::Ipc::with_backend(device_ipc_mock::MockBackend::from_spec("devices=1")?);
/// use std::time::Duration;
///
/// let export = ipc.share(ipc.allocate(0, 1024)?).start()?;
/// let (text, grant) = (export.descriptor().to_string(), export.grant(Duration::from_secs(60))?.to_string());
/// drop(export); // the grant keeps the memory
/// // The importer, usually another process, receives both texts.
/// let grant: device_ipc_core::Grant = grant.parse()?;
/// assert_eq!(ipc.open(&text.parse()?).grant(&grant)?.at_home()?.len(), 1024);
/// # Ok(())
/// # }
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Grant {
    exporter: GrantExporter,
    parts: OneOrMany<(ExportId, Token)>,
}

/// The fields of a process identity that distinguish the processes of one boot of a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GrantExporter {
    pid: u32,
    start_time: u64,
    pid_namespace: u64,
}

impl From<&ProcessIdentity> for GrantExporter {
    fn from(process: &ProcessIdentity) -> Self {
        let ProcessIdentity { pid, start_time, pid_namespace, .. } = *process;
        Self { pid, start_time, pid_namespace }
    }
}

impl Grant {
    pub(crate) fn new(exporter: &ProcessIdentity, parts: OneOrMany<(ExportId, Token)>) -> Self {
        Self { exporter: exporter.into(), parts }
    }

    pub(crate) const fn exporter(&self) -> GrantExporter {
        self.exporter
    }

    /// Returns a token for each part of the export.
    pub(crate) fn parts(&self) -> &[(ExportId, Token)] {
        &self.parts
    }

    /// Returns the bytes: 56 for an export of one home device, and 24 more for each further one.
    pub fn to_bytes(&self) -> Vec<u8> {
        let GrantExporter { pid, start_time, pid_namespace } = self.exporter;
        let preamble = GrantPreamble {
            magic: MAGIC,
            version: VERSION,
            parts: self.parts.len() as u8,
            reserved: U16::new(0),
            pid: U32::new(pid),
            start_time: U64::new(start_time),
            pid_namespace: U64::new(pid_namespace),
        };
        let size = size_of::<GrantPreamble>() + self.parts.len() * size_of::<PartBytes>() + CHECKSUM_BYTES;
        let mut bytes = Vec::with_capacity(size);
        bytes.extend_from_slice(preamble.as_bytes());
        for (export, token) in self.parts.iter() {
            let part = PartBytes { export: U64::new(export.0), token: token.to_bytes() };
            bytes.extend_from_slice(part.as_bytes());
        }
        bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
        bytes
    }

    /// Reads the bytes of a grant.
    ///
    /// # Errors
    ///
    /// [`Error::Descriptor`](crate::Error::Descriptor) with [`DescriptorError::BadGrant`]. That the bytes can be read does not say
    /// that the exporter knows the grant.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        Ok(parse(bytes)?)
    }
}

fn parse(bytes: &[u8]) -> Result<Grant, DescriptorError> {
    let bad = |why: &'static str| DescriptorError::BadGrant { why };
    if !bytes.starts_with(&MAGIC) {
        return Err(bad("it has other magic bytes"));
    }
    let damaged = || bad(CUT_OFF);
    let (covered, checksum) = bytes.split_last_chunk::<CHECKSUM_BYTES>().ok_or_else(damaged)?;
    if crc32fast::hash(covered).to_le_bytes() != *checksum {
        return Err(damaged());
    }
    let (preamble, parts) = GrantPreamble::ref_from_prefix(covered).map_err(|_| damaged())?;
    if preamble.version != VERSION {
        return Err(bad("it has a format of another version of this library"));
    }
    let count = usize::from(preamble.parts);
    let parts = <[PartBytes]>::ref_from_bytes(parts).map_err(|_| bad("its length is wrong"))?;
    if parts.len() != count || !(1..=MAX_REGIONS_SECTIONS).contains(&count) || preamble.reserved.get() != 0 {
        return Err(bad("its fields contradict each other"));
    }
    let exporter = GrantExporter {
        pid: preamble.pid.get(),
        start_time: preamble.start_time.get(),
        pid_namespace: preamble.pid_namespace.get(),
    };
    let part = |part: &PartBytes| (ExportId(part.export.get()), Token::from_bytes(part.token));
    Ok(Grant { exporter, parts: parts.iter().map(part).collect() })
}

impl fmt::Display for Grant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        FORM.write(&self.to_bytes(), f)
    }
}

impl std::str::FromStr for Grant {
    type Err = crate::model::error::Error;

    /// Decodes the text form. White space in it and around it, a byte order mark and quotes are ignored.
    fn from_str(text: &str) -> Result<Self> {
        let cut_off = |_: &[u8]| Some(DescriptorError::BadGrant { why: CUT_OFF });
        Ok(parse(&FORM.decode(text, cut_off)?)?)
    }
}

impl fmt::Debug for Grant {
    /// Without the tokens.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let exports: Vec<_> = self.parts.iter().map(|(export, _)| export).collect();
        f.debug_struct("Grant").field("pid", &self.exporter.pid).field("exports", &exports).finish()
    }
}

#[cfg(test)]
mod tests;
