/*
 * Declarations of the library for the program in this directory. Names, types and numbers are those of CANN's acl_rt.h, so
 * that the program also builds with that header.
 */
#ifndef DEVICE_IPC_ACL_SIM_H
#define DEVICE_IPC_ACL_SIM_H

#include <stddef.h>
#include <stdint.h>

typedef int aclError;
typedef void *aclrtStream;

enum { ACL_MEMCPY_HOST_TO_HOST, ACL_MEMCPY_HOST_TO_DEVICE, ACL_MEMCPY_DEVICE_TO_HOST, ACL_MEMCPY_DEVICE_TO_DEVICE };
enum { ACL_MEM_MALLOC_HUGE_FIRST };

aclError aclInit(const char *config);
aclError aclFinalize(void);
const char *aclGetRecentErrMsg(void);
aclError aclrtSetDevice(int32_t device);
aclError aclrtDeviceGetBareTgid(int32_t *pid);

aclError aclrtMalloc(void **pointer, size_t size, int policy);
aclError aclrtFree(void *pointer);
aclError aclrtMemcpy(void *to, size_t room, const void *from, size_t count, int kind);
aclError aclrtMemcpyAsync(void *to, size_t room, const void *from, size_t count, int kind, aclrtStream stream);
aclError aclrtCreateStream(aclrtStream *stream);
aclError aclrtSynchronizeStream(aclrtStream stream);

aclError aclrtIpcMemGetExportKey(void *pointer, size_t size, char *key, size_t len, uint64_t flags);
aclError aclrtIpcMemSetImportPid(const char *key, int32_t *pids, size_t count);
aclError aclrtIpcMemImportByKey(void **pointer, const char *key, uint64_t flags);
aclError aclrtIpcMemClose(const char *key);

/* Extensions of the simulator. */
struct DeviceIpcSimMemory;
aclError deviceIpcSimKernel(aclrtStream stream, int (*kernel)(struct DeviceIpcSimMemory *, void *), void *argument);
int deviceIpcSimLoad(struct DeviceIpcSimMemory *memory, uint64_t address, uint64_t len, uint64_t *value);
int deviceIpcSimStore(struct DeviceIpcSimMemory *memory, uint64_t address, uint64_t len, uint64_t value);

#endif
