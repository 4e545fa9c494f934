//! Peer access between devices.
//!
//! `aclrtDeviceEnablePeerAccess` ("Device Management") enables one direction, and neither direction has an effect
//! before both are enabled (hicann/driver, `devdrv_enable_p2p_inner` in `devdrv_ctrl.c`, `ubdrv_is_p2p_enabled` in
//! `ascend_ub_main_adapt.c`); so this module enables both together, like the runtime when it imports a key
//! (`RawDevice::EnableP2PWithOtherDevice`). It does not use `aclrtDevicePeerAccessStatus`: up to CANN 9.1 that takes
//! the peer's physical id, unlike all other calls, and also returns 0 for every failure (`DmsGetP2PStatus`).
//!
//! Two dies of one chip behind one PCIe link (A3) have no peer access: the driver refuses to enable it
//! (`devdrv_p2p_para_check`), and its query returns false (`devdrv_cloud_v2_is_p2p_access_cap`). They need none, and
//! reach each other's memory inside the chip.

use std::sync::PoisonError;

use device_ipc_core::{DeviceOrdinal, Error, Result};

use super::driver::Driver;
use crate::bindings::*;
use crate::library::call;
use crate::library::status::is_unsupported;

/// The path by which a device reaches the memory of another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reach {
    /// It is the same device.
    Itself,
    /// Peer access, which must be enabled.
    Peer,
    /// Inside the chip, without peer access.
    Chip,
    /// Unreachable.
    None,
}

impl Driver {
    /// Returns the path by which `from` reaches the memory of `to`.
    ///
    /// The runtime requires no context here unless a default device was set for the process; then the device's default
    /// context is entered.
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
        Ok(if accessing.shares_chip_with(home) { Reach::Chip } else { Reach::None })
    }

    /// Enables access of two devices to each other's memory, in both directions.
    pub(crate) fn enable_peers(&self, one: DeviceOrdinal, other: DeviceOrdinal) -> Result<()> {
        let pair = (one.min(other), one.max(other));
        // Locked until both directions are enabled, so that no thread mistakes one for both.
        let mut enabled = self.peers.lock().unwrap_or_else(PoisonError::into_inner);
        if enabled.contains(&pair) {
            return Ok(());
        }
        match self.reach_of(one, other)? {
            Reach::Itself | Reach::Chip => return Ok(()),
            Reach::None => return Err(self.no_peer_access(one, other)),
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

    /// Returns the error for a device without access to the memory of `home`.
    pub(crate) fn no_peer_access(&self, from: DeviceOrdinal, home: DeviceOrdinal) -> Error {
        match self.device(home) {
            Ok(home) => Error::NoPeerAccess { from, to: home.info.identity },
            Err(error) => error,
        }
    }
}
