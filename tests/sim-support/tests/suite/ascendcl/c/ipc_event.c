/* Events between two processes, on one device and on two. */
#include "check.h"

static int waiter(const char *option)
{
    struct peer recorder = parent();
    OK(aclInit(NULL));
    OK(aclrtSetDevice(strcmp(option, "across") == 0));
    aclrtIpcEventHandle handle;
    char key[65];
    hear(recorder, &handle, sizeof handle);
    hear(recorder, key, sizeof key);
    aclrtEvent event;
    OK(aclrtIpcOpenEventHandle(handle, &event));
    void *word, *local;
    OK(aclrtIpcMemImportByKey(&word, key, 1));
    OK(aclrtMalloc(&local, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    int status;
    OK(aclrtQueryEventStatus(event, &status));
    SAME(0, status);
    aclrtStream stream;
    OK(aclrtCreateStream(&stream));
    OK(aclrtStreamWaitEvent(stream, event));
    OK(aclrtMemcpyAsync(local, 8, word, 8, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    SAME(507046, aclrtSynchronizeStreamWithTimeout(stream, 1));
    turn(recorder);
    OK(aclrtSynchronizeStream(stream));
    uint64_t value;
    OK(aclrtMemcpy(&value, 8, local, 8, ACL_MEMCPY_DEVICE_TO_HOST));
    SAME(7, value);
    /* Both processes record. */
    OK(aclrtRecordEvent(event, stream));
    turn(recorder);
    OK(aclrtSynchronizeEvent(event));
    OK(aclrtDestroyEvent(event));
    OK(aclrtIpcMemClose(key));
    await_turn(recorder);
    OK(aclFinalize());
    return 0;
}

static void recorder(char **arguments, const char *option)
{
    struct peer peer = start_peer(arguments, "waiter", option);
    aclrtEvent event, own;
    aclrtIpcEventHandle handle;
    memset(&handle, 0, sizeof handle);
    SAME(107000, aclrtCreateEventExWithFlag(&event, 0x41));
    OK(aclrtCreateEventExWithFlag(&event, 0x40));
    OK(aclrtIpcGetEventHandle(event, &handle));
    SAME(507899, aclrtIpcOpenEventHandle(handle, &own));
    uint64_t *gate, *word;
    OK(aclrtMalloc((void **)&gate, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMalloc((void **)&word, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMemset(gate, 8, 0, 8));
    char key[65];
    OK(aclrtIpcMemGetExportKey(word, 8, key, 65, 1));
    aclrtStream stream, opener;
    OK(aclrtCreateStream(&stream));
    OK(aclrtCreateStream(&opener));
    OK(aclrtValueWait(gate, 1, 1, stream));
    OK(aclrtValueWrite(word, 7, 0, stream));
    /* Submitted before the other process is notified, and complete much later. */
    OK(aclrtRecordEvent(event, stream));
    say(peer, &handle, sizeof handle);
    say(peer, key, sizeof key);
    await_turn(peer);
    OK(aclrtValueWrite(gate, 1, 0, opener));
    await_turn(peer);
    OK(aclrtStreamWaitEvent(stream, event));
    OK(aclrtSynchronizeStream(stream));
    turn(peer);
    end_peer(peer);
    OK(aclrtIpcMemClose(key));
    OK(aclrtDestroyEvent(event));
    OK(aclrtFree(gate));
    OK(aclrtFree(word));
}

int main(int count, char **arguments)
{
    if (count == 3) {
        return waiter(arguments[2]);
    }
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    recorder(arguments, "home");
    recorder(arguments, "across");
    OK(aclFinalize());
    puts("ok");
    return 0;
}
