/* Streams, events and host functions in one process. */
#include "check.h"

static void add_one(void *argument)
{
    *(int *)argument += 1;
}

static int traps(struct DeviceIpcSimMemory *memory, void *argument)
{
    (void)memory;
    (void)argument;
    return 1;
}

int main(void)
{
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    aclrtStream first, second;
    OK(aclrtCreateStream(&first));
    OK(aclrtCreateStream(&second));
    uint64_t *gate;
    OK(aclrtMalloc((void **)&gate, 8, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMemset(gate, 8, 0, 8));

    aclrtEvent old, recent, later;
    int status;
    OK(aclrtCreateEvent(&old));
    OK(aclrtCreateEventExWithFlag(&recent, 1));
    OK(aclrtQueryEventStatus(old, &status));
    SAME(0, status);
    OK(aclrtQueryEventStatus(recent, &status));
    SAME(1, status);

    int count = 0;
    OK(aclrtValueWait(gate, 5, 0, first));
    OK(aclrtLaunchHostFunc(first, add_one, &count));
    OK(aclrtRecordEvent(recent, first));
    OK(aclrtStreamWaitEvent(second, recent));
    OK(aclrtQueryEventStatus(recent, &status));
    SAME(0, status);
    OK(aclrtStreamQuery(second, &status));
    SAME(1, status);
    SAME(507046, aclrtSynchronizeStreamWithTimeout(second, 1));
    SAME(0, count);
    aclrtStream opener;
    OK(aclrtCreateStream(&opener));
    OK(aclrtValueWrite(gate, 6, 0, opener));
    OK(aclrtSynchronizeStream(second));
    OK(aclrtSynchronizeEvent(recent));
    SAME(1, count);
    OK(aclrtStreamQuery(second, &status));
    SAME(0, status);

    float milliseconds;
    OK(aclrtCreateEvent(&later));
    OK(aclrtRecordEvent(old, first));
    OK(aclrtRecordEvent(later, first));
    OK(aclrtSynchronizeEvent(later));
    OK(aclrtEventElapsedTime(&milliseconds, old, later));
    TRUE(milliseconds >= 0);
    SAME(107006, aclrtEventElapsedTime(&milliseconds, recent, later));

    /* A failure is returned once, by its stream. Later work runs, unless the failure mode stops the stream. */
    uint64_t word = 0;
    OK(deviceIpcSimKernel(first, traps, NULL));
    OK(aclrtValueWrite(gate, 9, 0, first));
    SAME(507035, aclrtSynchronizeStream(first));
    OK(aclrtSynchronizeStream(first));
    OK(aclrtMemcpy(&word, 8, gate, 8, ACL_MEMCPY_DEVICE_TO_HOST));
    SAME(9, word);
    OK(aclrtSetStreamFailureMode(first, 1));
    OK(deviceIpcSimKernel(first, traps, NULL));
    OK(aclrtValueWrite(gate, 10, 0, first));
    SAME(507035, aclrtSynchronizeStream(first));
    OK(aclrtMemcpy(&word, 8, gate, 8, ACL_MEMCPY_DEVICE_TO_HOST));
    SAME(9, word);

    /* A stream of another context rejects work. */
    aclrtContext context;
    OK(aclrtCreateContext(&context, 0));
    SAME(107003, aclrtRecordEvent(recent, first));
    OK(aclrtDestroyContext(context));
    SAME(107002, aclrtRecordEvent(recent, first));
    OK(aclrtSetDevice(0));

    OK(aclrtDestroyEvent(old));
    OK(aclrtDestroyEvent(recent));
    OK(aclrtDestroyEvent(later));
    OK(aclrtDestroyStream(first));
    OK(aclrtDestroyStream(second));
    OK(aclrtFree(gate));
    OK(aclFinalize());
    puts("ok");
    return 0;
}
