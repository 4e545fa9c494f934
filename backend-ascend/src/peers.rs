//! Which devices may reach the memory of which.
//!
//! `aclrtDeviceEnablePeerAccess` ("Device Management") enables one direction, and neither direction has an effect before both
//! are enabled (hicann/driver, `devdrv_enable_p2p_inner` in `devdrv_ctrl.c`, `ubdrv_is_p2p_enabled` in
//! `ascend_ub_main_adapt.c`); so both are enabled together, as the runtime does when it imports a key
//! (`RawDevice::EnableP2PWithOtherDevice`). `aclrtDevicePeerAccessStatus` is not asked: up to CANN 9.1 it takes the peer's
//! physical id, unlike all other calls, and answers 0 for every failure, too (`DmsGetP2PStatus`).
//!
//! Two dies of one chip behind one PCIe link (A3) have no peer access: the driver refuses to enable it
//! (`devdrv_p2p_para_check`), and denies it when asked (`devdrv_cloud_v2_is_p2p_access_cap`). They need none, and reach each
//! other's memory inside the chip.

use std::collections::HashSet;
use std::sync::{Mutex, PoisonError};

use device_ipc_core::{DeviceOrdinal, DevicePtr, DeviceRange, Error, Result};

use crate::allocations::{Allocation, Origin};
use crate::bindings::*;
use crate::driver::{Driver, call};
use crate::extent::address;
use crate::status::is_unsupported;

/// The peer access that this backend enabled.
#[derive(Default)]
pub(crate) struct Peers {
    /// Pairs of devices, the lower ordinal first.
    enabled: Mutex<HashSet<(DeviceOrdinal, DeviceOrdinal)>>,
    /// Mappings of physical memory of this process, by their base, and the devices that were given access to them.
    opened_up: Mutex<HashSet<(DevicePtr, DeviceOrdinal)>>,
}

impl Peers {
    /// Forgets a mapping that is taken back.
    pub(crate) fn forget(&self, base: DevicePtr) {
        self.opened_up.lock().unwrap_or_else(PoisonError::into_inner).retain(|(of, _)| *of != base);
    }
}

/// The way in which a device reaches the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It is the same device.
    Itself,
    /// By peer access, which has to be enabled.
    Peer,
    /// Inside the chip, without peer access.
    Chip,
    /// Not at all.
    Nothing,
}

impl Driver {
    /// Returns how `from` reaches the memory of `to`.
    ///
    /// The runtime asks for no context here unless a default device was set for the process; where it does, the
    /// device's default context is taken.
    pub(crate) fn reach_of(&self, from: DeviceOrdinal, to: DeviceOrdinal) -> Result<Reach> {
        let (accessing, home) = (self.device(from)?, self.device(to)?);
        // The call refuses a device and itself.
        if from == to {
            return Ok(Reach::Itself);
        }
        let (one, other) = (accessing.number(), home.number());
        let mut can = 0;
        // SAFETY: writes one int.
        let mut status = unsafe { call!(self, aclrtDeviceCanAccessPeer(&raw mut can, one, other)) };
        if status == ACL_ERROR_RT_CONTEXT_NULL {
            let _current = self.enter(from)?;
            // SAFETY: as above.
            status = unsafe { call!(self, aclrtDeviceCanAccessPeer(&raw mut can, one, other)) };
        }
        if !is_unsupported(status) {
            self.check("aclrtDeviceCanAccessPeer", status)?;
            if can != 0 {
                return Ok(Reach::Peer);
            }
        }
        Ok(if accessing.is_on_the_chip_of(home) { Reach::Chip } else { Reach::Nothing })
    }

    /// Enables access of two devices to each other's memory, in both directions.
    pub(crate) fn enable_peers(&self, one: DeviceOrdinal, other: DeviceOrdinal) -> Result<()> {
        let pair = (one.min(other), one.max(other));
        // Held until both directions are enabled, so that no thread takes one for both.
        let mut enabled = self.peers.enabled.lock().unwrap_or_else(PoisonError::into_inner);
        if enabled.contains(&pair) {
            return Ok(());
        }
        match self.reach_of(one, other)? {
            Reach::Itself | Reach::Chip => return Ok(()),
            Reach::Nothing => return Err(self.no_peer_access(one, other)),
            Reach::Peer => {}
        }
        for (from, to) in [(other, one), (one, other)] {
            let _current = self.enter(from)?;
            // SAFETY: enables the access of the current device; the flags are reserved.
            let status = unsafe { call!(self, aclrtDeviceEnablePeerAccess(self.device(to)?.number(), 0)) };
            self.check("aclrtDeviceEnablePeerAccess", status)?;
        }
        enabled.insert(pair);
        Ok(())
    }

    /// Lets work of `device` reach `range`, memory of this process.
    pub(crate) fn open_up(&self, range: DeviceRange, device: DeviceOrdinal) -> Result<()> {
        if range.device == device {
            return Ok(());
        }
        self.enable_peers(device, range.device)?;
        match self.allocations.at(range.ptr) {
            Some(Allocation { range, origin: Origin::Physical(_) }) => self.set_access(range, device),
            _ => Ok(()),
        }
    }

    /// A mapping of physical memory is its own device's until `aclrtMemSetAccess` ("Virtual Memory Management") lets
    /// others to it, where the runtime has that. The driver lets them to memory of this process alone: of imported
    /// memory each device has an import of its own. The call takes the device's logic id, while `aclrtMallocPhysical`
    /// takes the user id.
    fn set_access(&self, mapping: DeviceRange, device: DeviceOrdinal) -> Result<()> {
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

    pub(crate) fn no_peer_access(&self, from: DeviceOrdinal, home: DeviceOrdinal) -> Error {
        match self.device(home) {
            Ok(home) => Error::NoPeerAccess { from, to: home.info.identity },
            Err(error) => error,
        }
    }
}
