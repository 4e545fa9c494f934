//! Versions of CANN.
//!
//! An older CANN is a library that lacks symbols. The table has the first version of each symbol. Where the headers
//! of a version were not available, the later version is used.

/// A version of CANN.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Cann {
    /// 8.1.RC1, without sharing by key.
    V8_1,
    /// 8.3.RC1, the first version with sharing by key.
    V8_3,
    /// 8.5.0, the first version with shared events.
    V8_5,
    /// 9.0.0, the first version that returns the range around an address.
    V9_0,
    /// 9.1.0.
    #[default]
    V9_1,
}

impl Cann {
    /// Returns the version with this name in `DEVICE_IPC_SIM_ASCEND`.
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        [Self::V8_1, Self::V8_3, Self::V8_5, Self::V9_0, Self::V9_1]
            .into_iter()
            .find(|version| version.name() == name)
    }

    pub(crate) const NAMES: &'static str = "8.1.RC1, 8.3.RC1, 8.5.0, 9.0.0 or 9.1.0";

    /// Returns the name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::V8_1 => "8.1.RC1",
            Self::V8_3 => "8.3.RC1",
            Self::V8_5 => "8.5.0",
            Self::V9_0 => "9.0.0",
            Self::V9_1 => "9.1.0",
        }
    }

    /// Returns the number that `aclsysGetVersionNum` returns.
    pub(crate) const fn number(self) -> i32 {
        match self {
            Self::V8_1 => 80_100_000,
            Self::V8_3 => 80_300_000,
            Self::V8_5 => 80_500_000,
            Self::V9_0 => 90_000_000,
            Self::V9_1 => 90_100_000,
        }
    }

    /// Returns the minor version of the interface, whose major version is 1.
    pub(crate) const fn interface(self) -> i32 {
        match self {
            Self::V8_1 => 13,
            Self::V8_3 => 15,
            Self::V8_5 => 16,
            Self::V9_0 | Self::V9_1 => 17,
        }
    }

    /// Returns whether the library also has the name `libacl_rt.so`.
    pub const fn has_second_name(self) -> bool {
        matches!(self, Self::V8_5 | Self::V9_0 | Self::V9_1)
    }

    /// Iterates over the symbols of the simulator that this version lacks.
    pub fn lacks(self) -> impl Iterator<Item = &'static str> {
        LATER.iter().filter(move |(_, since)| *since > self).map(|&(name, _)| name)
    }
}

/// The symbols that were added after 8.1.RC1.
const LATER: &[(&str, Cann)] = &[
    ("aclrtIpcMemGetExportKey", Cann::V8_3),
    ("aclrtIpcMemClose", Cann::V8_3),
    ("aclrtIpcMemImportByKey", Cann::V8_3),
    ("aclrtIpcMemSetImportPid", Cann::V8_3),
    ("aclrtIpcMemSetAttr", Cann::V8_3),
    ("aclrtIpcMemImportPidInterServer", Cann::V8_3),
    ("aclrtNotifyGetExportKey", Cann::V8_3),
    ("aclrtNotifyImportByKey", Cann::V8_3),
    ("aclrtNotifySetImportPid", Cann::V8_3),
    ("aclrtNotifySetImportPidInterServer", Cann::V8_3),
    ("aclrtCtxGetCurrentDefaultStream", Cann::V8_3),
    ("aclrtDeviceGetStreamPriorityRange", Cann::V8_3),
    ("aclrtEventGetTimestamp", Cann::V8_3),
    ("aclrtGetNotifyId", Cann::V8_3),
    ("aclrtGetPrimaryCtxState", Cann::V8_3),
    ("aclrtLaunchHostFunc", Cann::V8_3),
    ("aclrtStreamGetFlags", Cann::V8_3),
    ("aclrtStreamGetId", Cann::V8_3),
    ("aclrtStreamGetPriority", Cann::V8_3),
    ("aclrtStreamStop", Cann::V8_3),
    ("aclrtStreamWaitEventWithTimeout", Cann::V8_3),
    ("aclrtSubscribeHostFunc", Cann::V8_3),
    ("aclrtUnSubscribeHostFunc", Cann::V8_3),
    ("aclrtProcessHostFunc", Cann::V8_3),
    ("aclrtValueWait", Cann::V8_3),
    ("aclrtValueWrite", Cann::V8_3),
    ("aclrtGetEventAvailNum", Cann::V8_3),
    ("aclrtGetStreamAvailableNum", Cann::V8_3),
    ("aclrtMallocWithCfg", Cann::V8_3),
    ("aclrtNotifyBatchReset", Cann::V8_3),
    ("aclrtSynchronizeDeviceWithTimeout", Cann::V8_3),
    ("aclrtHostGetDevicePointer", Cann::V8_5),
    ("aclrtHostRegisterV2", Cann::V8_5),
    ("aclrtFreeWithDevSync", Cann::V8_5),
    ("aclrtFreeHostWithDevSync", Cann::V8_5),
    ("aclrtMemExportToShareableHandleV2", Cann::V8_5),
    ("aclrtMemImportFromShareableHandleV2", Cann::V8_5),
    ("aclrtMemSetPidToShareableHandleV2", Cann::V8_5),
    ("aclrtMemSetAccess", Cann::V8_5),
    ("aclrtMemGetAccess", Cann::V8_5),
    ("aclrtMemRetainAllocationHandle", Cann::V8_5),
    ("aclrtMemGetAllocationPropertiesFromHandle", Cann::V8_5),
    ("aclrtDevicePeerAccessStatus", Cann::V8_5),
    ("aclrtGetDeviceInfo", Cann::V8_5),
    ("aclrtGetErrorVerbose", Cann::V8_5),
    ("aclrtGetLogicDevIdByPhyDevId", Cann::V8_5),
    ("aclrtGetLogicDevIdByUserDevId", Cann::V8_5),
    ("aclrtGetPhyDevIdByLogicDevId", Cann::V8_5),
    ("aclrtGetUserDevIdByLogicDevId", Cann::V8_5),
    ("aclsysGetVersionStr", Cann::V8_5),
    ("aclsysGetVersionNum", Cann::V8_5),
    ("aclFinalizeReference", Cann::V8_5),
    ("aclrtIpcGetEventHandle", Cann::V8_5),
    ("aclrtIpcOpenEventHandle", Cann::V8_5),
    ("aclrtCreateStreamV2", Cann::V8_5),
    ("aclrtCreateStreamConfigHandle", Cann::V8_5),
    ("aclrtDestroyStreamConfigHandle", Cann::V8_5),
    ("aclrtSetStreamConfigOpt", Cann::V8_5),
    ("aclrtRegStreamStateCallback", Cann::V8_5),
    ("aclrtMemGetAddressRange", Cann::V9_0),
    ("aclrtGetArgsFromExceptionInfo", Cann::V9_0),
    ("aclrtGetFuncHandleFromExceptionInfo", Cann::V9_0),
    ("aclrtGetPhyDevIdByUserDevId", Cann::V9_1),
    ("aclrtGetUserDevIdByPhyDevId", Cann::V9_1),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_only_add_symbols() {
        let lacking = |version: Cann| version.lacks().count();
        assert_eq!(lacking(Cann::V9_1), 0);
        assert_eq!(lacking(Cann::V8_1), LATER.len());
        assert!(Cann::V9_0.lacks().eq(["aclrtGetPhyDevIdByUserDevId", "aclrtGetUserDevIdByPhyDevId"]));
        assert!(Cann::V8_3.lacks().any(|name| name == "aclrtIpcGetEventHandle"));
        assert!(!Cann::V8_3.lacks().any(|name| name == "aclrtIpcMemClose"));
        assert_eq!(Cann::from_name("8.5.0"), Some(Cann::V8_5));
    }
}
