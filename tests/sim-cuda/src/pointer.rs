//! Attributes of addresses ("Unified Addressing" in `cuda.h`).

use std::ffi::{c_int, c_uint};

use device_ipc_mock_engine::Address;

use crate::context::current_unchecked;
use crate::entry::driver;
use crate::ffi::{In, Out};
use crate::memory::Kind;
use crate::simulator::simulator;
use crate::status::{Result, Status};
use crate::vmm::flags_of;

/// The value of an attribute, with the width that the driver writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Value {
    Narrow(u32),
    Wide(u64),
}

impl Value {
    fn put(self, out: usize) -> Result {
        match self {
            Self::Narrow(value) => Out::from_address(out).put(value),
            Self::Wide(value) => Out::from_address(out).put(value),
        }
    }
}

/// Returns a `CUpointer_attribute` of a known address; fails for an attribute that its kind does not have.
fn attribute(number: c_int, address: u64) -> Result<Value> {
    use Value::{Narrow, Wide};
    let simulator = simulator()?;
    let objects = simulator.objects();
    let block = objects.memory.find(address).ok_or(Status::INVALID_VALUE)?;
    let host = match block.kind {
        Kind::Host(host) => Some(host),
        _ => None,
    };
    let pool = match block.kind {
        Kind::Pooled { pool, .. } | Kind::PoolImported { pool } => Some(pool),
        _ => None,
    };
    let flag = |value: bool| Ok(Narrow(u32::from(value)));
    match number {
        // CONTEXT
        1 => Ok(Wide(block.context)),
        // MEMORY_TYPE: CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE
        2 => Ok(Narrow(if host.is_some_and(|host| !host.managed) { 1 } else { 2 })),
        // DEVICE_POINTER
        3 => Ok(Wide(address)),
        // HOST_POINTER
        4 if host.is_some() => Ok(Wide(address)),
        // SYNC_MEMOPS
        6 => flag(false),
        // BUFFER_ID
        7 => Ok(Wide(block.id)),
        // IS_MANAGED
        8 => flag(host.is_some_and(|host| host.managed)),
        // DEVICE_ORDINAL
        9 => Ok(Narrow(block.device as u32)),
        // IS_LEGACY_CUDA_IPC_CAPABLE
        10 => flag(matches!(block.kind, Kind::Plain { .. })),
        // RANGE_START_ADDR, RANGE_SIZE: for mapped memory, the whole reserved range.
        11 | 12 if matches!(block.kind, Kind::Virtual) => {
            let reserved = simulator.machine.reservation_of(Address::new(address));
            let (base, size) = reserved.ok_or(Status::INVALID_VALUE)?;
            Ok(Wide(if number == 11 { base.get() } else { size }))
        }
        11 => Ok(Wide(block.base)),
        12 => Ok(Wide(block.size)),
        // MAPPED
        13 => flag(true),
        // ALLOWED_HANDLE_TYPES
        14 => Ok(Wide(match (&block.kind, pool) {
            (Kind::Pooled { .. }, Some(pool)) => objects.pools.handle_types(pool) as u64,
            (Kind::Virtual, _) => {
                let mapped = simulator.machine.mapped_block(Address::new(address));
                let properties =
                    mapped.and_then(|mapped| objects.memory.properties.get(&mapped.block.block.get()));
                properties.map_or(0, |properties| properties.handle_types as u64)
            }
            _ => 0,
        })),
        // IS_GPU_DIRECT_RDMA_CAPABLE
        15 => flag(host.is_none()),
        // ACCESS_FLAGS
        16 => {
            let access = simulator.machine.access_of(Address::new(address), block.device);
            Ok(Narrow(access.map_or(3, flags_of) as u32))
        }
        // MEMPOOL_HANDLE
        17 => Ok(Wide(pool.unwrap_or(0))),
        // MAPPING_SIZE, MAPPING_BASE_ADDR, MEMORY_BLOCK_ID
        18 => Ok(Wide(block.size)),
        19 => Ok(Wide(block.base)),
        20 => Ok(Wide(block.id)),
        _ => Err(Status::INVALID_VALUE),
    }
}

/// Returns the value that `cuPointerGetAttributes` writes for an unknown address; `None` leaves the caller's value
/// unchanged.
fn unknown(number: c_int) -> Result<Option<Value>> {
    match number {
        // RANGE_START_ADDR, RANGE_SIZE
        11 | 12 => Ok(None),
        1 | 3 | 4 | 7 | 14 | 17..=20 => Ok(Some(Value::Wide(0))),
        // An ordinal that no device has: CU_DEVICE_INVALID.
        9 => Ok(Some(Value::Narrow(-2_i32 as u32))),
        2 | 6 | 8 | 10 | 13 | 15 | 16 => Ok(Some(Value::Narrow(0))),
        _ => Err(Status::INVALID_VALUE),
    }
}

driver! {
    /// Returns an attribute of an address.
    fn cuPointerGetAttribute(out: Out<u8>, number: c_int, address: u64) {
        current_unchecked()?;
        attribute(number, address)?.put(out.address())
    }

    /// Returns several attributes; those that the address does not have are null, 0 or not written.
    fn cuPointerGetAttributes(count: c_uint, numbers: In<c_int>, outs: In<usize>, address: u64) {
        current_unchecked()?;
        for index in 0..count as usize {
            let number = numbers.at(index)?;
            if let Some(value) = attribute(number, address).map(Some).or_else(|_| unknown(number))? {
                value.put(outs.at(index)?)?;
            }
        }
        Ok(())
    }
}
