/* Physical memory between two processes, with and without a list of processes. */
#include "check.h"

static size_t granularity(aclrtPhysicalMemProp *properties, uint32_t device)
{
    size_t size;
    memset(properties, 0, sizeof *properties);
    properties->memAttr = 4;
    properties->location.type = 1;
    properties->location.id = device;
    OK(aclrtMemGetAllocationGranularity(properties, 0, &size));
    return size;
}

static char *map(aclrtDrvMemHandle handle, size_t size)
{
    char *memory;
    OK(aclrtReserveMemAddress((void **)&memory, size, 0, NULL, 0));
    SAME(107000, aclrtMapMem(memory, size / 2, 0, handle, 0));
    OK(aclrtMapMem(memory, size, 0, handle, 0));
    return memory;
}

static void unmap(char *memory)
{
    SAME(107000, aclrtReleaseMemAddress(memory));
    OK(aclrtUnmapMem(memory));
    OK(aclrtReleaseMemAddress(memory));
}

static int importer(const char *option)
{
    int across = strcmp(option, "across") == 0;
    struct peer exporter = parent();
    OK(aclInit(NULL));
    OK(aclrtSetDevice(across));
    int32_t pid;
    OK(aclrtDeviceGetBareTgid(&pid));
    say(exporter, &pid, sizeof pid);
    uint64_t shareable;
    size_t size;
    hear(exporter, &shareable, sizeof shareable);
    hear(exporter, &size, sizeof size);
    aclrtDrvMemHandle handle;
    OK(aclrtMemImportFromShareableHandle(shareable, across, &handle));
    char *memory, *local, text[8];
    if (across) {
        OK(aclrtReserveMemAddress((void **)&memory, size, 0, NULL, 0));
        SAME(507899, aclrtMapMem(memory, size, 0, handle, 0));
        OK(aclrtReleaseMemAddress(memory));
        OK(aclrtDeviceEnablePeerAccess(0, 0));
        OK(aclrtSetDevice(0));
        OK(aclrtDeviceEnablePeerAccess(1, 0));
        OK(aclrtSetDevice(1));
    }
    memory = map(handle, size);
    aclrtMemAccessDesc access;
    memset(&access, 0, sizeof access);
    access.flags = 3;
    access.location.type = 1;
    access.location.id = (uint32_t)across;
    OK(aclrtMemSetAccess(memory, size, &access, 1));
    turn(exporter);
    /* The exporter has released everything; the memory still exists. */
    await_turn(exporter);
    aclrtStream stream;
    OK(aclrtCreateStream(&stream));
    OK(aclrtMalloc((void **)&local, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMemcpyAsync(local, 8, memory, 8, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtMemcpy(text, 8, local, 8, ACL_MEMCPY_DEVICE_TO_HOST));
    OK(memcmp(text, "physical", 8));
    /* Access is read-write, and no further device can access imported memory. */
    access.flags = 1;
    SAME(207000, aclrtMemSetAccess(memory, size, &access, 1));
    access.flags = 3;
    access.location.id = (uint32_t)!across;
    SAME(507899, aclrtMemSetAccess(memory, size, &access, 1));
    /* A handle is imported once per device of a process. */
    aclrtDrvMemHandle second;
    SAME(507899, aclrtMemImportFromShareableHandle(shareable, across, &second));
    unmap(memory);
    OK(aclrtFreePhysical(handle));
    SAME(507899, aclrtMemImportFromShareableHandle(shareable, across, &handle));
    OK(aclFinalize());
    return 0;
}

static void exporter(char **arguments, const char *option, uint64_t flags)
{
    struct peer peer = start_peer(arguments, "importer", option);
    int32_t pid;
    hear(peer, &pid, sizeof pid);
    aclrtPhysicalMemProp properties;
    size_t size = granularity(&properties, 0);
    aclrtDrvMemHandle handle, own;
    SAME(107000, aclrtMallocPhysical(&handle, size + 1, &properties, 0));
    OK(aclrtMallocPhysical(&handle, size, &properties, 0));
    char *memory = map(handle, size);
    OK(aclrtMemcpy(memory, size, "physical", 8, ACL_MEMCPY_HOST_TO_DEVICE));
    uint64_t shareable, again;
    OK(aclrtMemExportToShareableHandle(handle, 0, flags, &shareable));
    SAME(507899, aclrtMemExportToShareableHandle(handle, 0, flags, &again));
    SAME(507899, aclrtMemImportFromShareableHandle(shareable, 0, &own));
    SAME(flags == 0 ? 0 : 207006, aclrtMemSetPidToShareableHandle(shareable, &pid, 1));
    /* Mapped memory has no key. */
    char key[65];
    SAME(507899, aclrtIpcMemGetExportKey(memory, size, key, 65, 1));
    say(peer, &shareable, sizeof shareable);
    say(peer, &size, sizeof size);
    await_turn(peer);
    unmap(memory);
    OK(aclrtFreePhysical(handle));
    turn(peer);
    end_peer(peer);
}

int main(int count, char **arguments)
{
    if (count == 3) {
        return importer(arguments[2]);
    }
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    exporter(arguments, "home", 0);
    exporter(arguments, "home", 1);
    exporter(arguments, "across", 1);
    OK(aclFinalize());
    puts("ok");
    return 0;
}
