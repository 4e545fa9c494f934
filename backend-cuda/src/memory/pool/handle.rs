//! The bytes of a pool handle.
//!
//! A pool travels as a file descriptor, an allocation in it as 64 bytes that are valid only together with the pool. An
//! importer opens a pool once, so the bytes begin with a name by which it recognises the pool:
//!
//! | bytes | |
//! |---|---|
//! | 1 | the version of this layout, 1 |
//! | 16 | the pool's name, drawn at random when its first allocation is exported |
//! | 64 | `CUmemPoolPtrExportData` |

use device_ipc_core::{Error, Result};

use crate::bindings::api::PoolApi;
use crate::bindings::layout::POINTER_BYTES;
use crate::library::{CudaLibrary, too_old};

/// The version of the layout.
const VERSION: u8 = 1;
/// The length of a pool's name in bytes.
pub(super) const NAME_BYTES: usize = 16;
/// The length of the handle in bytes.
pub(crate) const HANDLE_BYTES: usize = 1 + NAME_BYTES + POINTER_BYTES;

/// A pool's name. Never reused, even if the driver creates a new pool at the address of a destroyed one.
pub(super) type PoolName = [u8; NAME_BYTES];

/// The bytes of `CUmemPoolPtrExportData`.
pub(super) type PointerBytes = [u8; POINTER_BYTES];

/// Returns the bytes of a handle.
pub(super) fn encode(name: PoolName, pointer: PointerBytes) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HANDLE_BYTES);
    bytes.push(VERSION);
    bytes.extend(name);
    bytes.extend(pointer);
    bytes
}

/// Returns the pool's name in the bytes of a handle of this process.
pub(super) fn name_in(bytes: &[u8]) -> Option<&[u8]> {
    bytes.get(1..1 + NAME_BYTES)
}

/// Parses the pool's name and the pointer from untrusted bytes.
pub(super) fn decode(bytes: &[u8; HANDLE_BYTES]) -> Result<(PoolName, PointerBytes)> {
    if bytes[0] != VERSION {
        return Err(Error::Protocol(format!(
            "received a CUDA pool handle of version {}, but this process supports version {VERSION}; update the older of \
             the two processes",
            bytes[0]
        )));
    }
    let (mut name, mut pointer) = ([0; NAME_BYTES], [0; POINTER_BYTES]);
    name.copy_from_slice(&bytes[1..1 + NAME_BYTES]);
    pointer.copy_from_slice(&bytes[1 + NAME_BYTES..]);
    Ok((name, pointer))
}

/// Returns the functions of memory pools.
pub(crate) fn api(library: &CudaLibrary) -> Result<&PoolApi> {
    library.api.pools.as_ref().ok_or_else(|| too_old("share memory pools", "11.3"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handle_bytes_are_version_name_and_pointer() {
        let mut bytes = [0; HANDLE_BYTES];
        bytes[0] = VERSION;
        bytes[1..17].fill(0xaa);
        bytes[17..].fill(0xbb);
        assert_eq!(decode(&bytes).unwrap(), ([0xaa; 16], [0xbb; 64]));
        assert_eq!(encode([0xaa; 16], [0xbb; 64]), bytes);
        bytes[0] = 2;
        assert!(decode(&bytes).unwrap_err().to_string().contains("version 2"));
    }
}
