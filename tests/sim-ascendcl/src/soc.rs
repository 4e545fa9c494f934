//! Chips and their features.
//!
//! The vendor's manual lists the products that support each call; the others return 207000. The lists are those of
//! `docs/zh/api_ref` and `src/runtime/config/*/dev_info_reg.cc` of hicann/runtime, 2026-08.

/// A family of chips.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Soc {
    /// Atlas training products of the first generation.
    A910,
    /// Atlas A2.
    #[default]
    A910B,
    /// Atlas A3.
    A910_93,
    /// Atlas inference products.
    A310P,
    /// Atlas 200I/500 A2.
    A310B,
    /// Ascend 950PR.
    A950PR,
    /// Ascend 950DT.
    A950DT,
}

/// A feature that some chips lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Feature {
    IpcMemory,
    IpcEvent,
    Notify,
    IpcNotify,
    ValueWaitAndWrite,
    Uuid,
    MemoryLink,
    FabricHandles,
    HugePagesOf1GiB,
}

impl Soc {
    /// Returns the chip with this name in `DEVICE_IPC_SIM_ASCEND`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Some(match name {
            "910" => Self::A910,
            "910b" => Self::A910B,
            "910_93" => Self::A910_93,
            "310p" => Self::A310P,
            "310b" => Self::A310B,
            "950" | "950pr" => Self::A950PR,
            "950dt" => Self::A950DT,
            _ => return None,
        })
    }

    pub(crate) const NAMES: &'static str = "910, 910b, 910_93, 310p, 310b, 950, 950pr or 950dt";

    /// Returns the NUL-terminated name that `aclrtGetSocName` returns.
    pub(crate) fn vendor_name(self) -> &'static std::ffi::CStr {
        match self {
            Self::A910 => c"Ascend910A",
            Self::A910B => c"Ascend910B3",
            Self::A910_93 => c"Ascend910_9392",
            Self::A310P => c"Ascend310P3",
            Self::A310B => c"Ascend310B1",
            Self::A950PR => c"Ascend950PR_9599",
            Self::A950DT => c"Ascend950DT_9595",
        }
    }

    pub(crate) fn has(self, feature: Feature) -> bool {
        use Soc::*;
        match feature {
            Feature::IpcMemory => self != A310B,
            Feature::IpcEvent => matches!(self, A910B | A910_93 | A950PR),
            Feature::Notify => true,
            Feature::IpcNotify => !matches!(self, A310B | A950DT),
            Feature::ValueWaitAndWrite => matches!(self, A910B | A910_93 | A950PR | A950DT),
            Feature::Uuid => matches!(self, A910B | A910_93 | A950PR | A950DT),
            Feature::MemoryLink | Feature::FabricHandles => self == A910_93,
            Feature::HugePagesOf1GiB => matches!(self, A910B | A910_93),
        }
    }

    /// Returns whether `aclrtMalloc` allocates 32 bytes more than requested.
    pub(crate) fn pads(self) -> bool {
        !matches!(self, Self::A950PR | Self::A950DT)
    }

    /// Returns whether the driver's memory code is of the third generation, whose keys are binary.
    pub(crate) fn keys_are_binary(self) -> bool {
        matches!(self, Self::A950PR | Self::A950DT)
    }

    /// Returns whether access by another device requires an allocation with a policy for that.
    pub(crate) fn needs_peer_policy(self) -> bool {
        self == Self::A310P
    }

    /// Returns the number of notifies of a device.
    pub(crate) fn notifies(self) -> usize {
        match self {
            Self::A910 | Self::A310P => 1024,
            Self::A310B => 2048,
            Self::A910B | Self::A910_93 => 8192,
            Self::A950PR | Self::A950DT => 65_535,
        }
    }

    /// Returns the number of dies of a chip, each of which is a device.
    pub(crate) fn dies(self) -> usize {
        if self == Self::A910_93 { 2 } else { 1 }
    }
}
