// Made by `cargo xtask bindgen` from include/acl.h: do not edit.

#![allow(
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    dead_code,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    unreachable_pub,
    reason = "generated; the names are the vendor's, and the table of functions has parts that nobody calls"
)]

pub const ACL_IPC_EVENT_HANDLE_SIZE: u32 = 64;
/// What a call returns: `ACL_SUCCESS`, or a number that says what went wrong. Newer runtimes add numbers.
pub type aclError = ::core::ffi::c_int;
/// A queue of work on one device.
#[repr(transparent)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct aclrtStream(pub *mut ::core::ffi::c_void);
/// A point in a stream's work.
#[repr(transparent)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct aclrtEvent(pub *mut ::core::ffi::c_void);
/// The state of a device in this process; every thread has a current one.
#[repr(transparent)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct aclrtContext(pub *mut ::core::ffi::c_void);
/// Physical memory without an address.
#[repr(transparent)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct aclrtDrvMemHandle(pub *mut ::core::ffi::c_void);
pub const ACL_SUCCESS: aclError = 0;
pub const ACL_ERROR_INVALID_PARAM: aclError = 100000;
pub const ACL_ERROR_UNINITIALIZE: aclError = 100001;
pub const ACL_ERROR_REPEAT_INITIALIZE: aclError = 100002;
pub const ACL_ERROR_REPEAT_FINALIZE: aclError = 100037;
pub const ACL_ERROR_COMPILING_STUB_MODE: aclError = 100039;
pub const ACL_ERROR_RT_PARAM_INVALID: aclError = 107000;
pub const ACL_ERROR_RT_INVALID_DEVICEID: aclError = 107001;
pub const ACL_ERROR_RT_CONTEXT_NULL: aclError = 107002;
pub const ACL_ERROR_RT_STREAM_CONTEXT: aclError = 107003;
pub const ACL_ERROR_RT_ADDR_UNALIGNED: aclError = 107008;
pub const ACL_ERROR_RT_INVALID_HANDLE: aclError = 107017;
pub const ACL_ERROR_RT_WAIT_TIMEOUT: aclError = 107019;
pub const ACL_ERROR_RT_TASK_TIMEOUT: aclError = 107020;
pub const ACL_ERROR_BAD_ALLOC: aclError = 200000;
pub const ACL_ERROR_API_NOT_SUPPORT: aclError = 200001;
pub const ACL_ERROR_INVALID_DEVICE: aclError = 200002;
pub const ACL_ERROR_MEMORY_ADDRESS_UNALIGNED: aclError = 200003;
pub const ACL_ERROR_INVALID_RESOURCE_HANDLE: aclError = 200005;
pub const ACL_ERROR_FEATURE_UNSUPPORTED: aclError = 200006;
pub const ACL_ERROR_RT_FEATURE_NOT_SUPPORT: aclError = 207000;
pub const ACL_ERROR_RT_MEMORY_ALLOCATION: aclError = 207001;
pub const ACL_ERROR_RT_MEMORY_FREE: aclError = 207002;
pub const ACL_ERROR_RT_NO_DEVICE: aclError = 207004;
pub const ACL_ERROR_RT_RESOURCE_ALLOC_FAIL: aclError = 207005;
pub const ACL_ERROR_RT_NO_PERMISSION: aclError = 207006;
pub const ACL_ERROR_RT_NO_EVENT_RESOURCE: aclError = 207007;
pub const ACL_ERROR_RT_NO_STREAM_RESOURCE: aclError = 207008;
pub const ACL_ERROR_RT_NO_NOTIFY_RESOURCE: aclError = 207009;
pub const ACL_ERROR_RT_OVER_LIMIT: aclError = 207012;
pub const ACL_ERROR_RT_REPEATED_INIT: aclError = 207015;
pub const ACL_ERROR_RT_DEVICE_OOM: aclError = 207018;
pub const ACL_ERROR_RT_TIMEOUT: aclError = 207020;
pub const ACL_ERROR_INTERNAL_ERROR: aclError = 500000;
pub const ACL_ERROR_FAILURE: aclError = 500001;
pub const ACL_ERROR_RT_FAILURE: aclError = 500003;
pub const ACL_ERROR_DRV_FAILURE: aclError = 500004;
pub const ACL_ERROR_PROFILING_FAILURE: aclError = 500005;
pub const ACL_ERROR_RT_INTERNAL_ERROR: aclError = 507000;
pub const ACL_ERROR_RT_IPC_ERROR: aclError = 507022;
pub const ACL_ERROR_RT_DEV_SETUP_ERROR: aclError = 507033;
pub const ACL_ERROR_RT_VECTOR_CORE_EXCEPTION: aclError = 507035;
pub const ACL_ERROR_RT_STREAM_SYNC_TIMEOUT: aclError = 507046;
pub const ACL_ERROR_RT_EVENT_SYNC_TIMEOUT: aclError = 507047;
pub const ACL_ERROR_RT_DEVICE_MEM_ERROR: aclError = 507053;
pub const ACL_ERROR_RT_LINK_ERROR: aclError = 507056;
pub const ACL_ERROR_RT_SUSPECT_REMOTE_ERROR: aclError = 507057;
pub const ACL_ERROR_RT_DRV_INTERNAL_ERROR: aclError = 507899;
pub const ACL_ERROR_RT_SOCKET_CLOSE: aclError = 507901;
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct aclrtUuid {
    pub bytes: [::core::ffi::c_char; 16usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of aclrtUuid"][::core::mem::size_of::<aclrtUuid>() - 16usize];
    ["Alignment of aclrtUuid"][::core::mem::align_of::<aclrtUuid>() - 1usize];
    [
        "Offset of field: aclrtUuid::bytes",
    ][::core::mem::offset_of!(aclrtUuid, bytes) - 0usize];
};
impl aclrtDevAttr {
    pub const ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE: aclrtDevAttr = aclrtDevAttr(301);
    pub const ACL_DEV_ATTR_PHY_CHIP_ID: aclrtDevAttr = aclrtDevAttr(402);
}
#[repr(transparent)]
/// Which property `aclrtGetDeviceInfo` tells.
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtDevAttr(pub ::core::ffi::c_uint);
impl aclrtMemAttr {
    pub const ACL_DDR_MEM: aclrtMemAttr = aclrtMemAttr(0);
    pub const ACL_HBM_MEM: aclrtMemAttr = aclrtMemAttr(1);
    pub const ACL_DDR_MEM_HUGE: aclrtMemAttr = aclrtMemAttr(2);
    pub const ACL_DDR_MEM_NORMAL: aclrtMemAttr = aclrtMemAttr(3);
    pub const ACL_HBM_MEM_HUGE: aclrtMemAttr = aclrtMemAttr(4);
    pub const ACL_HBM_MEM_NORMAL: aclrtMemAttr = aclrtMemAttr(5);
    pub const ACL_DDR_MEM_P2P_HUGE: aclrtMemAttr = aclrtMemAttr(6);
    pub const ACL_DDR_MEM_P2P_NORMAL: aclrtMemAttr = aclrtMemAttr(7);
    pub const ACL_HBM_MEM_P2P_HUGE: aclrtMemAttr = aclrtMemAttr(8);
    pub const ACL_HBM_MEM_P2P_NORMAL: aclrtMemAttr = aclrtMemAttr(9);
    pub const ACL_HBM_MEM_HUGE1G: aclrtMemAttr = aclrtMemAttr(10);
    pub const ACL_HBM_MEM_P2P_HUGE1G: aclrtMemAttr = aclrtMemAttr(11);
}
#[repr(transparent)]
/// Which memory of a device, and in which pages.
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtMemAttr(pub ::core::ffi::c_uint);
impl aclrtMemMallocPolicy {
    pub const ACL_MEM_MALLOC_HUGE_FIRST: aclrtMemMallocPolicy = aclrtMemMallocPolicy(0);
    pub const ACL_MEM_MALLOC_HUGE_ONLY: aclrtMemMallocPolicy = aclrtMemMallocPolicy(1);
    pub const ACL_MEM_MALLOC_NORMAL_ONLY: aclrtMemMallocPolicy = aclrtMemMallocPolicy(2);
    pub const ACL_MEM_MALLOC_HUGE_FIRST_P2P: aclrtMemMallocPolicy = aclrtMemMallocPolicy(
        3,
    );
    pub const ACL_MEM_MALLOC_HUGE_ONLY_P2P: aclrtMemMallocPolicy = aclrtMemMallocPolicy(
        4,
    );
    pub const ACL_MEM_MALLOC_NORMAL_ONLY_P2P: aclrtMemMallocPolicy = aclrtMemMallocPolicy(
        5,
    );
    pub const ACL_MEM_MALLOC_HUGE1G_ONLY: aclrtMemMallocPolicy = aclrtMemMallocPolicy(6);
    pub const ACL_MEM_MALLOC_HUGE1G_ONLY_P2P: aclrtMemMallocPolicy = aclrtMemMallocPolicy(
        7,
    );
}
#[repr(transparent)]
/// In which pages memory is to lie.
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtMemMallocPolicy(pub ::core::ffi::c_uint);
impl aclrtMemcpyKind {
    pub const ACL_MEMCPY_HOST_TO_HOST: aclrtMemcpyKind = aclrtMemcpyKind(0);
    pub const ACL_MEMCPY_HOST_TO_DEVICE: aclrtMemcpyKind = aclrtMemcpyKind(1);
    pub const ACL_MEMCPY_DEVICE_TO_HOST: aclrtMemcpyKind = aclrtMemcpyKind(2);
    pub const ACL_MEMCPY_DEVICE_TO_DEVICE: aclrtMemcpyKind = aclrtMemcpyKind(3);
    pub const ACL_MEMCPY_DEFAULT: aclrtMemcpyKind = aclrtMemcpyKind(4);
    pub const ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE: aclrtMemcpyKind = aclrtMemcpyKind(5);
    pub const ACL_MEMCPY_INNER_DEVICE_TO_DEVICE: aclrtMemcpyKind = aclrtMemcpyKind(6);
    pub const ACL_MEMCPY_INTER_DEVICE_TO_DEVICE: aclrtMemcpyKind = aclrtMemcpyKind(7);
}
#[repr(transparent)]
/// The direction of a copy.
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtMemcpyKind(pub ::core::ffi::c_uint);
impl aclrtMemLocationType {
    pub const ACL_MEM_LOCATION_TYPE_HOST: aclrtMemLocationType = aclrtMemLocationType(0);
    pub const ACL_MEM_LOCATION_TYPE_DEVICE: aclrtMemLocationType = aclrtMemLocationType(
        1,
    );
    pub const ACL_MEM_LOCATION_TYPE_UNREGISTERED: aclrtMemLocationType = aclrtMemLocationType(
        2,
    );
    pub const ACL_MEM_LOCATION_TYPE_HOST_NUMA: aclrtMemLocationType = aclrtMemLocationType(
        4,
    );
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtMemLocationType(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct aclrtMemLocation {
    /// The device's number, where `type` says that it is one.
    pub id: u32,
    pub type_: aclrtMemLocationType,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    ["Size of aclrtMemLocation"][::core::mem::size_of::<aclrtMemLocation>() - 8usize];
    [
        "Alignment of aclrtMemLocation",
    ][::core::mem::align_of::<aclrtMemLocation>() - 4usize];
    [
        "Offset of field: aclrtMemLocation::id",
    ][::core::mem::offset_of!(aclrtMemLocation, id) - 0usize];
    [
        "Offset of field: aclrtMemLocation::type_",
    ][::core::mem::offset_of!(aclrtMemLocation, type_) - 4usize];
};
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct aclrtPtrAttributes {
    pub location: aclrtMemLocation,
    /// Bytes.
    pub pageSize: u32,
    pub rsv: [u32; 4usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of aclrtPtrAttributes",
    ][::core::mem::size_of::<aclrtPtrAttributes>() - 28usize];
    [
        "Alignment of aclrtPtrAttributes",
    ][::core::mem::align_of::<aclrtPtrAttributes>() - 4usize];
    [
        "Offset of field: aclrtPtrAttributes::location",
    ][::core::mem::offset_of!(aclrtPtrAttributes, location) - 0usize];
    [
        "Offset of field: aclrtPtrAttributes::pageSize",
    ][::core::mem::offset_of!(aclrtPtrAttributes, pageSize) - 8usize];
    [
        "Offset of field: aclrtPtrAttributes::rsv",
    ][::core::mem::offset_of!(aclrtPtrAttributes, rsv) - 12usize];
};
impl aclrtHostRegisterType {
    pub const ACL_HOST_REGISTER_MAPPED: aclrtHostRegisterType = aclrtHostRegisterType(0);
    pub const ACL_HOST_REGISTER_IOMEMORY: aclrtHostRegisterType = aclrtHostRegisterType(
        4,
    );
    pub const ACL_HOST_REGISTER_READONLY: aclrtHostRegisterType = aclrtHostRegisterType(
        8,
    );
}
#[repr(transparent)]
/// How `aclrtHostRegister` registers.
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtHostRegisterType(pub ::core::ffi::c_uint);
impl aclrtStreamStatus {
    pub const ACL_STREAM_STATUS_COMPLETE: aclrtStreamStatus = aclrtStreamStatus(0);
    pub const ACL_STREAM_STATUS_NOT_READY: aclrtStreamStatus = aclrtStreamStatus(1);
}
#[repr(transparent)]
/// The other way round than `aclrtEventRecordedStatus`.
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtStreamStatus(pub ::core::ffi::c_uint);
pub type aclrtHostFunc = ::core::option::Option<
    unsafe extern "C" fn(args: *mut ::core::ffi::c_void),
>;
/// For `aclrtValueWait`: until the word is at least the value.
pub const ACL_STREAM_WAIT_VALUE_GEQ: u32 = 0;
pub const ACL_EVENT_SYNC: u32 = 1;
/// The event can be opened by other processes. Alone, with no other flag.
pub const ACL_EVENT_IPC: u32 = 64;
impl aclrtEventRecordedStatus {
    pub const ACL_EVENT_RECORDED_STATUS_NOT_READY: aclrtEventRecordedStatus = aclrtEventRecordedStatus(
        0,
    );
    pub const ACL_EVENT_RECORDED_STATUS_COMPLETE: aclrtEventRecordedStatus = aclrtEventRecordedStatus(
        1,
    );
}
#[repr(transparent)]
/// The other way round than `aclrtStreamStatus`.
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtEventRecordedStatus(pub ::core::ffi::c_uint);
/// Names an event for other processes. Passed by value.
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct aclrtIpcEventHandle {
    pub reserved: [::core::ffi::c_char; 64usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of aclrtIpcEventHandle",
    ][::core::mem::size_of::<aclrtIpcEventHandle>() - 64usize];
    [
        "Alignment of aclrtIpcEventHandle",
    ][::core::mem::align_of::<aclrtIpcEventHandle>() - 1usize];
    [
        "Offset of field: aclrtIpcEventHandle::reserved",
    ][::core::mem::offset_of!(aclrtIpcEventHandle, reserved) - 0usize];
};
pub const ACL_RT_IPC_MEM_EXPORT_FLAG_DEFAULT: u64 = 0;
/// Any process that has the key may import; there is no list.
pub const ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION: u64 = 1;
pub const ACL_RT_IPC_MEM_IMPORT_FLAG_DEFAULT: u64 = 0;
/// Enables access between the two devices, both ways.
pub const ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS: u64 = 1;
impl aclrtMemAllocationType {
    pub const ACL_MEM_ALLOCATION_TYPE_PINNED: aclrtMemAllocationType = aclrtMemAllocationType(
        0,
    );
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtMemAllocationType(pub ::core::ffi::c_uint);
impl aclrtMemHandleType {
    pub const ACL_MEM_HANDLE_TYPE_NONE: aclrtMemHandleType = aclrtMemHandleType(0);
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtMemHandleType(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct aclrtPhysicalMemProp {
    pub handleType: aclrtMemHandleType,
    pub allocationType: aclrtMemAllocationType,
    pub memAttr: aclrtMemAttr,
    pub location: aclrtMemLocation,
    pub reserve: u64,
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of aclrtPhysicalMemProp",
    ][::core::mem::size_of::<aclrtPhysicalMemProp>() - 32usize];
    [
        "Alignment of aclrtPhysicalMemProp",
    ][::core::mem::align_of::<aclrtPhysicalMemProp>() - 8usize];
    [
        "Offset of field: aclrtPhysicalMemProp::handleType",
    ][::core::mem::offset_of!(aclrtPhysicalMemProp, handleType) - 0usize];
    [
        "Offset of field: aclrtPhysicalMemProp::allocationType",
    ][::core::mem::offset_of!(aclrtPhysicalMemProp, allocationType) - 4usize];
    [
        "Offset of field: aclrtPhysicalMemProp::memAttr",
    ][::core::mem::offset_of!(aclrtPhysicalMemProp, memAttr) - 8usize];
    [
        "Offset of field: aclrtPhysicalMemProp::location",
    ][::core::mem::offset_of!(aclrtPhysicalMemProp, location) - 12usize];
    [
        "Offset of field: aclrtPhysicalMemProp::reserve",
    ][::core::mem::offset_of!(aclrtPhysicalMemProp, reserve) - 24usize];
};
impl aclrtMemGranularityOptions {
    pub const ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM: aclrtMemGranularityOptions = aclrtMemGranularityOptions(
        0,
    );
    pub const ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED: aclrtMemGranularityOptions = aclrtMemGranularityOptions(
        1,
    );
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtMemGranularityOptions(pub ::core::ffi::c_uint);
pub const ACL_RT_VMM_EXPORT_FLAG_DEFAULT: u64 = 0;
/// Any process that has the handle may import; there is no list.
pub const ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION: u64 = 1;
impl aclrtMemAccessFlags {
    pub const ACL_RT_MEM_ACCESS_FLAGS_NONE: aclrtMemAccessFlags = aclrtMemAccessFlags(0);
    pub const ACL_RT_MEM_ACCESS_FLAGS_READ: aclrtMemAccessFlags = aclrtMemAccessFlags(1);
    pub const ACL_RT_MEM_ACCESS_FLAGS_READWRITE: aclrtMemAccessFlags = aclrtMemAccessFlags(
        3,
    );
}
#[repr(transparent)]
#[derive(Debug, Copy, Clone, Hash, PartialEq, Eq)]
pub struct aclrtMemAccessFlags(pub ::core::ffi::c_uint);
#[repr(C)]
#[derive(Debug, Copy, Clone, PartialEq, Eq)]
pub struct aclrtMemAccessDesc {
    pub flags: aclrtMemAccessFlags,
    pub location: aclrtMemLocation,
    pub rsv: [u8; 12usize],
}
#[allow(clippy::unnecessary_operation, clippy::identity_op)]
const _: () = {
    [
        "Size of aclrtMemAccessDesc",
    ][::core::mem::size_of::<aclrtMemAccessDesc>() - 24usize];
    [
        "Alignment of aclrtMemAccessDesc",
    ][::core::mem::align_of::<aclrtMemAccessDesc>() - 4usize];
    [
        "Offset of field: aclrtMemAccessDesc::flags",
    ][::core::mem::offset_of!(aclrtMemAccessDesc, flags) - 0usize];
    [
        "Offset of field: aclrtMemAccessDesc::location",
    ][::core::mem::offset_of!(aclrtMemAccessDesc, location) - 4usize];
    [
        "Offset of field: aclrtMemAccessDesc::rsv",
    ][::core::mem::offset_of!(aclrtMemAccessDesc, rsv) - 12usize];
};
pub struct Acl {
    __library: ::libloading::Library,
    pub aclInit: Result<
        unsafe extern "C" fn(configPath: *const ::core::ffi::c_char) -> aclError,
        ::libloading::Error,
    >,
    pub aclFinalizeReference: Result<
        unsafe extern "C" fn(refCount: *mut u64) -> aclError,
        ::libloading::Error,
    >,
    pub aclGetRecentErrMsg: Result<
        unsafe extern "C" fn() -> *const ::core::ffi::c_char,
        ::libloading::Error,
    >,
    pub aclsysGetVersionStr: Result<
        unsafe extern "C" fn(
            pkgName: *mut ::core::ffi::c_char,
            versionStr: *mut ::core::ffi::c_char,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetVersion: Result<
        unsafe extern "C" fn(
            majorVersion: *mut i32,
            minorVersion: *mut i32,
            patchVersion: *mut i32,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetSocName: Result<
        unsafe extern "C" fn() -> *const ::core::ffi::c_char,
        ::libloading::Error,
    >,
    pub aclrtGetDeviceCount: Result<
        unsafe extern "C" fn(count: *mut u32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtSetDevice: Result<
        unsafe extern "C" fn(deviceId: i32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtResetDevice: Result<
        unsafe extern "C" fn(deviceId: i32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtSynchronizeDevice: Result<
        unsafe extern "C" fn() -> aclError,
        ::libloading::Error,
    >,
    pub aclrtDeviceGetUuid: Result<
        unsafe extern "C" fn(deviceId: i32, uuid: *mut aclrtUuid) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetDeviceInfo: Result<
        unsafe extern "C" fn(
            deviceId: u32,
            attr: aclrtDevAttr,
            value: *mut i64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetMemInfo: Result<
        unsafe extern "C" fn(
            attr: aclrtMemAttr,
            free: *mut usize,
            total: *mut usize,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtDeviceGetBareTgid: Result<
        unsafe extern "C" fn(pid: *mut i32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetLogicDevIdByUserDevId: Result<
        unsafe extern "C" fn(userDevid: i32, logicDevId: *mut i32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetPhyDevIdByLogicDevId: Result<
        unsafe extern "C" fn(logicDevId: i32, phyDevId: *mut i32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtSetCurrentContext: Result<
        unsafe extern "C" fn(context: aclrtContext) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtGetCurrentContext: Result<
        unsafe extern "C" fn(context: *mut aclrtContext) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtDeviceCanAccessPeer: Result<
        unsafe extern "C" fn(
            canAccessPeer: *mut i32,
            deviceId: i32,
            peerDeviceId: i32,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtDeviceEnablePeerAccess: Result<
        unsafe extern "C" fn(peerDeviceId: i32, flags: u32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtDevicePeerAccessStatus: Result<
        unsafe extern "C" fn(
            deviceId: i32,
            peerDeviceId: i32,
            status: *mut i32,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMallocAlign32: Result<
        unsafe extern "C" fn(
            devPtr: *mut *mut ::core::ffi::c_void,
            size: usize,
            policy: aclrtMemMallocPolicy,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtFree: Result<
        unsafe extern "C" fn(devPtr: *mut ::core::ffi::c_void) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMallocHost: Result<
        unsafe extern "C" fn(
            hostPtr: *mut *mut ::core::ffi::c_void,
            size: usize,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtFreeHost: Result<
        unsafe extern "C" fn(hostPtr: *mut ::core::ffi::c_void) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtHostRegister: Result<
        unsafe extern "C" fn(
            ptr: *mut ::core::ffi::c_void,
            size: u64,
            type_: aclrtHostRegisterType,
            devPtr: *mut *mut ::core::ffi::c_void,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtHostUnregister: Result<
        unsafe extern "C" fn(ptr: *mut ::core::ffi::c_void) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtPointerGetAttributes: Result<
        unsafe extern "C" fn(
            ptr: *const ::core::ffi::c_void,
            attributes: *mut aclrtPtrAttributes,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemGetAddressRange: Result<
        unsafe extern "C" fn(
            ptr: *mut ::core::ffi::c_void,
            pbase: *mut *mut ::core::ffi::c_void,
            psize: *mut usize,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemcpyAsync: Result<
        unsafe extern "C" fn(
            dst: *mut ::core::ffi::c_void,
            destMax: usize,
            src: *const ::core::ffi::c_void,
            count: usize,
            kind: aclrtMemcpyKind,
            stream: aclrtStream,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemsetAsync: Result<
        unsafe extern "C" fn(
            devPtr: *mut ::core::ffi::c_void,
            maxCount: usize,
            value: i32,
            count: usize,
            stream: aclrtStream,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtCreateStream: Result<
        unsafe extern "C" fn(stream: *mut aclrtStream) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtDestroyStream: Result<
        unsafe extern "C" fn(stream: aclrtStream) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtSynchronizeStream: Result<
        unsafe extern "C" fn(stream: aclrtStream) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtSynchronizeStreamWithTimeout: Result<
        unsafe extern "C" fn(stream: aclrtStream, timeout: i32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtStreamQuery: Result<
        unsafe extern "C" fn(
            stream: aclrtStream,
            status: *mut aclrtStreamStatus,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtStreamWaitEvent: Result<
        unsafe extern "C" fn(stream: aclrtStream, event: aclrtEvent) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtValueWrite: Result<
        unsafe extern "C" fn(
            devAddr: *mut ::core::ffi::c_void,
            value: u64,
            flag: u32,
            stream: aclrtStream,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtValueWait: Result<
        unsafe extern "C" fn(
            devAddr: *mut ::core::ffi::c_void,
            value: u64,
            flag: u32,
            stream: aclrtStream,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtLaunchHostFunc: Result<
        unsafe extern "C" fn(
            stream: aclrtStream,
            fn_: aclrtHostFunc,
            args: *mut ::core::ffi::c_void,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtCreateEventExWithFlag: Result<
        unsafe extern "C" fn(event: *mut aclrtEvent, flag: u32) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtDestroyEvent: Result<
        unsafe extern "C" fn(event: aclrtEvent) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtRecordEvent: Result<
        unsafe extern "C" fn(event: aclrtEvent, stream: aclrtStream) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtQueryEventStatus: Result<
        unsafe extern "C" fn(
            event: aclrtEvent,
            status: *mut aclrtEventRecordedStatus,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtIpcGetEventHandle: Result<
        unsafe extern "C" fn(
            event: aclrtEvent,
            handle: *mut aclrtIpcEventHandle,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtIpcOpenEventHandle: Result<
        unsafe extern "C" fn(
            handle: aclrtIpcEventHandle,
            event: *mut aclrtEvent,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtIpcMemGetExportKey: Result<
        unsafe extern "C" fn(
            devPtr: *mut ::core::ffi::c_void,
            size: usize,
            key: *mut ::core::ffi::c_char,
            len: usize,
            flags: u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtIpcMemClose: Result<
        unsafe extern "C" fn(key: *const ::core::ffi::c_char) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtIpcMemImportByKey: Result<
        unsafe extern "C" fn(
            devPtr: *mut *mut ::core::ffi::c_void,
            key: *const ::core::ffi::c_char,
            flags: u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtIpcMemSetImportPid: Result<
        unsafe extern "C" fn(
            key: *const ::core::ffi::c_char,
            pid: *mut i32,
            num: usize,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtReserveMemAddress: Result<
        unsafe extern "C" fn(
            virPtr: *mut *mut ::core::ffi::c_void,
            size: usize,
            alignment: usize,
            expectPtr: *mut ::core::ffi::c_void,
            flags: u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtReleaseMemAddress: Result<
        unsafe extern "C" fn(virPtr: *mut ::core::ffi::c_void) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMallocPhysical: Result<
        unsafe extern "C" fn(
            handle: *mut aclrtDrvMemHandle,
            size: usize,
            prop: *const aclrtPhysicalMemProp,
            flags: u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtFreePhysical: Result<
        unsafe extern "C" fn(handle: aclrtDrvMemHandle) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMapMem: Result<
        unsafe extern "C" fn(
            virPtr: *mut ::core::ffi::c_void,
            size: usize,
            offset: usize,
            handle: aclrtDrvMemHandle,
            flags: u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtUnmapMem: Result<
        unsafe extern "C" fn(virPtr: *mut ::core::ffi::c_void) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemSetAccess: Result<
        unsafe extern "C" fn(
            virPtr: *mut ::core::ffi::c_void,
            size: usize,
            desc: *mut aclrtMemAccessDesc,
            count: usize,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemGetAllocationGranularity: Result<
        unsafe extern "C" fn(
            prop: *mut aclrtPhysicalMemProp,
            option: aclrtMemGranularityOptions,
            granularity: *mut usize,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemRetainAllocationHandle: Result<
        unsafe extern "C" fn(
            virPtr: *mut ::core::ffi::c_void,
            handle: *mut aclrtDrvMemHandle,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemExportToShareableHandle: Result<
        unsafe extern "C" fn(
            handle: aclrtDrvMemHandle,
            handleType: aclrtMemHandleType,
            flags: u64,
            shareableHandle: *mut u64,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemImportFromShareableHandle: Result<
        unsafe extern "C" fn(
            shareableHandle: u64,
            deviceId: i32,
            handle: *mut aclrtDrvMemHandle,
        ) -> aclError,
        ::libloading::Error,
    >,
    pub aclrtMemSetPidToShareableHandle: Result<
        unsafe extern "C" fn(
            shareableHandle: u64,
            pid: *mut i32,
            pidNum: usize,
        ) -> aclError,
        ::libloading::Error,
    >,
}
impl Acl {
    pub unsafe fn new<P>(path: P) -> Result<Self, ::libloading::Error>
    where
        P: AsRef<::std::ffi::OsStr>,
    {
        let path = path.as_ref();
        let library = unsafe { ::libloading::Library::new(path) }?;
        unsafe { Self::from_library(library) }
    }
    pub unsafe fn from_library<L>(library: L) -> Result<Self, ::libloading::Error>
    where
        L: Into<::libloading::Library>,
    {
        let __library = library.into();
        let aclInit = unsafe { __library.get(b"aclInit\0") }.map(|sym| *sym);
        let aclFinalizeReference = unsafe { __library.get(b"aclFinalizeReference\0") }
            .map(|sym| *sym);
        let aclGetRecentErrMsg = unsafe { __library.get(b"aclGetRecentErrMsg\0") }
            .map(|sym| *sym);
        let aclsysGetVersionStr = unsafe { __library.get(b"aclsysGetVersionStr\0") }
            .map(|sym| *sym);
        let aclrtGetVersion = unsafe { __library.get(b"aclrtGetVersion\0") }
            .map(|sym| *sym);
        let aclrtGetSocName = unsafe { __library.get(b"aclrtGetSocName\0") }
            .map(|sym| *sym);
        let aclrtGetDeviceCount = unsafe { __library.get(b"aclrtGetDeviceCount\0") }
            .map(|sym| *sym);
        let aclrtSetDevice = unsafe { __library.get(b"aclrtSetDevice\0") }
            .map(|sym| *sym);
        let aclrtResetDevice = unsafe { __library.get(b"aclrtResetDevice\0") }
            .map(|sym| *sym);
        let aclrtSynchronizeDevice = unsafe {
            __library.get(b"aclrtSynchronizeDevice\0")
        }
            .map(|sym| *sym);
        let aclrtDeviceGetUuid = unsafe { __library.get(b"aclrtDeviceGetUuid\0") }
            .map(|sym| *sym);
        let aclrtGetDeviceInfo = unsafe { __library.get(b"aclrtGetDeviceInfo\0") }
            .map(|sym| *sym);
        let aclrtGetMemInfo = unsafe { __library.get(b"aclrtGetMemInfo\0") }
            .map(|sym| *sym);
        let aclrtDeviceGetBareTgid = unsafe {
            __library.get(b"aclrtDeviceGetBareTgid\0")
        }
            .map(|sym| *sym);
        let aclrtGetLogicDevIdByUserDevId = unsafe {
            __library.get(b"aclrtGetLogicDevIdByUserDevId\0")
        }
            .map(|sym| *sym);
        let aclrtGetPhyDevIdByLogicDevId = unsafe {
            __library.get(b"aclrtGetPhyDevIdByLogicDevId\0")
        }
            .map(|sym| *sym);
        let aclrtSetCurrentContext = unsafe {
            __library.get(b"aclrtSetCurrentContext\0")
        }
            .map(|sym| *sym);
        let aclrtGetCurrentContext = unsafe {
            __library.get(b"aclrtGetCurrentContext\0")
        }
            .map(|sym| *sym);
        let aclrtDeviceCanAccessPeer = unsafe {
            __library.get(b"aclrtDeviceCanAccessPeer\0")
        }
            .map(|sym| *sym);
        let aclrtDeviceEnablePeerAccess = unsafe {
            __library.get(b"aclrtDeviceEnablePeerAccess\0")
        }
            .map(|sym| *sym);
        let aclrtDevicePeerAccessStatus = unsafe {
            __library.get(b"aclrtDevicePeerAccessStatus\0")
        }
            .map(|sym| *sym);
        let aclrtMallocAlign32 = unsafe { __library.get(b"aclrtMallocAlign32\0") }
            .map(|sym| *sym);
        let aclrtFree = unsafe { __library.get(b"aclrtFree\0") }.map(|sym| *sym);
        let aclrtMallocHost = unsafe { __library.get(b"aclrtMallocHost\0") }
            .map(|sym| *sym);
        let aclrtFreeHost = unsafe { __library.get(b"aclrtFreeHost\0") }.map(|sym| *sym);
        let aclrtHostRegister = unsafe { __library.get(b"aclrtHostRegister\0") }
            .map(|sym| *sym);
        let aclrtHostUnregister = unsafe { __library.get(b"aclrtHostUnregister\0") }
            .map(|sym| *sym);
        let aclrtPointerGetAttributes = unsafe {
            __library.get(b"aclrtPointerGetAttributes\0")
        }
            .map(|sym| *sym);
        let aclrtMemGetAddressRange = unsafe {
            __library.get(b"aclrtMemGetAddressRange\0")
        }
            .map(|sym| *sym);
        let aclrtMemcpyAsync = unsafe { __library.get(b"aclrtMemcpyAsync\0") }
            .map(|sym| *sym);
        let aclrtMemsetAsync = unsafe { __library.get(b"aclrtMemsetAsync\0") }
            .map(|sym| *sym);
        let aclrtCreateStream = unsafe { __library.get(b"aclrtCreateStream\0") }
            .map(|sym| *sym);
        let aclrtDestroyStream = unsafe { __library.get(b"aclrtDestroyStream\0") }
            .map(|sym| *sym);
        let aclrtSynchronizeStream = unsafe {
            __library.get(b"aclrtSynchronizeStream\0")
        }
            .map(|sym| *sym);
        let aclrtSynchronizeStreamWithTimeout = unsafe {
            __library.get(b"aclrtSynchronizeStreamWithTimeout\0")
        }
            .map(|sym| *sym);
        let aclrtStreamQuery = unsafe { __library.get(b"aclrtStreamQuery\0") }
            .map(|sym| *sym);
        let aclrtStreamWaitEvent = unsafe { __library.get(b"aclrtStreamWaitEvent\0") }
            .map(|sym| *sym);
        let aclrtValueWrite = unsafe { __library.get(b"aclrtValueWrite\0") }
            .map(|sym| *sym);
        let aclrtValueWait = unsafe { __library.get(b"aclrtValueWait\0") }
            .map(|sym| *sym);
        let aclrtLaunchHostFunc = unsafe { __library.get(b"aclrtLaunchHostFunc\0") }
            .map(|sym| *sym);
        let aclrtCreateEventExWithFlag = unsafe {
            __library.get(b"aclrtCreateEventExWithFlag\0")
        }
            .map(|sym| *sym);
        let aclrtDestroyEvent = unsafe { __library.get(b"aclrtDestroyEvent\0") }
            .map(|sym| *sym);
        let aclrtRecordEvent = unsafe { __library.get(b"aclrtRecordEvent\0") }
            .map(|sym| *sym);
        let aclrtQueryEventStatus = unsafe { __library.get(b"aclrtQueryEventStatus\0") }
            .map(|sym| *sym);
        let aclrtIpcGetEventHandle = unsafe {
            __library.get(b"aclrtIpcGetEventHandle\0")
        }
            .map(|sym| *sym);
        let aclrtIpcOpenEventHandle = unsafe {
            __library.get(b"aclrtIpcOpenEventHandle\0")
        }
            .map(|sym| *sym);
        let aclrtIpcMemGetExportKey = unsafe {
            __library.get(b"aclrtIpcMemGetExportKey\0")
        }
            .map(|sym| *sym);
        let aclrtIpcMemClose = unsafe { __library.get(b"aclrtIpcMemClose\0") }
            .map(|sym| *sym);
        let aclrtIpcMemImportByKey = unsafe {
            __library.get(b"aclrtIpcMemImportByKey\0")
        }
            .map(|sym| *sym);
        let aclrtIpcMemSetImportPid = unsafe {
            __library.get(b"aclrtIpcMemSetImportPid\0")
        }
            .map(|sym| *sym);
        let aclrtReserveMemAddress = unsafe {
            __library.get(b"aclrtReserveMemAddress\0")
        }
            .map(|sym| *sym);
        let aclrtReleaseMemAddress = unsafe {
            __library.get(b"aclrtReleaseMemAddress\0")
        }
            .map(|sym| *sym);
        let aclrtMallocPhysical = unsafe { __library.get(b"aclrtMallocPhysical\0") }
            .map(|sym| *sym);
        let aclrtFreePhysical = unsafe { __library.get(b"aclrtFreePhysical\0") }
            .map(|sym| *sym);
        let aclrtMapMem = unsafe { __library.get(b"aclrtMapMem\0") }.map(|sym| *sym);
        let aclrtUnmapMem = unsafe { __library.get(b"aclrtUnmapMem\0") }.map(|sym| *sym);
        let aclrtMemSetAccess = unsafe { __library.get(b"aclrtMemSetAccess\0") }
            .map(|sym| *sym);
        let aclrtMemGetAllocationGranularity = unsafe {
            __library.get(b"aclrtMemGetAllocationGranularity\0")
        }
            .map(|sym| *sym);
        let aclrtMemRetainAllocationHandle = unsafe {
            __library.get(b"aclrtMemRetainAllocationHandle\0")
        }
            .map(|sym| *sym);
        let aclrtMemExportToShareableHandle = unsafe {
            __library.get(b"aclrtMemExportToShareableHandle\0")
        }
            .map(|sym| *sym);
        let aclrtMemImportFromShareableHandle = unsafe {
            __library.get(b"aclrtMemImportFromShareableHandle\0")
        }
            .map(|sym| *sym);
        let aclrtMemSetPidToShareableHandle = unsafe {
            __library.get(b"aclrtMemSetPidToShareableHandle\0")
        }
            .map(|sym| *sym);
        Ok(Acl {
            __library,
            aclInit,
            aclFinalizeReference,
            aclGetRecentErrMsg,
            aclsysGetVersionStr,
            aclrtGetVersion,
            aclrtGetSocName,
            aclrtGetDeviceCount,
            aclrtSetDevice,
            aclrtResetDevice,
            aclrtSynchronizeDevice,
            aclrtDeviceGetUuid,
            aclrtGetDeviceInfo,
            aclrtGetMemInfo,
            aclrtDeviceGetBareTgid,
            aclrtGetLogicDevIdByUserDevId,
            aclrtGetPhyDevIdByLogicDevId,
            aclrtSetCurrentContext,
            aclrtGetCurrentContext,
            aclrtDeviceCanAccessPeer,
            aclrtDeviceEnablePeerAccess,
            aclrtDevicePeerAccessStatus,
            aclrtMallocAlign32,
            aclrtFree,
            aclrtMallocHost,
            aclrtFreeHost,
            aclrtHostRegister,
            aclrtHostUnregister,
            aclrtPointerGetAttributes,
            aclrtMemGetAddressRange,
            aclrtMemcpyAsync,
            aclrtMemsetAsync,
            aclrtCreateStream,
            aclrtDestroyStream,
            aclrtSynchronizeStream,
            aclrtSynchronizeStreamWithTimeout,
            aclrtStreamQuery,
            aclrtStreamWaitEvent,
            aclrtValueWrite,
            aclrtValueWait,
            aclrtLaunchHostFunc,
            aclrtCreateEventExWithFlag,
            aclrtDestroyEvent,
            aclrtRecordEvent,
            aclrtQueryEventStatus,
            aclrtIpcGetEventHandle,
            aclrtIpcOpenEventHandle,
            aclrtIpcMemGetExportKey,
            aclrtIpcMemClose,
            aclrtIpcMemImportByKey,
            aclrtIpcMemSetImportPid,
            aclrtReserveMemAddress,
            aclrtReleaseMemAddress,
            aclrtMallocPhysical,
            aclrtFreePhysical,
            aclrtMapMem,
            aclrtUnmapMem,
            aclrtMemSetAccess,
            aclrtMemGetAllocationGranularity,
            aclrtMemRetainAllocationHandle,
            aclrtMemExportToShareableHandle,
            aclrtMemImportFromShareableHandle,
            aclrtMemSetPidToShareableHandle,
        })
    }
    /// `configPath` may be null. A second call in a process returns `ACL_ERROR_REPEAT_INITIALIZE`, and is counted.
    pub unsafe fn aclInit(&self, configPath: *const ::core::ffi::c_char) -> aclError {
        unsafe {
            (self.aclInit.as_ref().expect("Expected function, got error."))(configPath)
        }
    }
    /// Takes back one `aclInit`, and tells how many are left.
    pub unsafe fn aclFinalizeReference(&self, refCount: *mut u64) -> aclError {
        unsafe {
            (self
                .aclFinalizeReference
                .as_ref()
                .expect("Expected function, got error."))(refCount)
        }
    }
    /// The calling thread's latest error as text, or null.
    pub unsafe fn aclGetRecentErrMsg(&self) -> *const ::core::ffi::c_char {
        unsafe {
            (self.aclGetRecentErrMsg.as_ref().expect("Expected function, got error."))()
        }
    }
    /// The version of an installed package by its name; `versionStr` has room for 128 bytes.
    pub unsafe fn aclsysGetVersionStr(
        &self,
        pkgName: *mut ::core::ffi::c_char,
        versionStr: *mut ::core::ffi::c_char,
    ) -> aclError {
        unsafe {
            (self
                .aclsysGetVersionStr
                .as_ref()
                .expect("Expected function, got error."))(pkgName, versionStr)
        }
    }
    /// The version of the interface itself.
    pub unsafe fn aclrtGetVersion(
        &self,
        majorVersion: *mut i32,
        minorVersion: *mut i32,
        patchVersion: *mut i32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtGetVersion
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(majorVersion, minorVersion, patchVersion)
        }
    }
    /// The chip's name, or null.
    pub unsafe fn aclrtGetSocName(&self) -> *const ::core::ffi::c_char {
        unsafe {
            (self.aclrtGetSocName.as_ref().expect("Expected function, got error."))()
        }
    }
    pub unsafe fn aclrtGetDeviceCount(&self, count: *mut u32) -> aclError {
        unsafe {
            (self
                .aclrtGetDeviceCount
                .as_ref()
                .expect("Expected function, got error."))(count)
        }
    }
    /// Makes a device and its default context current for the calling thread. Counted.
    pub unsafe fn aclrtSetDevice(&self, deviceId: i32) -> aclError {
        unsafe {
            (self
                .aclrtSetDevice
                .as_ref()
                .expect("Expected function, got error."))(deviceId)
        }
    }
    /// Takes back one `aclrtSetDevice`; the last one frees what the process has on the device.
    pub unsafe fn aclrtResetDevice(&self, deviceId: i32) -> aclError {
        unsafe {
            (self
                .aclrtResetDevice
                .as_ref()
                .expect("Expected function, got error."))(deviceId)
        }
    }
    /// Waits for all work on the current device.
    pub unsafe fn aclrtSynchronizeDevice(&self) -> aclError {
        unsafe {
            (self
                .aclrtSynchronizeDevice
                .as_ref()
                .expect("Expected function, got error."))()
        }
    }
    pub unsafe fn aclrtDeviceGetUuid(
        &self,
        deviceId: i32,
        uuid: *mut aclrtUuid,
    ) -> aclError {
        unsafe {
            (self
                .aclrtDeviceGetUuid
                .as_ref()
                .expect("Expected function, got error."))(deviceId, uuid)
        }
    }
    pub unsafe fn aclrtGetDeviceInfo(
        &self,
        deviceId: u32,
        attr: aclrtDevAttr,
        value: *mut i64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtGetDeviceInfo
                .as_ref()
                .expect("Expected function, got error."))(deviceId, attr, value)
        }
    }
    /// Bytes on the current device.
    pub unsafe fn aclrtGetMemInfo(
        &self,
        attr: aclrtMemAttr,
        free: *mut usize,
        total: *mut usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtGetMemInfo
                .as_ref()
                .expect("Expected function, got error."))(attr, free, total)
        }
    }
    /// The number by which the driver knows this process: what an exporter has to list.
    pub unsafe fn aclrtDeviceGetBareTgid(&self, pid: *mut i32) -> aclError {
        unsafe {
            (self
                .aclrtDeviceGetBareTgid
                .as_ref()
                .expect("Expected function, got error."))(pid)
        }
    }
    /// From the number after ASCEND_RT_VISIBLE_DEVICES to the container's.
    pub unsafe fn aclrtGetLogicDevIdByUserDevId(
        &self,
        userDevid: i32,
        logicDevId: *mut i32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtGetLogicDevIdByUserDevId
                .as_ref()
                .expect("Expected function, got error."))(userDevid, logicDevId)
        }
    }
    /// To the host's number.
    pub unsafe fn aclrtGetPhyDevIdByLogicDevId(
        &self,
        logicDevId: i32,
        phyDevId: *mut i32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtGetPhyDevIdByLogicDevId
                .as_ref()
                .expect("Expected function, got error."))(logicDevId, phyDevId)
        }
    }
    pub unsafe fn aclrtSetCurrentContext(&self, context: aclrtContext) -> aclError {
        unsafe {
            (self
                .aclrtSetCurrentContext
                .as_ref()
                .expect("Expected function, got error."))(context)
        }
    }
    pub unsafe fn aclrtGetCurrentContext(&self, context: *mut aclrtContext) -> aclError {
        unsafe {
            (self
                .aclrtGetCurrentContext
                .as_ref()
                .expect("Expected function, got error."))(context)
        }
    }
    /// 1 where `deviceId` can reach the memory of `peerDeviceId`, else 0.
    pub unsafe fn aclrtDeviceCanAccessPeer(
        &self,
        canAccessPeer: *mut i32,
        deviceId: i32,
        peerDeviceId: i32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtDeviceCanAccessPeer
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(canAccessPeer, deviceId, peerDeviceId)
        }
    }
    /// Lets the current device reach the peer's memory, one way. `flags` is 0.
    pub unsafe fn aclrtDeviceEnablePeerAccess(
        &self,
        peerDeviceId: i32,
        flags: u32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtDeviceEnablePeerAccess
                .as_ref()
                .expect("Expected function, got error."))(peerDeviceId, flags)
        }
    }
    /// 1 where the access is in place, else 0.
    pub unsafe fn aclrtDevicePeerAccessStatus(
        &self,
        deviceId: i32,
        peerDeviceId: i32,
        status: *mut i32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtDevicePeerAccessStatus
                .as_ref()
                .expect("Expected function, got error."))(deviceId, peerDeviceId, status)
        }
    }
    /// Adds nothing to `size`, where `aclrtMalloc` adds 32 bytes on some devices, and with them a huge page.
    pub unsafe fn aclrtMallocAlign32(
        &self,
        devPtr: *mut *mut ::core::ffi::c_void,
        size: usize,
        policy: aclrtMemMallocPolicy,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMallocAlign32
                .as_ref()
                .expect("Expected function, got error."))(devPtr, size, policy)
        }
    }
    pub unsafe fn aclrtFree(&self, devPtr: *mut ::core::ffi::c_void) -> aclError {
        unsafe {
            (self.aclrtFree.as_ref().expect("Expected function, got error."))(devPtr)
        }
    }
    pub unsafe fn aclrtMallocHost(
        &self,
        hostPtr: *mut *mut ::core::ffi::c_void,
        size: usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMallocHost
                .as_ref()
                .expect("Expected function, got error."))(hostPtr, size)
        }
    }
    pub unsafe fn aclrtFreeHost(&self, hostPtr: *mut ::core::ffi::c_void) -> aclError {
        unsafe {
            (self
                .aclrtFreeHost
                .as_ref()
                .expect("Expected function, got error."))(hostPtr)
        }
    }
    pub unsafe fn aclrtHostRegister(
        &self,
        ptr: *mut ::core::ffi::c_void,
        size: u64,
        type_: aclrtHostRegisterType,
        devPtr: *mut *mut ::core::ffi::c_void,
    ) -> aclError {
        unsafe {
            (self
                .aclrtHostRegister
                .as_ref()
                .expect("Expected function, got error."))(ptr, size, type_, devPtr)
        }
    }
    pub unsafe fn aclrtHostUnregister(&self, ptr: *mut ::core::ffi::c_void) -> aclError {
        unsafe {
            (self
                .aclrtHostUnregister
                .as_ref()
                .expect("Expected function, got error."))(ptr)
        }
    }
    /// Fails for memory that the runtime does not know.
    pub unsafe fn aclrtPointerGetAttributes(
        &self,
        ptr: *const ::core::ffi::c_void,
        attributes: *mut aclrtPtrAttributes,
    ) -> aclError {
        unsafe {
            (self
                .aclrtPointerGetAttributes
                .as_ref()
                .expect("Expected function, got error."))(ptr, attributes)
        }
    }
    /// The allocation that an address lies in.
    pub unsafe fn aclrtMemGetAddressRange(
        &self,
        ptr: *mut ::core::ffi::c_void,
        pbase: *mut *mut ::core::ffi::c_void,
        psize: *mut usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemGetAddressRange
                .as_ref()
                .expect("Expected function, got error."))(ptr, pbase, psize)
        }
    }
    pub unsafe fn aclrtMemcpyAsync(
        &self,
        dst: *mut ::core::ffi::c_void,
        destMax: usize,
        src: *const ::core::ffi::c_void,
        count: usize,
        kind: aclrtMemcpyKind,
        stream: aclrtStream,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemcpyAsync
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(dst, destMax, src, count, kind, stream)
        }
    }
    pub unsafe fn aclrtMemsetAsync(
        &self,
        devPtr: *mut ::core::ffi::c_void,
        maxCount: usize,
        value: i32,
        count: usize,
        stream: aclrtStream,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemsetAsync
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(devPtr, maxCount, value, count, stream)
        }
    }
    pub unsafe fn aclrtCreateStream(&self, stream: *mut aclrtStream) -> aclError {
        unsafe {
            (self
                .aclrtCreateStream
                .as_ref()
                .expect("Expected function, got error."))(stream)
        }
    }
    pub unsafe fn aclrtDestroyStream(&self, stream: aclrtStream) -> aclError {
        unsafe {
            (self
                .aclrtDestroyStream
                .as_ref()
                .expect("Expected function, got error."))(stream)
        }
    }
    pub unsafe fn aclrtSynchronizeStream(&self, stream: aclrtStream) -> aclError {
        unsafe {
            (self
                .aclrtSynchronizeStream
                .as_ref()
                .expect("Expected function, got error."))(stream)
        }
    }
    /// `timeout` in milliseconds; -1 waits for ever.
    pub unsafe fn aclrtSynchronizeStreamWithTimeout(
        &self,
        stream: aclrtStream,
        timeout: i32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtSynchronizeStreamWithTimeout
                .as_ref()
                .expect("Expected function, got error."))(stream, timeout)
        }
    }
    pub unsafe fn aclrtStreamQuery(
        &self,
        stream: aclrtStream,
        status: *mut aclrtStreamStatus,
    ) -> aclError {
        unsafe {
            (self
                .aclrtStreamQuery
                .as_ref()
                .expect("Expected function, got error."))(stream, status)
        }
    }
    pub unsafe fn aclrtStreamWaitEvent(
        &self,
        stream: aclrtStream,
        event: aclrtEvent,
    ) -> aclError {
        unsafe {
            (self
                .aclrtStreamWaitEvent
                .as_ref()
                .expect("Expected function, got error."))(stream, event)
        }
    }
    /// Writes a word of 64 bits when the stream gets there. `flag` is 0.
    pub unsafe fn aclrtValueWrite(
        &self,
        devAddr: *mut ::core::ffi::c_void,
        value: u64,
        flag: u32,
        stream: aclrtStream,
    ) -> aclError {
        unsafe {
            (self
                .aclrtValueWrite
                .as_ref()
                .expect("Expected function, got error."))(devAddr, value, flag, stream)
        }
    }
    /// Holds the stream until a word of 64 bits is to the value as `flag` says.
    pub unsafe fn aclrtValueWait(
        &self,
        devAddr: *mut ::core::ffi::c_void,
        value: u64,
        flag: u32,
        stream: aclrtStream,
    ) -> aclError {
        unsafe {
            (self
                .aclrtValueWait
                .as_ref()
                .expect("Expected function, got error."))(devAddr, value, flag, stream)
        }
    }
    /// Runs a function of the host when the stream gets there; nobody has to subscribe.
    pub unsafe fn aclrtLaunchHostFunc(
        &self,
        stream: aclrtStream,
        fn_: aclrtHostFunc,
        args: *mut ::core::ffi::c_void,
    ) -> aclError {
        unsafe {
            (self
                .aclrtLaunchHostFunc
                .as_ref()
                .expect("Expected function, got error."))(stream, fn_, args)
        }
    }
    pub unsafe fn aclrtCreateEventExWithFlag(
        &self,
        event: *mut aclrtEvent,
        flag: u32,
    ) -> aclError {
        unsafe {
            (self
                .aclrtCreateEventExWithFlag
                .as_ref()
                .expect("Expected function, got error."))(event, flag)
        }
    }
    pub unsafe fn aclrtDestroyEvent(&self, event: aclrtEvent) -> aclError {
        unsafe {
            (self
                .aclrtDestroyEvent
                .as_ref()
                .expect("Expected function, got error."))(event)
        }
    }
    pub unsafe fn aclrtRecordEvent(
        &self,
        event: aclrtEvent,
        stream: aclrtStream,
    ) -> aclError {
        unsafe {
            (self
                .aclrtRecordEvent
                .as_ref()
                .expect("Expected function, got error."))(event, stream)
        }
    }
    pub unsafe fn aclrtQueryEventStatus(
        &self,
        event: aclrtEvent,
        status: *mut aclrtEventRecordedStatus,
    ) -> aclError {
        unsafe {
            (self
                .aclrtQueryEventStatus
                .as_ref()
                .expect("Expected function, got error."))(event, status)
        }
    }
    /// Writes fewer bytes than the handle has: it is to be all zeros before.
    pub unsafe fn aclrtIpcGetEventHandle(
        &self,
        event: aclrtEvent,
        handle: *mut aclrtIpcEventHandle,
    ) -> aclError {
        unsafe {
            (self
                .aclrtIpcGetEventHandle
                .as_ref()
                .expect("Expected function, got error."))(event, handle)
        }
    }
    pub unsafe fn aclrtIpcOpenEventHandle(
        &self,
        handle: aclrtIpcEventHandle,
        event: *mut aclrtEvent,
    ) -> aclError {
        unsafe {
            (self
                .aclrtIpcOpenEventHandle
                .as_ref()
                .expect("Expected function, got error."))(handle, event)
        }
    }
    /// Writes a key with its final zero into `key`, which has room for 65 bytes (`len`).
    pub unsafe fn aclrtIpcMemGetExportKey(
        &self,
        devPtr: *mut ::core::ffi::c_void,
        size: usize,
        key: *mut ::core::ffi::c_char,
        len: usize,
        flags: u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtIpcMemGetExportKey
                .as_ref()
                .expect("Expected function, got error."))(devPtr, size, key, len, flags)
        }
    }
    /// In an importer: unmaps. In the exporter: ends the export, under the importers' hands.
    pub unsafe fn aclrtIpcMemClose(&self, key: *const ::core::ffi::c_char) -> aclError {
        unsafe {
            (self.aclrtIpcMemClose.as_ref().expect("Expected function, got error."))(key)
        }
    }
    pub unsafe fn aclrtIpcMemImportByKey(
        &self,
        devPtr: *mut *mut ::core::ffi::c_void,
        key: *const ::core::ffi::c_char,
        flags: u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtIpcMemImportByKey
                .as_ref()
                .expect("Expected function, got error."))(devPtr, key, flags)
        }
    }
    /// Adds to the list of processes that may import, at most 31 a call, by what `aclrtDeviceGetBareTgid` says there.
    pub unsafe fn aclrtIpcMemSetImportPid(
        &self,
        key: *const ::core::ffi::c_char,
        pid: *mut i32,
        num: usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtIpcMemSetImportPid
                .as_ref()
                .expect("Expected function, got error."))(key, pid, num)
        }
    }
    pub unsafe fn aclrtReserveMemAddress(
        &self,
        virPtr: *mut *mut ::core::ffi::c_void,
        size: usize,
        alignment: usize,
        expectPtr: *mut ::core::ffi::c_void,
        flags: u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtReserveMemAddress
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(virPtr, size, alignment, expectPtr, flags)
        }
    }
    pub unsafe fn aclrtReleaseMemAddress(
        &self,
        virPtr: *mut ::core::ffi::c_void,
    ) -> aclError {
        unsafe {
            (self
                .aclrtReleaseMemAddress
                .as_ref()
                .expect("Expected function, got error."))(virPtr)
        }
    }
    pub unsafe fn aclrtMallocPhysical(
        &self,
        handle: *mut aclrtDrvMemHandle,
        size: usize,
        prop: *const aclrtPhysicalMemProp,
        flags: u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMallocPhysical
                .as_ref()
                .expect("Expected function, got error."))(handle, size, prop, flags)
        }
    }
    pub unsafe fn aclrtFreePhysical(&self, handle: aclrtDrvMemHandle) -> aclError {
        unsafe {
            (self
                .aclrtFreePhysical
                .as_ref()
                .expect("Expected function, got error."))(handle)
        }
    }
    /// `size` is the whole of the physical memory, `offset` and `flags` are 0.
    pub unsafe fn aclrtMapMem(
        &self,
        virPtr: *mut ::core::ffi::c_void,
        size: usize,
        offset: usize,
        handle: aclrtDrvMemHandle,
        flags: u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMapMem
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(virPtr, size, offset, handle, flags)
        }
    }
    pub unsafe fn aclrtUnmapMem(&self, virPtr: *mut ::core::ffi::c_void) -> aclError {
        unsafe {
            (self.aclrtUnmapMem.as_ref().expect("Expected function, got error."))(virPtr)
        }
    }
    pub unsafe fn aclrtMemSetAccess(
        &self,
        virPtr: *mut ::core::ffi::c_void,
        size: usize,
        desc: *mut aclrtMemAccessDesc,
        count: usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemSetAccess
                .as_ref()
                .expect("Expected function, got error."))(virPtr, size, desc, count)
        }
    }
    pub unsafe fn aclrtMemGetAllocationGranularity(
        &self,
        prop: *mut aclrtPhysicalMemProp,
        option: aclrtMemGranularityOptions,
        granularity: *mut usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemGetAllocationGranularity
                .as_ref()
                .expect("Expected function, got error."))(prop, option, granularity)
        }
    }
    /// The physical memory that is mapped at an address.
    pub unsafe fn aclrtMemRetainAllocationHandle(
        &self,
        virPtr: *mut ::core::ffi::c_void,
        handle: *mut aclrtDrvMemHandle,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemRetainAllocationHandle
                .as_ref()
                .expect("Expected function, got error."))(virPtr, handle)
        }
    }
    pub unsafe fn aclrtMemExportToShareableHandle(
        &self,
        handle: aclrtDrvMemHandle,
        handleType: aclrtMemHandleType,
        flags: u64,
        shareableHandle: *mut u64,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemExportToShareableHandle
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(handle, handleType, flags, shareableHandle)
        }
    }
    pub unsafe fn aclrtMemImportFromShareableHandle(
        &self,
        shareableHandle: u64,
        deviceId: i32,
        handle: *mut aclrtDrvMemHandle,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemImportFromShareableHandle
                .as_ref()
                .expect(
                    "Expected function, got error.",
                ))(shareableHandle, deviceId, handle)
        }
    }
    pub unsafe fn aclrtMemSetPidToShareableHandle(
        &self,
        shareableHandle: u64,
        pid: *mut i32,
        pidNum: usize,
    ) -> aclError {
        unsafe {
            (self
                .aclrtMemSetPidToShareableHandle
                .as_ref()
                .expect("Expected function, got error."))(shareableHandle, pid, pidNum)
        }
    }
}
