//! Descriptors that were tampered with, by the layout of `docs/spec/descriptor.md`.

use std::ops::Range;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use device_ipc_core::{BundleDescriptor, Descriptor, ProcessIdentity};

use crate::protocol::Identity;

const TOTAL: Range<usize> = 8..12;
const HOST: Range<usize> = 33..49;
const BOOT: Range<usize> = 49..65;
const PID_NAMESPACE: Range<usize> = 65..73;
const NET_NAMESPACE: Range<usize> = 73..81;
const PID: Range<usize> = 81..85;
const START_TIME: Range<usize> = 85..93;
const EXPORT: Range<usize> = 93..101;
const TOKEN: Range<usize> = 101..117;
const OFFSET: Range<usize> = 117..125;
const LEN: Range<usize> = 125..133;
const BACKEND_BYTES: usize = 135;
const ADDRESS_KIND: usize = 136;
const ADDRESS_BYTES: usize = 137;
const HEAD: usize = 141;
const CHECKSUM: usize = 4;

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
        self.bytes[TOKEN].try_into().expect("sixteen bytes")
    }

    /// The export's number.
    pub fn export(&self) -> u64 {
        self.long(EXPORT)
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

    /// The name of the exporter's abstract socket.
    pub fn address(&self) -> &[u8] {
        &self.bytes[self.address_range()]
    }

    /// With another secret.
    pub fn with_token(mut self, token: [u8; 16]) -> Self {
        self.bytes[TOKEN].copy_from_slice(&token);
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
        self.bytes[OFFSET].copy_from_slice(&offset.to_le_bytes());
        self.bytes[LEN].copy_from_slice(&len.to_le_bytes());
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
        let total = (self.bytes.len() + CHECKSUM) as u32;
        self.bytes[TOTAL].copy_from_slice(&total.to_le_bytes());
        self
    }

    fn address_range(&self) -> Range<usize> {
        let start = HEAD + usize::from(self.bytes[BACKEND_BYTES]);
        start..start + usize::from(self.bytes[ADDRESS_BYTES])
    }

    fn long(&self, range: Range<usize>) -> u64 {
        u64::from_le_bytes(self.bytes[range].try_into().expect("eight bytes"))
    }
}

/// CRC-32 as in Ethernet and zlib.
/// A bundle's descriptor as another process would have made it, by the layout of `docs/spec/bundle.md`.
pub fn bundle_of_another(descriptor: &BundleDescriptor, exporter: &ProcessIdentity) -> Vec<u8> {
    let mut bytes = descriptor.to_bytes();
    bytes.truncate(bytes.len() - CHECKSUM);
    bytes[60..64].copy_from_slice(&exporter.pid.to_le_bytes());
    bytes[64..72].copy_from_slice(&exporter.start_time.to_le_bytes());
    let checksum = crc32(&bytes);
    bytes.extend(checksum.to_le_bytes());
    BundleDescriptor::from_bytes(&bytes).expect("it reads well");
    bytes
}

fn crc32(bytes: &[u8]) -> u32 {
    let step = |sum: u32, byte: &u8| {
        (0..8).fold(sum ^ u32::from(*byte), |sum, _| (sum >> 1) ^ (0xedb8_8320 & (sum & 1).wrapping_neg()))
    };
    !bytes.iter().fold(!0, step)
}
