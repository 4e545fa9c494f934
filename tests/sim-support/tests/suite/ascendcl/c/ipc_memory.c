/* Memory shared by key between two processes: on one device or two, with and without a list of processes. */
#include "check.h"

enum { BYTES = 2 << 20 };

/* Adds 1 to the 64-bit word at an address. */
static int add_one(struct DeviceIpcSimMemory *memory, void *address)
{
    uint64_t word;
    return deviceIpcSimLoad(memory, (uint64_t)address, 8, &word) ||
           deviceIpcSimStore(memory, (uint64_t)address, 8, word + 1);
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
    char key[65];
    hear(exporter, key, sizeof key);
    void *shared;
    if (across) {
        /* Without peer access the import requires the flag. */
        SAME(507899, aclrtIpcMemImportByKey(&shared, key, 0));
    }
    OK(aclrtIpcMemImportByKey(&shared, key, across ? 1 : 0));
    aclrtStream stream;
    OK(aclrtCreateStream(&stream));
    void *local;
    uint64_t words[2] = {0, 0};
    OK(aclrtMalloc(&local, 16, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMemcpyAsync(local, 16, shared, 16, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtMemcpy(words, 16, local, 16, ACL_MEMCPY_DEVICE_TO_HOST));
    SAME(41, words[0]);
    /* The host accesses memory of another device only through memory of its device. */
    SAME(across ? 507899 : 0, aclrtMemcpy(words, 16, shared, 16, ACL_MEMCPY_DEVICE_TO_HOST));
    SAME(across ? 507899 : 0, aclrtMemcpy(local, 16, shared, 16, ACL_MEMCPY_DEVICE_TO_DEVICE));
    OK(deviceIpcSimKernel(stream, add_one, shared));
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtIpcMemClose(key));
    SAME(507899, aclrtIpcMemClose(key));
    turn(exporter);
    await_turn(exporter);
    SAME(507899, aclrtIpcMemImportByKey(&shared, key, 1));
    OK(aclFinalize());
    return 0;
}

static void exporter(char **arguments, const char *option, uint64_t flags)
{
    struct peer peer = start_peer(arguments, "importer", option);
    int32_t pid;
    hear(peer, &pid, sizeof pid);
    SAME(peer.pid, pid);
    char *memory, key[65] = "";
    OK(aclrtMalloc((void **)&memory, BYTES, ACL_MEM_MALLOC_HUGE_FIRST));
    uint64_t word = 41;
    OK(aclrtMemcpy(memory, BYTES, &word, 8, ACL_MEMCPY_HOST_TO_DEVICE));
    SAME(507899, aclrtIpcMemGetExportKey(memory + 4096, 8, key, 65, flags));
    SAME(107000, aclrtIpcMemGetExportKey(memory, BYTES, key, 64, flags));
    SAME(107000, aclrtIpcMemGetExportKey(memory, BYTES, key, 65, 2));
    OK(aclrtIpcMemGetExportKey(memory, BYTES, key, 65, flags));
    SAME(64, strlen(key));
    SAME(flags == 0 ? 0 : 207006, aclrtIpcMemSetImportPid(key, &pid, 1));
    say(peer, key, sizeof key);
    await_turn(peer);
    OK(aclrtMemcpy(&word, 8, memory, 8, ACL_MEMCPY_DEVICE_TO_HOST));
    SAME(42, word);
    OK(aclrtIpcMemClose(key));
    SAME(507899, aclrtIpcMemClose(key));
    turn(peer);
    end_peer(peer);
    OK(aclrtFree(memory));
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
    exporter(arguments, "across", 0);
    exporter(arguments, "across", 1);
    OK(aclFinalize());
    puts("ok");
    return 0;
}
