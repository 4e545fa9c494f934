//! Which devices may reach the memory of which.
//!
//! `aclrtDeviceEnablePeerAccess` works one way, for the whole device and for the life of the process ("Device
//! Management"). It may return before the access is there: simpler, a runtime of hw-native-sys, asks
//! `aclrtDevicePeerAccessStatus` for up to three seconds afterwards, and so does this.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};

use crate::allocations::{Allocation, Origin};
use crate::bindings::*;
use crate::driver::{Driver, call};
use crate::extent::address;

const SETTLES_WITHIN: Duration = Duration::from_secs(3);
const ASK_EVERY: Duration = Duration::from_millis(1);

/// What was enabled by us.
#[derive(Default)]
pub(crate) struct Peers {
    /// From, to.
    enabled: Mutex<HashSet<(DeviceOrdinal, DeviceOrdinal)>>,
    /// Mappings of physical memory, by where they begin, and the devices that were let to them.
    opened_up: Mutex<HashSet<(DevicePtr, DeviceOrdinal)>>,
}

impl Peers {
    /// Forgets a mapping that is taken back.
    pub(crate) fn forget(&self, base: DevicePtr) {
        self.opened_up.lock().unwrap_or_else(PoisonError::into_inner).retain(|(of, _)| *of != base);
    }
}

impl Driver {
    /// Lets work of `from` reach the memory of `to`.
    pub(crate) fn enable_peer(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<()> {
        if from == to {
            return Ok(());
        }
        // Held until it is there, so that nobody takes it for there before.
        let mut enabled = self.peers.enabled.lock().unwrap_or_else(PoisonError::into_inner);
        if enabled.contains(&(from, to)) {
            return Ok(());
        }
        if !self.peer_access(from, to)? {
            return Err(self.no_peer_access(from, to));
        }
        let _current = self.enter(from)?;
        // SAFETY: enables the access of the current device; the flags are reserved.
        let status = unsafe { call!(self, aclrtDeviceEnablePeerAccess(self.device(to)?.number(), 0)) };
        self.check("aclrtDeviceEnablePeerAccess", status)?;
        self.wait_for_peer(from, to)?;
        enabled.insert((from, to));
        Ok(())
    }

    /// Lets work of `device` reach `range`, memory of this process, in both directions between the cards.
    pub(crate) fn open_up(&self, range: DeviceRange, device: DeviceOrdinal) -> Result<()> {
        if range.device == device {
            return Ok(());
        }
        self.enable_peer(device, range.device)?;
        self.enable_peer(range.device, device)?;
        match self.allocations.at(range.ptr) {
            Some(Allocation { range, origin: Origin::Physical(_) }) => self.set_access(range, device),
            _ => Ok(()),
        }
    }

    /// A mapping of physical memory is its own device's until `aclrtMemSetAccess` ("Virtual Memory Management") lets
    /// others to it, where the runtime has that. It takes the device's logic id, while `aclrtMallocPhysical` takes the user
    /// id.
    pub(crate) fn set_access(&self, mapping: DeviceRange, device: DeviceOrdinal) -> Result<()> {
        if self.acl.aclrtMemSetAccess.is_err() {
            return Ok(());
        }
        let mut opened_up = self.peers.opened_up.lock().unwrap_or_else(PoisonError::into_inner);
        if opened_up.contains(&(mapping.ptr, device)) {
            return Ok(());
        }
        let user = self.device(device)?.number();
        let mut logic = user;
        // SAFETY: writes one number.
        let status = unsafe { call!(self, aclrtGetLogicDevIdByUserDevId(user, &raw mut logic)) };
        self.check("aclrtGetLogicDevIdByUserDevId", status)?;
        let mut access = aclrtMemAccessDesc {
            flags: aclrtMemAccessFlags::ACL_RT_MEM_ACCESS_FLAGS_READWRITE,
            location: aclrtMemLocation {
                id: logic.cast_unsigned(),
                type_: aclrtMemLocationType::ACL_MEM_LOCATION_TYPE_DEVICE,
            },
            rsv: [0; 12],
        };
        let _current = self.enter(mapping.device)?;
        // SAFETY: the mapping is whole, as `allocate_as` made it; reads one description.
        let status = unsafe {
            call!(self, aclrtMemSetAccess(address(mapping.ptr), mapping.len as usize, &raw mut access, 1))
        };
        self.check("aclrtMemSetAccess", status)?;
        opened_up.insert((mapping.ptr, device));
        Ok(())
    }

    fn wait_for_peer(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<()> {
        let (from, to) = (self.device(from)?.number(), self.device(to)?.number());
        let begin = Instant::now();
        loop {
            let mut there = 0;
            // SAFETY: writes one int.
            let status = unsafe { call!(self, aclrtDevicePeerAccessStatus(from, to, &raw mut there)) };
            // A runtime that cannot tell is taken at its word.
            if status != ACL_SUCCESS || there != 0 {
                return Ok(());
            }
            if begin.elapsed() >= SETTLES_WITHIN {
                return Err(Error::Timeout {
                    what: format!("access of device {from} to the memory of device {to}"),
                    after: SETTLES_WITHIN,
                    detail: "; aclrtDeviceEnablePeerAccess succeeded, and aclrtDevicePeerAccessStatus still says no"
                        .into(),
                });
            }
            thread::sleep(ASK_EVERY);
        }
    }

    pub(crate) fn no_peer_access(&self, from: DeviceOrdinal, home: DeviceOrdinal) -> Error {
        match self.device(home) {
            Ok(home) => Error::NoPeerAccess { from, to: home.info.identity },
            Err(error) => error,
        }
    }
}
