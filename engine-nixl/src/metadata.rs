//! The metadata of a registered region: all that an importer's agent needs to pull from it.
//!
//! NIXL's own metadata does not state the address, the length or the kind of a region, so they are added. The bytes come
//! from another process: the decoder accepts any input. What NIXL's metadata contains is checked by NIXL alone.

use device_ipc_core::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::bindings::MemoryType;

/// The version of this format.
const VERSION: u8 = 1;

/// Maximum length of encoded metadata in bytes. NIXL's own has about 200 B for each network interface.
const MAX_BYTES: usize = 1 << 20;

/// The metadata of a region.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct RegionMetadata {
    version: u8,
    pub(crate) memory_type: MemoryType,
    /// The exporter's ordinal of the device; 0 for host memory.
    pub(crate) device: u64,
    pub(crate) address: u64,
    pub(crate) len: u64,
    /// NIXL's metadata of the agent: its name and network addresses.
    pub(crate) connection: Vec<u8>,
    /// NIXL's metadata of the region.
    pub(crate) region: Vec<u8>,
}

impl RegionMetadata {
    pub(crate) fn new(memory_type: MemoryType, device: u64, address: u64, len: u64) -> Self {
        let (connection, region) = Default::default();
        Self { version: VERSION, memory_type, device, address, len, connection, region }
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        postcard::to_stdvec(self).expect("plain values are encodable")
    }

    /// Decodes metadata.
    ///
    /// # Errors
    ///
    /// [`Error::Protocol`] for other bytes.
    pub(crate) fn decode(bytes: &[u8]) -> Result<Self> {
        let invalid =
            |why: &str| Error::Protocol(format!("invalid NIXL metadata of {} B: {why}", bytes.len()));
        match bytes.first() {
            Some(&VERSION) if bytes.len() <= MAX_BYTES => {}
            Some(&VERSION) => return Err(invalid(&format!("the limit is {MAX_BYTES} B"))),
            Some(version) => {
                return Err(invalid(&format!(
                    "it has version {version}, expected {VERSION}; use the same release of device-ipc on both hosts"
                )));
            }
            None => return Err(invalid("it is empty")),
        }
        let (decoded, rest) =
            postcard::take_from_bytes::<Self>(bytes).map_err(|error| invalid(&error.to_string()))?;
        if !rest.is_empty() {
            return Err(invalid(&format!("it has {} B too many", rest.len())));
        }
        if decoded.address.checked_add(decoded.len).is_none() {
            return Err(invalid("the region exceeds the address space"));
        }
        Ok(decoded)
    }

    /// Returns the address of `len` bytes at `offset` in the region.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidRegion`] if they exceed the region.
    pub(crate) fn address_of(&self, offset: u64, len: u64) -> Result<u64> {
        let fits = offset.checked_add(len).is_some_and(|end| end <= self.len);
        if fits {
            return Ok(self.address + offset);
        }
        Err(Error::InvalidRegion(format!(
            "{len} B at offset {offset} exceed the registered region of {} B",
            self.len
        )))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> RegionMetadata {
        let plain = RegionMetadata::new(1, 3, 0x7f00_0000_1000, 4096);
        RegionMetadata { connection: vec![7; 199], region: vec![9; 217], ..plain }
    }

    fn text(bytes: &[u8]) -> String {
        let error = RegionMetadata::decode(bytes).unwrap_err();
        assert!(matches!(error, Error::Protocol(_)), "{error:?}");
        error.to_string()
    }

    #[test]
    fn metadata_round_trips() {
        assert_eq!(RegionMetadata::decode(&sample().encode()).unwrap(), sample());
    }

    #[test]
    fn altered_metadata_is_rejected_without_a_panic() {
        let bytes = sample().encode();
        for end in 0..bytes.len() {
            text(&bytes[..end]);
        }
        assert!(text(&[&bytes[..], &[0]].concat()).contains("1 B too many"));
        assert!(text(&[2]).contains("version 2, expected 1"));
        assert!(text(&[&[VERSION][..], &vec![0; MAX_BYTES]].concat()).contains("limit"));
        let beyond = RegionMetadata { address: u64::MAX, len: 2, ..sample() };
        assert!(text(&beyond.encode()).contains("address space"));
        // A stated length that the bytes do not have.
        let mut long = RegionMetadata::new(0, 0, 0, 0).encode();
        let end = long.len();
        long.truncate(end - 2);
        long.extend([0xff; 9]);
        text(&long);
    }

    #[test]
    fn bytes_outside_the_region_have_no_address() {
        let sample = sample();
        assert_eq!(sample.address_of(1, 4095).unwrap(), sample.address + 1);
        for (offset, len) in [(1, 4096), (4097, 0), (u64::MAX, 1), (0, u64::MAX)] {
            let error = sample.address_of(offset, len).unwrap_err();
            assert!(matches!(error, Error::InvalidRegion(_)), "{error:?}");
        }
    }
}
