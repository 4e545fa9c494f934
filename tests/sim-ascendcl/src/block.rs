//! What lies at an address.
//!
//! Why beside the engine's table: the vendor's rules ask for page sizes, policies, and where memory came from.

use device_ipc_mock_engine::Address;

use crate::simulator::{Simulator, State};
use crate::status::{Outcome, Status, refuse};

/// Where memory came from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// `aclrtMalloc` and its like.
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

/// Memory that the library knows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) base: u64,
    /// Bytes that calls may touch.
    pub(crate) size: u64,
    /// Size of its pages.
    pub(crate) page: u64,
    /// User id of the device in whose address space it is.
    pub(crate) device: usize,
    /// Physical id of the device where the bytes live.
    pub(crate) home: usize,
    /// Whether it was allocated for other devices, too.
    pub(crate) for_peers: bool,
    pub(crate) origin: Origin,
    /// Of memory from `aclrtMallocHost`: whether it was registered on top.
    pub(crate) registered: bool,
    /// Of mapped memory: the shareable handle it was imported by.
    pub(crate) imported_by: Option<u64>,
}

impl Block {
    pub(crate) fn is_host(&self) -> bool {
        matches!(self.origin, Origin::Host | Origin::RegisteredHost)
    }

    /// Whether it is memory of the host that was registered.
    pub(crate) fn is_registered(&self) -> bool {
        self.origin == Origin::RegisteredHost || self.registered
    }

    /// The pages that it fills, in bytes.
    pub(crate) fn whole_pages(&self) -> u64 {
        self.size.next_multiple_of(self.page)
    }
}

/// Where bytes of a caller lie.
#[derive(Debug, Clone)]
pub(crate) enum Side {
    /// In memory of the host that the library does not know.
    Unknown(u64),
    /// In memory that it knows: one block, or mapped ones side by side.
    Known(u64, Vec<Block>),
}

impl Side {
    pub(crate) fn address(&self) -> u64 {
        match self {
            Self::Unknown(address) | Self::Known(address, _) => *address,
        }
    }

    /// The blocks that are memory of a device: all, or none.
    pub(crate) fn device_memory(&self) -> &[Block] {
        match self {
            Self::Known(_, blocks) if !blocks.iter().any(Block::is_host) => blocks,
            _ => &[],
        }
    }

    /// Whether the engine knows the address.
    pub(crate) fn is_known(&self) -> bool {
        matches!(self, Self::Known(..))
    }
}

/// Whether the process has something mapped at all these addresses.
fn is_mapped(address: u64, len: u64) -> bool {
    let page = rustix::param::page_size() as u64;
    let start = address - address % page;
    let Some(len) = address.checked_add(len).map(|end| end - start) else { return false };
    // SAFETY: asynchronous msync(2) changes nothing; it says whether the addresses are mapped.
    unsafe { rustix::mm::msync(start as *mut _, len as usize, rustix::mm::MsyncFlags::ASYNC) }.is_ok()
}

impl State {
    /// The block in which an address lies.
    pub(crate) fn block_at(&self, address: u64) -> Option<&Block> {
        let (_, block) = self.blocks.range(..=address).next_back()?;
        (address - block.base < block.size).then_some(block)
    }
}

impl Simulator {
    /// Finds out where bytes lie.
    ///
    /// # Errors
    /// 107000 where they begin in known memory and run past its end.
    pub(crate) fn side(&self, address: u64, len: u64) -> Outcome<Side> {
        let state = self.state();
        let Some(block) = state.block_at(address) else {
            drop(state);
            self.require_host_memory(address, len)?;
            return Ok(Side::Unknown(address));
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
                    format!("{len} bytes from {address:#x} run past the end of {size} bytes at {base:#x}");
                return refuse(Status::RT_PARAM_INVALID, text);
            };
            blocks.push(*next);
            reached += next.size;
        }
        Ok(Side::Known(address, blocks))
    }

    /// That addresses which are no known memory may be the host's: not a device's that was freed, and not none at all.
    fn require_host_memory(&self, address: u64, len: u64) -> Outcome {
        let text = || format!("there is no memory of {len} bytes at {address:#x}; was it freed, or closed?");
        if self.machine.is_device_address(Address::new(address)) || !is_mapped(address, len) {
            return refuse(Status::RT_PARAM_INVALID, text());
        }
        Ok(())
    }

    /// As [`side`](Self::side), device memory only.
    ///
    /// # Errors
    /// 107000.
    pub(crate) fn device_side(&self, address: u64, len: u64) -> Outcome<Block> {
        let side = self.side(address, len)?;
        match side.device_memory() {
            [block, ..] => Ok(*block),
            [] => {
                refuse(Status::RT_PARAM_INVALID, format!("{address:#x} is no device memory of this process"))
            }
        }
    }

    /// Whether the bytes of a block live on another device than the one in whose address space it is.
    pub(crate) fn is_remote(&self, block: &Block) -> bool {
        matches!(block.origin, Origin::Imported | Origin::Mapped) && block.home != self.physical(block.device)
    }

    /// That a device's work may touch a block: its own memory, or that of a device that it has access to.
    ///
    /// # Errors
    /// 507899.
    pub(crate) fn require_reach(&self, device: usize, block: &Block) -> Outcome {
        if block.is_host() || self.reaches(device, block.home) {
            return Ok(());
        }
        let text = format!(
            "device {device} has no access to physical device {}; aclrtDeviceEnablePeerAccess",
            block.home
        );
        refuse(Status::RT_DRV_INTERNAL_ERROR, text)
    }
}
