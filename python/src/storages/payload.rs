//! The bytes by which a payload of PyTorch names a storage, in place of the vendor's handle and of the name of a file with counters.

use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::DescriptorError;

/// A storage in a block of the allocator that its process has shared as one export.
pub(super) struct InBlock<'a> {
    /// The number of the table of claims.
    pub(super) table: u64,
    /// The ticket of the storage.
    pub(super) ticket: u64,
    /// From the beginning of the block, in bytes.
    pub(super) offset: u64,
    /// The block's descriptor.
    pub(super) descriptor: &'a [u8],
}

const IN_BLOCK: &[u8; 4] = b"DIPB";

impl<'a> InBlock<'a> {
    pub(super) fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let numbers = [self.table, self.ticket, self.offset].map(u64::to_le_bytes);
        PyBytes::new(py, &[IN_BLOCK.as_slice(), numbers.as_flattened(), self.descriptor].concat())
    }

    /// Reads a handle. `None` for one of another kind.
    pub(super) fn parse(handle: &'a [u8]) -> Option<PyResult<Self>> {
        let rest = handle.strip_prefix(IN_BLOCK)?;
        let read = || {
            let (table, rest) = number(rest)?;
            let (ticket, rest) = number(rest)?;
            let (offset, descriptor) = number(rest)?;
            Some(Self { table, ticket, offset, descriptor })
        };
        Some(read().ok_or_else(cut_off))
    }
}

/// The right of a payload to be opened, which keeps the storage until then.
pub(super) enum Right<'a> {
    /// The table of claims and the ticket of the payload.
    Ticket { table: u64, ticket: u64 },
    /// A grant of an export that is the storage.
    Grant(&'a [u8]),
    /// A grant of a block, which a process that has sent the storage on has asked for.
    GrantOfBlock(&'a [u8]),
}

const TICKET: &[u8; 4] = b"DIPT";
const GRANT: &[u8; 4] = b"DIPG";
/// Before a grant.
const OF_BLOCK: &[u8; 4] = b"DIPF";

impl<'a> Right<'a> {
    pub(super) fn to_bytes<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        match self {
            Self::Ticket { table, ticket } => {
                let numbers = [*table, *ticket].map(u64::to_le_bytes);
                PyBytes::new(py, &[TICKET.as_slice(), numbers.as_flattened()].concat())
            }
            Self::Grant(grant) => PyBytes::new(py, grant),
            Self::GrantOfBlock(grant) => PyBytes::new(py, &[OF_BLOCK, *grant].concat()),
        }
    }

    /// Reads the right of a payload. `None` for one without a right, or with that of PyTorch.
    pub(super) fn parse(bytes: &'a [u8]) -> PyResult<Option<Self>> {
        if bytes.starts_with(GRANT) {
            return Ok(Some(Self::Grant(bytes)));
        }
        if let Some(grant) = bytes.strip_prefix(OF_BLOCK) {
            return Ok(Some(Self::GrantOfBlock(grant)));
        }
        let Some(rest) = bytes.strip_prefix(TICKET) else { return Ok(None) };
        let read = || {
            let (table, rest) = number(rest)?;
            let (ticket, rest) = number(rest)?;
            rest.is_empty().then_some(Self::Ticket { table, ticket })
        };
        read().map(Some).ok_or_else(cut_off)
    }
}

fn number(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let (number, rest) = bytes.split_first_chunk()?;
    Some((u64::from_le_bytes(*number), rest))
}

fn cut_off() -> PyErr {
    DescriptorError::new_err("the payload is damaged or cut off; send the tensor again")
}
