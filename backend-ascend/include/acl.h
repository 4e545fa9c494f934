// The functions of Ascend's ACL runtime that device-ipc calls: names, numbers and layouts, written for this project.
//
// `cargo xtask bindgen` turns it into src/bindings.rs; acl.py compares it with the vendor's own headers, of two CANN
// generations. A comment that begins with three slashes becomes documentation.

#ifndef DEVICE_IPC_ACL_H
#define DEVICE_IPC_ACL_H

#include <stddef.h>
#include <stdint.h>

// ---- Handles and statuses ----

/// The status of a call: `ACL_SUCCESS`, or an error. Newer runtimes add numbers.
typedef int aclError;

/// A queue of work on one device.
typedef void *aclrtStream;
/// A point in a stream's work.
typedef void *aclrtEvent;
/// The state of a device in this process; every thread has a current one.
typedef void *aclrtContext;
/// Physical memory without an address.
typedef void *aclrtDrvMemHandle;

// ---- Status numbers ----

static const aclError ACL_SUCCESS = 0;

static const aclError ACL_ERROR_INVALID_PARAM = 100000;
static const aclError ACL_ERROR_UNINITIALIZE = 100001;
static const aclError ACL_ERROR_REPEAT_INITIALIZE = 100002;
static const aclError ACL_ERROR_REPEAT_FINALIZE = 100037;
static const aclError ACL_ERROR_COMPILING_STUB_MODE = 100039;

static const aclError ACL_ERROR_RT_PARAM_INVALID = 107000;
static const aclError ACL_ERROR_RT_INVALID_DEVICEID = 107001;
static const aclError ACL_ERROR_RT_CONTEXT_NULL = 107002;
static const aclError ACL_ERROR_RT_STREAM_CONTEXT = 107003;
static const aclError ACL_ERROR_RT_ADDR_UNALIGNED = 107008;
static const aclError ACL_ERROR_RT_INVALID_HANDLE = 107017;
static const aclError ACL_ERROR_RT_WAIT_TIMEOUT = 107019;
static const aclError ACL_ERROR_RT_TASK_TIMEOUT = 107020;

static const aclError ACL_ERROR_BAD_ALLOC = 200000;
static const aclError ACL_ERROR_API_NOT_SUPPORT = 200001;
static const aclError ACL_ERROR_INVALID_DEVICE = 200002;
static const aclError ACL_ERROR_MEMORY_ADDRESS_UNALIGNED = 200003;
static const aclError ACL_ERROR_INVALID_RESOURCE_HANDLE = 200005;
static const aclError ACL_ERROR_FEATURE_UNSUPPORTED = 200006;

static const aclError ACL_ERROR_RT_FEATURE_NOT_SUPPORT = 207000;
static const aclError ACL_ERROR_RT_MEMORY_ALLOCATION = 207001;
static const aclError ACL_ERROR_RT_MEMORY_FREE = 207002;
static const aclError ACL_ERROR_RT_NO_DEVICE = 207004;
static const aclError ACL_ERROR_RT_RESOURCE_ALLOC_FAIL = 207005;
static const aclError ACL_ERROR_RT_NO_PERMISSION = 207006;
static const aclError ACL_ERROR_RT_NO_EVENT_RESOURCE = 207007;
static const aclError ACL_ERROR_RT_NO_STREAM_RESOURCE = 207008;
static const aclError ACL_ERROR_RT_NO_NOTIFY_RESOURCE = 207009;
static const aclError ACL_ERROR_RT_OVER_LIMIT = 207012;
static const aclError ACL_ERROR_RT_REPEATED_INIT = 207015;
static const aclError ACL_ERROR_RT_DEVICE_OOM = 207018;
static const aclError ACL_ERROR_RT_TIMEOUT = 207020;

static const aclError ACL_ERROR_INTERNAL_ERROR = 500000;
static const aclError ACL_ERROR_FAILURE = 500001;
static const aclError ACL_ERROR_RT_FAILURE = 500003;
static const aclError ACL_ERROR_DRV_FAILURE = 500004;
static const aclError ACL_ERROR_PROFILING_FAILURE = 500005;

static const aclError ACL_ERROR_RT_INTERNAL_ERROR = 507000;
static const aclError ACL_ERROR_RT_IPC_ERROR = 507022;
static const aclError ACL_ERROR_RT_DEV_SETUP_ERROR = 507033;
static const aclError ACL_ERROR_RT_VECTOR_CORE_EXCEPTION = 507035;
static const aclError ACL_ERROR_RT_STREAM_SYNC_TIMEOUT = 507046;
static const aclError ACL_ERROR_RT_EVENT_SYNC_TIMEOUT = 507047;
static const aclError ACL_ERROR_RT_DEVICE_MEM_ERROR = 507053;
static const aclError ACL_ERROR_RT_LINK_ERROR = 507056;
static const aclError ACL_ERROR_RT_SUSPECT_REMOTE_ERROR = 507057;
static const aclError ACL_ERROR_RT_DRV_INTERNAL_ERROR = 507899;
static const aclError ACL_ERROR_RT_SOCKET_CLOSE = 507901;

// ---- The process ----

/// `configPath` may be null. A second call in a process returns `ACL_ERROR_REPEAT_INITIALIZE`, and is counted.
aclError aclInit(const char *configPath);
/// Reverts one `aclInit`, and returns the remaining count.
aclError aclFinalizeReference(uint64_t *refCount);
/// Returns the calling thread's latest error as text, or null.
const char *aclGetRecentErrMsg(void);
/// Returns the version of an installed package by its name; `versionStr` has space for 128 bytes.
aclError aclsysGetVersionStr(char *pkgName, char *versionStr);
/// Returns the version of the interface.
aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion);
/// Returns the chip's name, or null.
const char *aclrtGetSocName(void);

// ---- Devices and contexts ----

typedef struct aclrtUuid {
    char bytes[16];
} aclrtUuid;

/// A property of `aclrtGetDeviceInfo`.
typedef enum aclrtDevAttr {
    ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE = 301,
    ACL_DEV_ATTR_PHY_CHIP_ID = 402,
} aclrtDevAttr;

/// A kind of device memory, with the size of its pages.
typedef enum aclrtMemAttr {
    ACL_DDR_MEM = 0,
    ACL_HBM_MEM = 1,
    ACL_DDR_MEM_HUGE = 2,
    ACL_DDR_MEM_NORMAL = 3,
    ACL_HBM_MEM_HUGE = 4,
    ACL_HBM_MEM_NORMAL = 5,
    ACL_DDR_MEM_P2P_HUGE = 6,
    ACL_DDR_MEM_P2P_NORMAL = 7,
    ACL_HBM_MEM_P2P_HUGE = 8,
    ACL_HBM_MEM_P2P_NORMAL = 9,
    ACL_HBM_MEM_HUGE1G = 10,
    ACL_HBM_MEM_P2P_HUGE1G = 11,
} aclrtMemAttr;

aclError aclrtGetDeviceCount(uint32_t *count);
/// Makes a device and its default context current for the calling thread. Counted.
aclError aclrtSetDevice(int32_t deviceId);
/// Reverts one `aclrtSetDevice`; the last one frees the process's resources on the device.
aclError aclrtResetDevice(int32_t deviceId);
/// Waits for all work on the current device.
aclError aclrtSynchronizeDevice(void);
aclError aclrtDeviceGetUuid(int32_t deviceId, aclrtUuid *uuid);
aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value);
/// Returns the free and total bytes of the current device.
aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total);
/// Returns the driver's id of this process, which an exporter lists.
aclError aclrtDeviceGetBareTgid(int32_t *pid);
/// Converts the number in ASCEND_RT_VISIBLE_DEVICES to the container's.
aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t *const logicDevId);
/// Converts a number to the host's.
aclError aclrtGetPhyDevIdByLogicDevId(const int32_t logicDevId, int32_t *const phyDevId);

aclError aclrtSetCurrentContext(aclrtContext context);
aclError aclrtGetCurrentContext(aclrtContext *context);

/// Returns 1 if `deviceId` can access the memory of `peerDeviceId`, else 0.
aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId);
/// Enables access of the current device to the peer's memory, in one direction. `flags` is 0.
aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags);
/// Returns 1 if the access is enabled, else 0.
aclError aclrtDevicePeerAccessStatus(int32_t deviceId, int32_t peerDeviceId, int32_t *status);

// ---- Memory ----

/// The policy for the pages of an allocation.
typedef enum aclrtMemMallocPolicy {
    ACL_MEM_MALLOC_HUGE_FIRST = 0,
    ACL_MEM_MALLOC_HUGE_ONLY = 1,
    ACL_MEM_MALLOC_NORMAL_ONLY = 2,
    ACL_MEM_MALLOC_HUGE_FIRST_P2P = 3,
    ACL_MEM_MALLOC_HUGE_ONLY_P2P = 4,
    ACL_MEM_MALLOC_NORMAL_ONLY_P2P = 5,
    ACL_MEM_MALLOC_HUGE1G_ONLY = 6,
    ACL_MEM_MALLOC_HUGE1G_ONLY_P2P = 7,
} aclrtMemMallocPolicy;

/// The direction of a copy.
typedef enum aclrtMemcpyKind {
    ACL_MEMCPY_HOST_TO_HOST = 0,
    ACL_MEMCPY_HOST_TO_DEVICE = 1,
    ACL_MEMCPY_DEVICE_TO_HOST = 2,
    ACL_MEMCPY_DEVICE_TO_DEVICE = 3,
    ACL_MEMCPY_DEFAULT = 4,
    ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE = 5,
    ACL_MEMCPY_INNER_DEVICE_TO_DEVICE = 6,
    ACL_MEMCPY_INTER_DEVICE_TO_DEVICE = 7,
} aclrtMemcpyKind;

typedef enum aclrtMemLocationType {
    ACL_MEM_LOCATION_TYPE_HOST = 0,
    ACL_MEM_LOCATION_TYPE_DEVICE = 1,
    ACL_MEM_LOCATION_TYPE_UNREGISTERED = 2,
    ACL_MEM_LOCATION_TYPE_HOST_NUMA = 4,
} aclrtMemLocationType;

typedef struct aclrtMemLocation {
    /// The device's number, if `type` is a device.
    uint32_t id;
    aclrtMemLocationType type;
} aclrtMemLocation;

typedef struct aclrtPtrAttributes {
    aclrtMemLocation location;
    /// Bytes.
    uint32_t pageSize;
    uint32_t rsv[4];
} aclrtPtrAttributes;

/// The mode of `aclrtHostRegister`.
typedef enum {
    ACL_HOST_REGISTER_MAPPED = 0,
    ACL_HOST_REGISTER_IOMEMORY = 4,
    ACL_HOST_REGISTER_READONLY = 8,
} aclrtHostRegisterType;

/// Adds nothing to `size`, while `aclrtMalloc` adds 32 bytes on some devices, and thus a huge page.
aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
aclError aclrtFree(void *devPtr);
aclError aclrtMallocHost(void **hostPtr, size_t size);
aclError aclrtFreeHost(void *hostPtr);
aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type, void **devPtr);
aclError aclrtHostUnregister(void *ptr);
/// Fails for memory unknown to the runtime.
aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes);
/// Returns the allocation that an address lies in.
aclError aclrtMemGetAddressRange(void *ptr, void **pbase, size_t *psize);
aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream);
aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream);

// ---- Streams ----

/// The values are the reverse of `aclrtEventRecordedStatus`.
typedef enum aclrtStreamStatus {
    ACL_STREAM_STATUS_COMPLETE = 0,
    ACL_STREAM_STATUS_NOT_READY = 1,
} aclrtStreamStatus;

typedef void (*aclrtHostFunc)(void *args);

/// For `aclrtValueWait`: waits until the word is at least the value.
static const uint32_t ACL_STREAM_WAIT_VALUE_GEQ = 0x0;

aclError aclrtCreateStream(aclrtStream *stream);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
/// `timeout` is in ms; -1 waits indefinitely.
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout);
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
/// Writes a 64-bit word when the stream reaches this point. `flag` is 0.
aclError aclrtValueWrite(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream);
/// Blocks the stream until a 64-bit word compares to the value as `flag` states.
aclError aclrtValueWait(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream);
/// Runs a host function when the stream reaches this point; needs no subscription.
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void *args);

// ---- Events ----

static const uint32_t ACL_EVENT_SYNC = 0x1;
/// The event can be opened by other processes. Excludes all other flags.
static const uint32_t ACL_EVENT_IPC = 0x40;

/// The values are the reverse of `aclrtStreamStatus`.
typedef enum aclrtEventRecordedStatus {
    ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
    ACL_EVENT_RECORDED_STATUS_COMPLETE = 1,
} aclrtEventRecordedStatus;

#define ACL_IPC_EVENT_HANDLE_SIZE 64

/// The handle of an event for other processes. Passed by value.
typedef struct aclrtIpcEventHandle {
    char reserved[ACL_IPC_EVENT_HANDLE_SIZE];
} aclrtIpcEventHandle;

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
/// Writes fewer bytes than the handle has; zero the handle before.
aclError aclrtIpcGetEventHandle(aclrtEvent event, aclrtIpcEventHandle *handle);
aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle handle, aclrtEvent *event);

// ---- Memory of other processes, by a key ----

static const uint64_t ACL_RT_IPC_MEM_EXPORT_FLAG_DEFAULT = 0x0;
/// Any process with the key may import; there is no list.
static const uint64_t ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION = 0x1;
static const uint64_t ACL_RT_IPC_MEM_IMPORT_FLAG_DEFAULT = 0x0;
/// Enables access between the two devices, in both directions.
static const uint64_t ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS = 0x1;

/// Writes a key with its final NUL into `key`, which has space for 65 bytes (`len`).
aclError aclrtIpcMemGetExportKey(void *devPtr, size_t size, char *key, size_t len, uint64_t flags);
/// In an importer: unmaps. In the exporter: ends the export, and revokes the importers' mappings.
aclError aclrtIpcMemClose(const char *key);
aclError aclrtIpcMemImportByKey(void **devPtr, const char *key, uint64_t flags);
/// Adds processes to the list of importers, at most 31 per call, by their `aclrtDeviceGetBareTgid`.
aclError aclrtIpcMemSetImportPid(const char *key, int32_t *pid, size_t num);

// ---- Virtual memory ----

typedef enum aclrtMemAllocationType {
    ACL_MEM_ALLOCATION_TYPE_PINNED = 0,
} aclrtMemAllocationType;

typedef enum aclrtMemHandleType {
    ACL_MEM_HANDLE_TYPE_NONE = 0,
} aclrtMemHandleType;

typedef struct aclrtPhysicalMemProp {
    aclrtMemHandleType handleType;
    aclrtMemAllocationType allocationType;
    aclrtMemAttr memAttr;
    aclrtMemLocation location;
    uint64_t reserve;
} aclrtPhysicalMemProp;

typedef enum aclrtMemGranularityOptions {
    ACL_RT_MEM_ALLOC_GRANULARITY_MINIMUM = 0,
    ACL_RT_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1,
} aclrtMemGranularityOptions;

static const uint64_t ACL_RT_VMM_EXPORT_FLAG_DEFAULT = 0x0;
/// Any process with the handle may import; there is no list.
static const uint64_t ACL_RT_VMM_EXPORT_FLAG_DISABLE_PID_VALIDATION = 0x1;

typedef enum {
    ACL_RT_MEM_ACCESS_FLAGS_NONE = 0,
    ACL_RT_MEM_ACCESS_FLAGS_READ = 1,
    ACL_RT_MEM_ACCESS_FLAGS_READWRITE = 3,
} aclrtMemAccessFlags;

typedef struct {
    aclrtMemAccessFlags flags;
    aclrtMemLocation location;
    uint8_t rsv[12];
} aclrtMemAccessDesc;

aclError aclrtReserveMemAddress(void **virPtr, size_t size, size_t alignment, void *expectPtr, uint64_t flags);
aclError aclrtReleaseMemAddress(void *virPtr);
aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *prop,
                             uint64_t flags);
aclError aclrtFreePhysical(aclrtDrvMemHandle handle);
/// `size` is the size of the whole physical memory, `offset` and `flags` are 0.
aclError aclrtMapMem(void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags);
aclError aclrtUnmapMem(void *virPtr);
aclError aclrtMemSetAccess(void *virPtr, size_t size, aclrtMemAccessDesc *desc, size_t count);
aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop, aclrtMemGranularityOptions option,
                                          size_t *granularity);
/// Returns the physical memory that is mapped at an address.
aclError aclrtMemRetainAllocationHandle(void *virPtr, aclrtDrvMemHandle *handle);
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType handleType, uint64_t flags,
                                         uint64_t *shareableHandle);
aclError aclrtMemImportFromShareableHandle(uint64_t shareableHandle, int32_t deviceId, aclrtDrvMemHandle *handle);
aclError aclrtMemSetPidToShareableHandle(uint64_t shareableHandle, int32_t *pid, size_t pidNum);

#endif
