// What device-ipc calls of Ascend's ACL runtime, and nothing more: names, numbers and layouts in our own words.
//
// `cargo xtask bindgen` turns it into src/bindings.rs; `cargo xtask verify-abi` compares it with the vendor's own
// headers, of two CANN generations. A comment that begins with three strokes becomes documentation.

#ifndef DEVICE_IPC_ACL_H
#define DEVICE_IPC_ACL_H

#include <stddef.h>
#include <stdint.h>

// ---- Handles and statuses ----

/// What a call returns: `ACL_SUCCESS`, or a number that says what went wrong. Newer runtimes add numbers.
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
/// Takes back one `aclInit`, and tells how many are left.
aclError aclFinalizeReference(uint64_t *refCount);
/// The calling thread's latest error as text, or null.
const char *aclGetRecentErrMsg(void);
/// The version of an installed package by its name; `versionStr` has room for 128 bytes.
aclError aclsysGetVersionStr(char *pkgName, char *versionStr);
/// The version of the interface itself.
aclError aclrtGetVersion(int32_t *majorVersion, int32_t *minorVersion, int32_t *patchVersion);
/// The chip's name, or null.
const char *aclrtGetSocName(void);

// ---- Devices and contexts ----

typedef struct aclrtUuid {
    char bytes[16];
} aclrtUuid;

/// Which property `aclrtGetDeviceInfo` tells.
typedef enum aclrtDevAttr {
    ACL_DEV_ATTR_TOTAL_GLOBAL_MEM_SIZE = 301,
    ACL_DEV_ATTR_PHY_CHIP_ID = 402,
} aclrtDevAttr;

/// Which memory of a device, and in which pages.
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
/// Takes back one `aclrtSetDevice`; the last one frees what the process has on the device.
aclError aclrtResetDevice(int32_t deviceId);
/// Waits for all work on the current device.
aclError aclrtSynchronizeDevice(void);
aclError aclrtDeviceGetUuid(int32_t deviceId, aclrtUuid *uuid);
aclError aclrtGetDeviceInfo(uint32_t deviceId, aclrtDevAttr attr, int64_t *value);
/// Bytes on the current device.
aclError aclrtGetMemInfo(aclrtMemAttr attr, size_t *free, size_t *total);
/// The number by which the driver knows this process: what an exporter has to list.
aclError aclrtDeviceGetBareTgid(int32_t *pid);
/// From the number after ASCEND_RT_VISIBLE_DEVICES to the container's.
aclError aclrtGetLogicDevIdByUserDevId(const int32_t userDevid, int32_t *const logicDevId);
/// To the host's number.
aclError aclrtGetPhyDevIdByLogicDevId(const int32_t logicDevId, int32_t *const phyDevId);

aclError aclrtSetCurrentContext(aclrtContext context);
aclError aclrtGetCurrentContext(aclrtContext *context);

/// 1 where `deviceId` can reach the memory of `peerDeviceId`, else 0.
aclError aclrtDeviceCanAccessPeer(int32_t *canAccessPeer, int32_t deviceId, int32_t peerDeviceId);
/// Lets the current device reach the peer's memory, one way. `flags` is 0.
aclError aclrtDeviceEnablePeerAccess(int32_t peerDeviceId, uint32_t flags);
/// 1 where the access is in place, else 0.
aclError aclrtDevicePeerAccessStatus(int32_t deviceId, int32_t peerDeviceId, int32_t *status);

// ---- Memory ----

/// In which pages memory is to lie.
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
    /// The device's number, where `type` says that it is one.
    uint32_t id;
    aclrtMemLocationType type;
} aclrtMemLocation;

typedef struct aclrtPtrAttributes {
    aclrtMemLocation location;
    /// Bytes.
    uint32_t pageSize;
    uint32_t rsv[4];
} aclrtPtrAttributes;

/// How `aclrtHostRegister` registers.
typedef enum {
    ACL_HOST_REGISTER_MAPPED = 0,
    ACL_HOST_REGISTER_IOMEMORY = 4,
    ACL_HOST_REGISTER_READONLY = 8,
} aclrtHostRegisterType;

/// Adds nothing to `size`, where `aclrtMalloc` adds 32 bytes on some devices, and with them a huge page.
aclError aclrtMallocAlign32(void **devPtr, size_t size, aclrtMemMallocPolicy policy);
aclError aclrtFree(void *devPtr);
aclError aclrtMallocHost(void **hostPtr, size_t size);
aclError aclrtFreeHost(void *hostPtr);
aclError aclrtHostRegister(void *ptr, uint64_t size, aclrtHostRegisterType type, void **devPtr);
aclError aclrtHostUnregister(void *ptr);
/// Fails for memory that the runtime does not know.
aclError aclrtPointerGetAttributes(const void *ptr, aclrtPtrAttributes *attributes);
/// The allocation that an address lies in.
aclError aclrtMemGetAddressRange(void *ptr, void **pbase, size_t *psize);
aclError aclrtMemcpyAsync(void *dst, size_t destMax, const void *src, size_t count, aclrtMemcpyKind kind,
                          aclrtStream stream);
aclError aclrtMemsetAsync(void *devPtr, size_t maxCount, int32_t value, size_t count, aclrtStream stream);

// ---- Streams ----

/// The other way round than `aclrtEventRecordedStatus`.
typedef enum aclrtStreamStatus {
    ACL_STREAM_STATUS_COMPLETE = 0,
    ACL_STREAM_STATUS_NOT_READY = 1,
} aclrtStreamStatus;

typedef void (*aclrtHostFunc)(void *args);

/// For `aclrtValueWait`: until the word is at least the value.
static const uint32_t ACL_STREAM_WAIT_VALUE_GEQ = 0x0;

aclError aclrtCreateStream(aclrtStream *stream);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
/// `timeout` in milliseconds; -1 waits for ever.
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t timeout);
aclError aclrtStreamQuery(aclrtStream stream, aclrtStreamStatus *status);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
/// Writes a word of 64 bits when the stream gets there. `flag` is 0.
aclError aclrtValueWrite(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream);
/// Holds the stream until a word of 64 bits is to the value as `flag` says.
aclError aclrtValueWait(void *devAddr, uint64_t value, uint32_t flag, aclrtStream stream);
/// Runs a function of the host when the stream gets there; nobody has to subscribe.
aclError aclrtLaunchHostFunc(aclrtStream stream, aclrtHostFunc fn, void *args);

// ---- Events ----

static const uint32_t ACL_EVENT_SYNC = 0x1;
/// The event can be opened by other processes. Alone, with no other flag.
static const uint32_t ACL_EVENT_IPC = 0x40;

/// The other way round than `aclrtStreamStatus`.
typedef enum aclrtEventRecordedStatus {
    ACL_EVENT_RECORDED_STATUS_NOT_READY = 0,
    ACL_EVENT_RECORDED_STATUS_COMPLETE = 1,
} aclrtEventRecordedStatus;

#define ACL_IPC_EVENT_HANDLE_SIZE 64

/// Names an event for other processes. Passed by value.
typedef struct aclrtIpcEventHandle {
    char reserved[ACL_IPC_EVENT_HANDLE_SIZE];
} aclrtIpcEventHandle;

aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flag);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtQueryEventStatus(aclrtEvent event, aclrtEventRecordedStatus *status);
/// Writes fewer bytes than the handle has: it is to be all zeros before.
aclError aclrtIpcGetEventHandle(aclrtEvent event, aclrtIpcEventHandle *handle);
aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle handle, aclrtEvent *event);

// ---- Memory of other processes, by a key ----

static const uint64_t ACL_RT_IPC_MEM_EXPORT_FLAG_DEFAULT = 0x0;
/// Any process that has the key may import; there is no list.
static const uint64_t ACL_RT_IPC_MEM_EXPORT_FLAG_DISABLE_PID_VALIDATION = 0x1;
static const uint64_t ACL_RT_IPC_MEM_IMPORT_FLAG_DEFAULT = 0x0;
/// Enables access between the two devices, both ways.
static const uint64_t ACL_RT_IPC_MEM_IMPORT_FLAG_ENABLE_PEER_ACCESS = 0x1;

/// Writes a key with its final zero into `key`, which has room for 65 bytes (`len`).
aclError aclrtIpcMemGetExportKey(void *devPtr, size_t size, char *key, size_t len, uint64_t flags);
/// In an importer: unmaps. In the exporter: ends the export, under the importers' hands.
aclError aclrtIpcMemClose(const char *key);
aclError aclrtIpcMemImportByKey(void **devPtr, const char *key, uint64_t flags);
/// Adds to the list of processes that may import, at most 31 a call, by what `aclrtDeviceGetBareTgid` says there.
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
/// Any process that has the handle may import; there is no list.
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
/// `size` is the whole of the physical memory, `offset` and `flags` are 0.
aclError aclrtMapMem(void *virPtr, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags);
aclError aclrtUnmapMem(void *virPtr);
aclError aclrtMemSetAccess(void *virPtr, size_t size, aclrtMemAccessDesc *desc, size_t count);
aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *prop, aclrtMemGranularityOptions option,
                                          size_t *granularity);
/// The physical memory that is mapped at an address.
aclError aclrtMemRetainAllocationHandle(void *virPtr, aclrtDrvMemHandle *handle);
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, aclrtMemHandleType handleType, uint64_t flags,
                                         uint64_t *shareableHandle);
aclError aclrtMemImportFromShareableHandle(uint64_t shareableHandle, int32_t deviceId, aclrtDrvMemHandle *handle);
aclError aclrtMemSetPidToShareableHandle(uint64_t shareableHandle, int32_t *pid, size_t pidNum);

#endif
