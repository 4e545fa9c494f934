//! Memory by address.
//!
//! Separate from the engine's table, because the vendor's rules need page sizes, policies, and the origin of
//! memory.

use device_ipc_mock_engine::Address;

use crate::simulator::{Simulator, State};
use crate::status::{Outcome, Status, refuse};

/// The origin of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `aclrtMalloc` and similar calls.
    Own,
    /// `aclrtIpcMemImportByKey`.
    Imported,
    /// `aclrtMapMem`.
    Mapped,
    /// `aclrtMallocHost`.
    Host,
    /// `aclrtHostRegister`.
    RegisteredHost,
}

/// Known memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) base: u64,
    /// Size in bytes that calls may access.
    pub(crate) size: u64,
    /// Page size in bytes.
    pub(crate) page: u64,
    /// User id of the device in whose address space it is.
    pub(crate) device: usize,
    /// Physical id of the home device.
    pub(crate) home: usize,
    /// Whether it was allocated with the policy for access by other devices.
    pub(crate) for_peers: bool,
    pub(crate) origin: Origin,
    /// For memory of `aclrtMallocHost`: whether it was registered too.
    pub(crate) registered: bool,
    /// For mapped memory: the shareable handle by which it was imported.
    pub(crate) imported_by: Option<u64>,
}

impl Block {
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.origin, Origin::Host | Origin::RegisteredHost)
    }

    /// Returns whether it is registered host memory.
    pub(crate) fn is_registered(&self) -> bool {
        self.origin == Origin::RegisteredHost || self.registered
    }

    /// Returns the size in bytes, rounded up to whole pages.
    pub(crate) fn whole_pages(&self) -> u64 {
        self.size.next_multiple_of(self.page)
    }
}

/// The memory of one operand of a call.
#[derive(Debug, Clone)]
pub(crate) enum Operand {
    /// Host memory that the library does not know.
    Unknown(u64),
    /// Known memory: one block, or adjacent mapped ones.
    Known(u64, Vec<Block>),
}

impl Operand {
    pub(crate) fn address(&self) -> u64 {
        match self {
            Self::Unknown(address) | Self::Known(address, _) => *address,
        }
    }

    /// Returns the blocks, if they are device memory.
    pub(crate) fn device_memory(&self) -> &[Block] {
        match self {
            Self::Known(_, blocks) if !blocks.iter().any(Block::is_host) => blocks,
            _ => &[],
        }
    }

    /// Returns whether the memory is known.
    pub(crate) fn is_known(&self) -> bool {
        matches!(self, Self::Known(..))
    }
}

/// Returns whether all of these addresses are mapped in the process.
fn is_mapped(address: u64, len: u64) -> bool {
    let page = rustix::param::page_size() as u64;
    let start = address - address % page;
    let Some(len) = address.checked_add(len).map(|end| end - start) else { return false };
    // SAFETY: asynchronous msync(2) has no effect except to report whether the addresses are mapped.
    unsafe { rustix::mm::msync(start as *mut _, len as usize, rustix::mm::MsyncFlags::ASYNC) }.is_ok()
}

impl State {
    /// Returns the block that contains an address.
    pub(crate) fn block_at(&self, address: u64) -> Option<&Block> {
        let (_, block) = self.blocks.range(..=address).next_back()?;
        (address - block.base < block.size).then_some(block)
    }
}

impl Simulator {
    /// Returns the memory of an operand.
    ///
    /// # Errors
    /// 107000 where the bytes begin in known memory and exceed it.
    pub(crate) fn operand(&self, address: u64, len: u64) -> Outcome<Operand> {
        let state = self.state();
        let Some(block) = state.block_at(address) else {
            drop(state);
            self.require_host_memory(address, len)?;
            return Ok(Operand::Unknown(address));
        };
        let mut blocks = vec![*block];
        let end = address.saturating_add(len);
        let mut reached = block.base + block.size;
        while reached < end {
            let next = state.blocks.get(&reached);
            let both_mapped = |next: &&Block| block.origin == Origin::Mapped && next.origin == Origin::Mapped;
            let Some(next) = next.filter(both_mapped) else {
                let (size, base) = (block.size, block.base);
                let text =
                    format!("{len} bytes from {address:#x} exceed the memory of {size} bytes at {base:#x}");
                return refuse(Status::RT_PARAM_INVALID, text);
            };
            blocks.push(*next);
            reached += next.size;
        }
        Ok(Operand::Known(address, blocks))
    }

    /// Checks that unknown memory is mapped host memory, not freed device memory.
    fn require_host_memory(&self, address: u64, len: u64) -> Outcome {
        let text = || format!("{len} bytes at {address:#x} are not mapped: were they freed, or closed?");
        if self.machine.is_device_address(Address::new(address)) || !is_mapped(address, len) {
            return refuse(Status::RT_PARAM_INVALID, text());
        }
        Ok(())
    }

    /// Returns the memory of an operand that must be device memory.
    ///
    /// # Errors
    /// 107000.
    pub(crate) fn device_operand(&self, address: u64, len: u64) -> Outcome<Block> {
        let operand = self.operand(address, len)?;
        match operand.device_memory() {
            [block, ..] => Ok(*block),
            [] => {
                refuse(Status::RT_PARAM_INVALID, format!("{address:#x} is not device memory of this process"))
            }
        }
    }

    /// Returns whether the home device of a block is another one than the device in whose address space it is.
    pub(crate) fn is_remote(&self, block: &Block) -> bool {
        matches!(block.origin, Origin::Imported | Origin::Mapped) && block.home != self.physical(block.device)
    }

    /// Checks that work of a device has access to a block: its own memory, or that of a device with peer access.
    ///
    /// # Errors
    /// 507899.
    pub(crate) fn require_access(&self, device: usize, block: &Block) -> Outcome {
        if block.is_host() || self.has_access(device, block.home) {
            return Ok(());
        }
        let text = format!(
            "device {device} has no access to physical device {}: call aclrtDeviceEnablePeerAccess",
            block.home
        );
        refuse(Status::RT_DRV_INTERNAL_ERROR, text)
    }
}
