//! The section with the identity of the exporter, its backend and the address of its broker.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::section::{self, bad, take, take_head};
use super::{BackendName, Contents, DescriptorError};
use crate::backend::Access;
use crate::model::device::HostId;
use crate::os::process::ProcessIdentity;
use crate::wire::{BrokerAddress, MAX_ADDRESS_BYTES};

const ADDRESS_ABSTRACT: u8 = 1;
const ADDRESS_PATH: u8 = 2;
const ACCESS_READ_ONLY: u8 = 1;
const ACCESS_READ_WRITE: u8 = 2;

/// `IntoBytes` and `Unaligned` prove at compile time that it has no padding.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct ExporterHead {
    host: [u8; 16],
    boot: [u8; 16],
    pid_namespace: U64,
    net_namespace: U64,
    pid: U32,
    start_time: U64,
    access: u8,
    backend_bytes: u8,
    address_kind: u8,
    address_bytes: u8,
}

/// The contents of the section.
pub(super) struct Exporter {
    pub(super) identity: ProcessIdentity,
    pub(super) access: Access,
    pub(super) backend: BackendName,
    pub(super) broker: BrokerAddress,
}

/// Returns the size of the section's body in bytes.
pub(super) fn body_bytes(contents: &Contents) -> usize {
    size_of::<ExporterHead>() + contents.backend.as_str().len() + contents.broker.bytes().len()
}

pub(super) fn write(contents: &Contents, bytes: &mut Vec<u8>) {
    let Contents { backend, exporter, broker, .. } = contents;
    let (backend, address) = (backend.as_str(), broker.bytes());
    let head = ExporterHead {
        host: *exporter.host.as_bytes(),
        boot: exporter.boot,
        pid_namespace: U64::new(exporter.pid_namespace),
        net_namespace: U64::new(exporter.net_namespace),
        pid: U32::new(exporter.pid),
        start_time: U64::new(exporter.start_time),
        access: if contents.access.is_writable() { ACCESS_READ_WRITE } else { ACCESS_READ_ONLY },
        backend_bytes: backend.len() as u8,
        address_kind: match broker {
            BrokerAddress::Abstract(_) => ADDRESS_ABSTRACT,
            BrokerAddress::Path(_) => ADDRESS_PATH,
        },
        address_bytes: address.len() as u8,
    };
    section::begin(section::EXPORTER, body_bytes(contents), bytes);
    bytes.extend_from_slice(head.as_bytes());
    bytes.extend_from_slice(backend.as_bytes());
    bytes.extend_from_slice(address);
}

/// Reads the whole body.
pub(super) fn read(body: &mut &[u8]) -> Result<Exporter, DescriptorError> {
    let head = take_head::<ExporterHead>(body)?;
    let backend = read_backend(take(body, usize::from(head.backend_bytes))?)?;
    let broker = read_address(head.address_kind, take(body, usize::from(head.address_bytes))?)?;
    let identity = ProcessIdentity {
        host: HostId::from_bytes(head.host),
        boot: head.boot,
        pid_namespace: head.pid_namespace.get(),
        net_namespace: head.net_namespace.get(),
        pid: head.pid.get(),
        start_time: head.start_time.get(),
    };
    let access = match head.access {
        ACCESS_READ_ONLY => Access::ReadOnly,
        ACCESS_READ_WRITE => Access::ReadWrite,
        other => return Err(bad("access", &format!("kind {other} is not known"))),
    };
    Ok(Exporter { identity, access, backend, broker })
}

fn read_backend(bytes: &[u8]) -> Result<BackendName, DescriptorError> {
    BackendName::read(bytes).ok_or_else(|| bad("backend", "a name is 1 to 32 letters, digits, '-' or '_'"))
}

fn read_address(kind: u8, bytes: &[u8]) -> Result<BrokerAddress, DescriptorError> {
    if bytes.is_empty() || bytes.len() > MAX_ADDRESS_BYTES {
        return Err(bad(
            "socket address",
            &format!("it has {} bytes, not 1 to {MAX_ADDRESS_BYTES}", bytes.len()),
        ));
    }
    match kind {
        ADDRESS_ABSTRACT => Ok(BrokerAddress::Abstract(bytes.into())),
        ADDRESS_PATH if bytes[0] == b'/' && !bytes.contains(&0) => {
            Ok(BrokerAddress::Path(Path::new(OsStr::from_bytes(bytes)).into()))
        }
        ADDRESS_PATH => Err(bad("socket address", "it is no absolute path")),
        other => Err(bad("socket address", &format!("kind {other} is not known"))),
    }
}
