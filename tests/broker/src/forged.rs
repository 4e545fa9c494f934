//! Descriptors that were tampered with, by the layout of `docs/spec/descriptor.md`.

use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use device_ipc_core::{Descriptor, ProcessIdentity};

use crate::protocol::{Access, Identity, Open, Stage};

const TOTAL: Range<usize> = 8..12;
/// The exporter's section begins behind the envelope's first fields, and the body of each section behind its head.
const SECTION_HEAD: usize = 8;
const EXPORTER: usize = 12 + SECTION_HEAD;
const EXPORTER_BYTES: Range<usize> = 16..20;
const HOST: Range<usize> = EXPORTER..EXPORTER + 16;
const BOOT: Range<usize> = EXPORTER + 16..EXPORTER + 32;
const PID_NAMESPACE: Range<usize> = EXPORTER + 32..EXPORTER + 40;
const NET_NAMESPACE: Range<usize> = EXPORTER + 40..EXPORTER + 48;
const PID: Range<usize> = EXPORTER + 48..EXPORTER + 52;
const START_TIME: Range<usize> = EXPORTER + 52..EXPORTER + 60;
const BACKEND_BYTES: usize = EXPORTER + 61;
const ADDRESS_KIND: usize = EXPORTER + 62;
const ADDRESS_BYTES: usize = EXPORTER + 63;
const HEAD: usize = EXPORTER + 64;
/// In the section of regions.
const EXPORT: Range<usize> = 0..8;
const TOKEN: Range<usize> = 8..24;
/// In the section of the region.
const OFFSET: Range<usize> = 0..8;
const LEN: Range<usize> = 8..16;
const CHECKSUM: usize = 4;

const REGIONS: u16 = 2;
const REGION: u16 = 3;

/// A descriptor whose fields can be read and changed; [`finish`](Self::finish) makes the checksum right again.
#[derive(Clone, Debug)]
pub struct Forged {
    bytes: Vec<u8>,
}

impl Forged {
    /// A copy.
    pub fn of(descriptor: &Descriptor) -> Self {
        let mut bytes = descriptor.to_bytes();
        bytes.truncate(bytes.len() - CHECKSUM);
        Self { bytes }
    }

    /// The descriptor.
    pub fn finish(&self) -> Descriptor {
        let mut bytes = self.bytes.clone();
        bytes.extend(crc32(&self.bytes).to_le_bytes());
        Descriptor::from_bytes(&bytes).expect("it reads well")
    }

    /// The secret.
    pub fn token(&self) -> [u8; 16] {
        self.bytes[self.in_section(REGIONS, TOKEN)].try_into().expect("sixteen bytes")
    }

    /// The export's number.
    pub fn export(&self) -> u64 {
        self.long(self.in_section(REGIONS, EXPORT))
    }

    /// The exporter.
    pub fn exporter(&self) -> Identity {
        Identity {
            host: self.bytes[HOST].try_into().expect("sixteen bytes"),
            boot: self.bytes[BOOT].try_into().expect("sixteen bytes"),
            pid_namespace: self.long(PID_NAMESPACE),
            net_namespace: self.long(NET_NAMESPACE),
            pid: u32::from_le_bytes(self.bytes[PID].try_into().expect("four bytes")),
            start_time: self.long(START_TIME),
        }
    }

    /// Returns a request for a lease on the export.
    pub fn open(&self, request: u64) -> Open {
        let (export, token, access) = (self.export(), self.token(), Access::ReadWrite);
        Open { request, export, token, grant: None, access, on: 0, peer: Vec::new(), like: None }
    }

    /// Returns a request for a copy of these spans, or of all bytes.
    pub fn stage(&self, request: u64, spans: &[(u32, u64, u64)]) -> Stage {
        Stage { request, export: self.export(), token: self.token(), grant: None, spans: spans.to_vec() }
    }

    /// The name of the exporter's abstract socket.
    pub fn address(&self) -> &[u8] {
        &self.bytes[self.address_range()]
    }

    /// With another secret.
    pub fn with_token(mut self, token: [u8; 16]) -> Self {
        let range = self.in_section(REGIONS, TOKEN);
        self.bytes[range].copy_from_slice(&token);
        self
    }

    /// Of another process.
    pub fn with_exporter(mut self, exporter: Identity) -> Self {
        self.bytes[HOST].copy_from_slice(&exporter.host);
        self.bytes[BOOT].copy_from_slice(&exporter.boot);
        self.bytes[PID_NAMESPACE].copy_from_slice(&exporter.pid_namespace.to_le_bytes());
        self.bytes[NET_NAMESPACE].copy_from_slice(&exporter.net_namespace.to_le_bytes());
        self.bytes[PID].copy_from_slice(&exporter.pid.to_le_bytes());
        self.bytes[START_TIME].copy_from_slice(&exporter.start_time.to_le_bytes());
        self
    }

    /// Of other bytes of the same allocations.
    pub fn with_region(mut self, offset: u64, len: u64) -> Self {
        let (offset_range, len_range) = (self.in_section(REGION, OFFSET), self.in_section(REGION, LEN));
        self.bytes[offset_range].copy_from_slice(&offset.to_le_bytes());
        self.bytes[len_range].copy_from_slice(&len.to_le_bytes());
        self
    }

    /// With another abstract name.
    pub fn with_address(self, name: &[u8]) -> Self {
        self.with_socket(1, name)
    }

    /// Of an exporter whose socket is this file.
    pub fn with_path(self, path: &Path) -> Self {
        self.with_socket(2, path.as_os_str().as_bytes())
    }

    fn with_socket(mut self, kind: u8, name: &[u8]) -> Self {
        let range = self.address_range();
        self.bytes.splice(range, name.iter().copied());
        self.bytes[ADDRESS_KIND] = kind;
        self.bytes[ADDRESS_BYTES] = name.len() as u8;
        let section = u32::from(self.bytes[BACKEND_BYTES]) + name.len() as u32 + (HEAD - EXPORTER) as u32;
        self.bytes[EXPORTER_BYTES].copy_from_slice(&section.to_le_bytes());
        let total = (self.bytes.len() + CHECKSUM) as u32;
        self.bytes[TOTAL].copy_from_slice(&total.to_le_bytes());
        self
    }

    fn address_range(&self) -> Range<usize> {
        let start = HEAD + usize::from(self.bytes[BACKEND_BYTES]);
        start..start + usize::from(self.bytes[ADDRESS_BYTES])
    }

    /// A range in the body of the first section of this kind.
    fn in_section(&self, kind: u16, range: Range<usize>) -> Range<usize> {
        let mut at = EXPORTER - SECTION_HEAD;
        loop {
            let head = &self.bytes[at..at + SECTION_HEAD];
            let bytes = u32::from_le_bytes(head[4..].try_into().expect("four bytes")) as usize;
            let body = at + SECTION_HEAD;
            if head[..2] == kind.to_le_bytes() {
                return body + range.start..body + range.end;
            }
            at = body + bytes;
        }
    }

    fn long(&self, range: Range<usize>) -> u64 {
        u64::from_le_bytes(self.bytes[range].try_into().expect("eight bytes"))
    }
}

/// A bundle's descriptor as another process would have made it, by the layout of `docs/spec/descriptor.md`.
pub fn bundle_of_another(descriptor: &Descriptor, exporter: &ProcessIdentity) -> Vec<u8> {
    let mut bytes = descriptor.to_bytes();
    bytes.truncate(bytes.len() - CHECKSUM);
    bytes[PID].copy_from_slice(&exporter.pid.to_le_bytes());
    bytes[START_TIME].copy_from_slice(&exporter.start_time.to_le_bytes());
    let checksum = crc32(&bytes);
    bytes.extend(checksum.to_le_bytes());
    Descriptor::from_bytes(&bytes).expect("it reads well");
    bytes
}

/// CRC-32 as in Ethernet and zlib.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |sum: u32, byte: &u8| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg()))
    };
    !bytes.iter().fold(!0, step)
}
