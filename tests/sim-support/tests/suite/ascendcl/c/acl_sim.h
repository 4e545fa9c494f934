/*
 * Declarations of the library for the programs in this directory. Names, types and numbers are those of CANN's acl_rt.h, so
 * that the programs also build with that header.
 */
#ifndef DEVICE_IPC_ACL_SIM_H
#define DEVICE_IPC_ACL_SIM_H

#include <stddef.h>
#include <stdint.h>

typedef int aclError;
typedef void *aclrtStream, *aclrtEvent, *aclrtContext, *aclrtNotify, *aclrtDrvMemHandle;
typedef struct { char reserved[64]; } aclrtIpcEventHandle;
typedef struct { char bytes[16]; } aclrtUuid;
typedef struct { uint32_t id; int type; } aclrtMemLocation;
typedef struct { aclrtMemLocation location; uint32_t pageSize; uint32_t rsv[4]; } aclrtPtrAttributes;
typedef struct {
    int handleType, allocationType, memAttr;
    aclrtMemLocation location;
    uint64_t reserve;
} aclrtPhysicalMemProp;
typedef struct { int flags; aclrtMemLocation location; uint8_t rsv[12]; } aclrtMemAccessDesc;

enum { ACL_MEMCPY_HOST_TO_HOST, ACL_MEMCPY_HOST_TO_DEVICE, ACL_MEMCPY_DEVICE_TO_HOST, ACL_MEMCPY_DEVICE_TO_DEVICE };
enum { ACL_MEM_MALLOC_HUGE_FIRST, ACL_MEM_MALLOC_HUGE_ONLY, ACL_MEM_MALLOC_NORMAL_ONLY, ACL_MEM_MALLOC_HUGE_FIRST_P2P };

aclError aclInit(const char *config);
aclError aclFinalize(void);
const char *aclGetRecentErrMsg(void);
const char *aclrtGetSocName(void);
aclError aclrtGetVersion(int32_t *major, int32_t *minor, int32_t *patch);
aclError aclsysGetVersionStr(char *package, char *version);

aclError aclrtGetDeviceCount(uint32_t *count);
aclError aclrtSetDevice(int32_t device);
aclError aclrtResetDevice(int32_t device);
aclError aclrtGetDevice(int32_t *device);
aclError aclrtGetRunMode(int *mode);
aclError aclrtSynchronizeDevice(void);
aclError aclrtCreateContext(aclrtContext *context, int32_t device);
aclError aclrtDestroyContext(aclrtContext context);
aclError aclrtSetCurrentContext(aclrtContext context);
aclError aclrtGetCurrentContext(aclrtContext *context);
aclError aclrtDeviceCanAccessPeer(int32_t *can, int32_t device, int32_t peer);
aclError aclrtDeviceEnablePeerAccess(int32_t peer, uint32_t flags);
aclError aclrtDeviceDisablePeerAccess(int32_t peer);
aclError aclrtDevicePeerAccessStatus(int32_t device, int32_t peer, int32_t *status);
aclError aclrtDeviceGetBareTgid(int32_t *pid);
aclError aclrtDeviceGetUuid(int32_t device, aclrtUuid *uuid);
aclError aclrtGetPhyDevIdByLogicDevId(int32_t logic, int32_t *physical);

aclError aclrtMalloc(void **pointer, size_t size, int policy);
aclError aclrtMallocAlign32(void **pointer, size_t size, int policy);
aclError aclrtFree(void *pointer);
aclError aclrtMallocHost(void **pointer, size_t size);
aclError aclrtFreeHost(void *pointer);
aclError aclrtGetMemInfo(int kind, size_t *free, size_t *total);
aclError aclrtPointerGetAttributes(const void *pointer, aclrtPtrAttributes *attributes);
aclError aclrtMemGetAddressRange(void *pointer, void **base, size_t *size);
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t count, int kind);
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, int kind, aclrtStream stream);
aclError aclrtMemset(void *pointer, size_t room, int32_t value, size_t count);
aclError aclrtMemsetAsync(void *pointer, size_t room, int32_t value, size_t count, aclrtStream stream);
aclError aclrtHostRegisterV2(void *pointer, uint64_t size, uint32_t flags);
aclError aclrtHostGetDevicePointer(void *pointer, void **device, uint32_t flags);
aclError aclrtHostUnregister(void *pointer);

aclError aclrtCreateStream(aclrtStream *stream);
aclError aclrtDestroyStream(aclrtStream stream);
aclError aclrtSynchronizeStream(aclrtStream stream);
aclError aclrtSynchronizeStreamWithTimeout(aclrtStream stream, int32_t milliseconds);
aclError aclrtStreamQuery(aclrtStream stream, int *status);
aclError aclrtStreamWaitEvent(aclrtStream stream, aclrtEvent event);
aclError aclrtLaunchHostFunc(aclrtStream stream, void (*function)(void *), void *argument);
aclError aclrtCreateEvent(aclrtEvent *event);
aclError aclrtCreateEventExWithFlag(aclrtEvent *event, uint32_t flags);
aclError aclrtDestroyEvent(aclrtEvent event);
aclError aclrtRecordEvent(aclrtEvent event, aclrtStream stream);
aclError aclrtQueryEventStatus(aclrtEvent event, int *status);
aclError aclrtSynchronizeEvent(aclrtEvent event);
aclError aclrtEventElapsedTime(float *milliseconds, aclrtEvent start, aclrtEvent end);
aclError aclrtValueWrite(void *pointer, uint64_t value, uint32_t flag, aclrtStream stream);
aclError aclrtValueWait(void *pointer, uint64_t value, uint32_t flag, aclrtStream stream);

aclError aclrtIpcMemGetExportKey(void *pointer, size_t size, char *key, size_t len, uint64_t flags);
aclError aclrtIpcMemSetImportPid(const char *key, int32_t *pids, size_t count);
aclError aclrtIpcMemImportByKey(void **pointer, const char *key, uint64_t flags);
aclError aclrtIpcMemClose(const char *key);
aclError aclrtIpcGetEventHandle(aclrtEvent event, aclrtIpcEventHandle *handle);
aclError aclrtIpcOpenEventHandle(aclrtIpcEventHandle handle, aclrtEvent *event);

aclError aclrtCreateNotify(aclrtNotify *notify, uint64_t flags);
aclError aclrtDestroyNotify(aclrtNotify notify);
aclError aclrtRecordNotify(aclrtNotify notify, aclrtStream stream);
aclError aclrtWaitAndResetNotify(aclrtNotify notify, aclrtStream stream, uint32_t seconds);
aclError aclrtNotifyGetExportKey(aclrtNotify notify, char *key, size_t len, uint64_t flags);
aclError aclrtNotifySetImportPid(aclrtNotify notify, int32_t *pids, size_t count);
aclError aclrtNotifyImportByKey(aclrtNotify *notify, const char *key, uint64_t flags);

aclError aclrtMemGetAllocationGranularity(aclrtPhysicalMemProp *properties, int option, size_t *size);
aclError aclrtMallocPhysical(aclrtDrvMemHandle *handle, size_t size, const aclrtPhysicalMemProp *properties,
                             uint64_t flags);
aclError aclrtFreePhysical(aclrtDrvMemHandle handle);
aclError aclrtReserveMemAddress(void **pointer, size_t size, size_t alignment, void *expected, uint64_t flags);
aclError aclrtReleaseMemAddress(void *pointer);
aclError aclrtMapMem(void *pointer, size_t size, size_t offset, aclrtDrvMemHandle handle, uint64_t flags);
aclError aclrtUnmapMem(void *pointer);
aclError aclrtMemSetAccess(void *pointer, size_t size, aclrtMemAccessDesc *access, size_t count);
aclError aclrtMemExportToShareableHandle(aclrtDrvMemHandle handle, int kind, uint64_t flags, uint64_t *shareable);
aclError aclrtMemImportFromShareableHandle(uint64_t shareable, int32_t device, aclrtDrvMemHandle *handle);
aclError aclrtMemSetPidToShareableHandle(uint64_t shareable, int32_t *pids, size_t count);

/* Extensions of the simulator. */
struct DeviceIpcSimMemory;
aclError aclrtSetStreamFailureMode(aclrtStream stream, uint64_t mode);
aclError deviceIpcSimKernel(aclrtStream stream, int (*kernel)(struct DeviceIpcSimMemory *, void *), void *argument);
int deviceIpcSimLoad(struct DeviceIpcSimMemory *memory, uint64_t address, uint64_t len, uint64_t *value);
int deviceIpcSimStore(struct DeviceIpcSimMemory *memory, uint64_t address, uint64_t len, uint64_t value);

#endif
