//! Devices, their numbers, and peer access.
//!
//! A device has three numbers: the user id counts the devices that `ASCEND_RT_VISIBLE_DEVICES` selects, the logic
//! id those of the container, the physical id those of the host. Only the physical id is equal in two processes.
//!
//! Calls that enumerate devices work before `aclInit`: the vendor's calls do not check it (hicann/runtime,
//! `src/acl`, where only the dump of operators returns 100001).

use crate::abi::{Pointer, Utilization, Uuid};
use crate::call::calls;
use crate::simulator::Simulator;
use crate::soc::Feature;
use crate::status::{Outcome, Status, refuse};
use crate::stream::limit_of;

/// `RT_MAX_DEV_NUM` of the runtime.
const DEVICES: usize = 64;

impl Simulator {
    /// Returns the user id of the peer, and rejects the device itself.
    fn other(&self, device: i32, peer: i32) -> Outcome<usize> {
        if device == peer {
            let text = format!("device {device} is not its own peer");
            return refuse(Status::INVALID_PARAM, text);
        }
        self.device(peer)
    }

    fn logic_of_user(&self, user: i32) -> Outcome<usize> {
        Ok(self.config.visible[self.device(user)?])
    }

    fn position(&self, list: &[usize], id: i32, what: &str) -> Outcome<i32> {
        let found = usize::try_from(id).ok().and_then(|id| list.iter().position(|&other| other == id));
        match found {
            Some(position) => Ok(position as i32),
            None => refuse(Status::RT_INVALID_DEVICEID, format!("no {what} device {id}")),
        }
    }

    fn element(&self, list: &[usize], id: i32, what: &str) -> Outcome<i32> {
        match usize::try_from(id).ok().and_then(|id| list.get(id)) {
            Some(&found) => Ok(found as i32),
            None => refuse(Status::RT_INVALID_DEVICEID, format!("no {what} device {id}")),
        }
    }
}

calls! {
    /// Returns the number of visible devices.
    run_always fn aclrtGetDeviceCount(sim, count: Pointer<u32>) {
        count.check("count")?;
        if sim.config.no_driver {
            return refuse(Status::RT_DRV_INTERNAL_ERROR, "the driver is not loaded");
        }
        count.put(sim.machine.devices().len() as u32, "count")
    }

    /// Returns the status of a device. Always normal.
    run fn aclrtQueryDeviceStatus(sim, device: i32, status: Pointer<i32>) {
        sim.device(device)?;
        status.put(0, "deviceStatus")
    }

    /// Returns the run mode. Always 1: the program runs on the host.
    run fn aclrtGetRunMode(_sim, mode: Pointer<i32>) {
        mode.put(1, "runMode")
    }

    /// Returns whether a device can access the memory of another one, both by user id.
    run_always fn aclrtDeviceCanAccessPeer(sim, can: Pointer<i32>, device: i32, peer: i32) {
        let peer = sim.other(device, peer)?;
        let device = sim.device(device)?;
        can.check("canAccessPeer")?;
        // The driver returns no for every second die behind a shared PCIe link, whatever the other device is
        // (hicann/driver, `devdrv_cloud_v2_is_p2p_access_cap`).
        let is_second_die =
            |device: usize| sim.config.dies_share_a_link() && !sim.physical(device).is_multiple_of(2);
        let has_access = !is_second_die(device) && !is_second_die(peer) && sim.machine.peer_access(device, peer)?;
        can.put(i32::from(has_access), "canAccessPeer")
    }

    /// Enables access of the current device to the memory of another one, in this direction, for the whole process.
    run fn aclrtDeviceEnablePeerAccess(sim, peer: i32, flags: u32) {
        if flags != 0 {
            return refuse(Status::FEATURE_UNSUPPORTED, "flags must be 0");
        }
        let current = sim.current()?;
        let peer = sim.other(current.device as i32, peer)?;
        sim.enable_peer(sim.physical(current.device), sim.physical(peer))
    }

    /// Disables the access of `aclrtDeviceEnablePeerAccess`.
    run fn aclrtDeviceDisablePeerAccess(sim, peer: i32) {
        let current = sim.current()?;
        let peer = sim.other(current.device as i32, peer)?;
        let pair = (sim.physical(current.device), sim.physical(peer));
        let enabled = sim.change_peers(|peers| {
            peers.get_mut(&pair).filter(|count| **count > 0).map(|count| *count -= 1).is_some()
        })?;
        if enabled { Ok(()) } else { refuse(Status::RT_DRV_INTERNAL_ERROR, "peer access was not enabled") }
    }

    /// Returns whether peer access is in effect. The device is a user id, and the peer a physical one: the runtime
    /// passes it on unchanged (hicann/runtime, `memory.cpp`). For unknown devices the driver returns 0 and no error
    /// (hicann/driver, `DmsGetP2PStatus`).
    run fn aclrtDevicePeerAccessStatus(sim, device: i32, peer: i32, status: Pointer<i32>) {
        status.check("status")?;
        let own = sim.physical(sim.device(device)?);
        let Some(peer) = usize::try_from(peer).ok().filter(|&peer| peer < DEVICES) else {
            return refuse(Status::RT_PARAM_INVALID, format!("physical device {peer} not found"));
        };
        status.put(i32::from(own != peer && sim.has_peer_access(own, peer)), "status")
    }

    /// Returns the pid by which other processes identify this process.
    run fn aclrtDeviceGetBareTgid(_sim, pid: Pointer<i32>) {
        pid.put(std::process::id().cast_signed(), "pid")
    }

    /// Returns a property of a device.
    run_always fn aclrtGetDeviceInfo(sim, device: u32, attribute: i32, value: Pointer<i64>) {
        value.check("value")?;
        let device = sim.device(i32::try_from(device).unwrap_or(-1))?;
        let physical = sim.physical(device) as i64;
        let found = match attribute {
            1 => 8,
            101 | 102 => 24,
            201 => 48,
            301 => sim.machine.devices()[device].memory_bytes as i64,
            302 => 192 << 20,
            402 if sim.config.soc.dies() > 1 => physical / sim.config.soc.dies() as i64,
            402 | 403 => physical,
            401 | 404 | 405 | 407 | 408 | 501 => 0,
            _ => return refuse(Status::RT_PARAM_INVALID, format!("no attribute {attribute}")),
        };
        value.put(found, "value")
    }

    /// Returns whether a device has a feature. Always no.
    run fn aclrtGetDeviceCapability(sim, device: i32, feature: i32, value: Pointer<i32>) {
        sim.device(device)?;
        if !matches!(feature, 1 | 21) {
            return refuse(Status::RT_PARAM_INVALID, format!("no feature {feature}"));
        }
        value.put(0, "value")
    }

    /// Returns the identity of a device, equal in every process.
    run_always fn aclrtDeviceGetUuid(sim, device: i32, uuid: Pointer<Uuid>) {
        uuid.check("uuid")?;
        let device = sim.device(device)?;
        sim.require(Feature::Uuid)?;
        uuid.put(Uuid(sim.machine.devices()[device].uuid), "uuid")
    }

    /// Returns the logic id of a user id.
    run_always fn aclrtGetLogicDevIdByUserDevId(sim, user: i32, logic: Pointer<i32>) {
        logic.put(sim.logic_of_user(user)? as i32, "logicDevId")
    }

    /// Returns the user id of a logic id.
    run_always fn aclrtGetUserDevIdByLogicDevId(sim, logic: i32, user: Pointer<i32>) {
        user.put(sim.position(&sim.config.visible, logic, "logic")?, "userDevid")
    }

    /// Returns the logic id of a physical id.
    run_always fn aclrtGetLogicDevIdByPhyDevId(sim, physical: i32, logic: Pointer<i32>) {
        logic.put(sim.position(&sim.config.container, physical, "physical")?, "logicDevId")
    }

    /// Returns the physical id of a "logic" id, which is in fact a user id.
    run_always fn aclrtGetPhyDevIdByLogicDevId(sim, user: i32, physical: Pointer<i32>) {
        let logic = sim.logic_of_user(user)?;
        physical.put(sim.element(&sim.config.container, logic as i32, "logic")?, "phyDevId")
    }

    /// Returns the physical id of a user id.
    run_always fn aclrtGetPhyDevIdByUserDevId(sim, user: i32, physical: Pointer<i32>) {
        physical.put(sim.physical(sim.device(user)?) as i32, "phyDevId")
    }

    /// Returns the user id of a physical id.
    run_always fn aclrtGetUserDevIdByPhyDevId(sim, physical: i32, user: Pointer<i32>) {
        let logic = sim.position(&sim.config.container, physical, "physical")?;
        user.put(sim.position(&sim.config.visible, logic, "visible")?, "userDevId")
    }

    /// Returns the utilization of a device. Always idle.
    run fn aclrtGetDeviceUtilizationRate(sim, device: i32, info: Pointer<Utilization>) {
        sim.device(device)?;
        let extend = info.get("utilizationInfo")?.extend;
        info.put(Utilization { percent: [0; 4], extend }, "utilizationInfo")
    }

    /// Returns the range of stream priorities.
    run fn aclrtDeviceGetStreamPriorityRange(_sim, least: Pointer<i32>, greatest: Pointer<i32>) {
        if !least.is_null() {
            least.put(7, "leastPriority")?;
        }
        if !greatest.is_null() {
            greatest.put(0, "greatestPriority")?;
        }
        Ok(())
    }

    /// Returns the number of cores that kernels may use. A limit has no effect.
    run fn aclrtGetDeviceResLimit(sim, device: i32, kind: i32, value: Pointer<u32>) {
        sim.device(device)?;
        value.put(if kind == 0 { 24 } else { 48 }, "value")
    }

    /// Limits the cores of kernels. Not supported.
    run fn aclrtSetDeviceResLimit(sim, device: i32, _kind: i32, _value: u32) {
        sim.device(device)?;
        refuse(Status::RT_FEATURE_NOT_SUPPORT, "the simulator does not support core limits")
    }

    /// Removes the limit of cores. Not supported.
    run fn aclrtResetDeviceResLimit(sim, device: i32) {
        sim.device(device)?;
        refuse(Status::RT_FEATURE_NOT_SUPPORT, "the simulator does not support core limits")
    }

    /// Returns the number of cores that kernels of this thread may use.
    run fn aclrtGetResInCurrentThread(sim, kind: i32, value: Pointer<u32>) {
        sim.current()?;
        value.put(if kind == 0 { 24 } else { 48 }, "value")
    }

    /// Waits for all work of the current device.
    run fn aclrtSynchronizeDevice(sim) {
        let current = sim.current()?;
        Ok(sim.machine.synchronize_device(current.device)?)
    }

    /// Waits for all work of the current device. The time limit is ignored.
    run fn aclrtSynchronizeDeviceWithTimeout(sim, milliseconds: i32) {
        limit_of(milliseconds)?;
        let current = sim.current()?;
        Ok(sim.machine.synchronize_device(current.device)?)
    }

    /// Returns the number of streams that can still be created. Always large.
    run fn aclrtGetStreamAvailableNum(sim, count: Pointer<u32>) {
        sim.current()?;
        count.put(1024, "streamCount")
    }

    /// Returns the number of events that can still be created. Always large.
    run fn aclrtGetEventAvailNum(sim, count: Pointer<u32>) {
        sim.current()?;
        count.put(1024, "eventCount")
    }
}
