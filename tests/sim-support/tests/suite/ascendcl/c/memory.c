/* Memory and copies in one process. */
#include "check.h"

int main(void)
{
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    size_t free_before, total, free_now, size;
    OK(aclrtGetMemInfo(1, &free_before, &total));

    char *small, *large, *exact, *base;
    OK(aclrtMalloc((void **)&small, 100, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMalloc((void **)&large, 2 << 20, ACL_MEM_MALLOC_HUGE_FIRST));
    OK(aclrtMallocAlign32((void **)&exact, 2 << 20, ACL_MEM_MALLOC_HUGE_ONLY));
    SAME(0, (uintptr_t)large % (2 << 20));
    OK(aclrtGetMemInfo(1, &free_now, &total));
    /* One page of 4 KiB, two of 2 MiB because of 32 bytes of padding, and one. */
    SAME((4 << 10) + (6 << 20), free_before - free_now);
    aclrtPtrAttributes attributes;
    OK(aclrtPointerGetAttributes(large + 77, &attributes));
    SAME(1, attributes.location.type);
    SAME(2 << 20, attributes.pageSize);
    OK(aclrtMemGetAddressRange(large + 77, (void **)&base, &size));
    TRUE(base == large);
    int on_the_stack;
    SAME(107000, aclrtPointerGetAttributes(&on_the_stack, &attributes));
    SAME(107000, aclrtFree(large + 32));
    SAME(100000, aclrtFree(NULL));

    char bytes[100], back[100];
    for (int index = 0; index < 100; index++) {
        bytes[index] = (char)index;
    }
    OK(aclrtMemcpy(small, 100, bytes, 100, ACL_MEMCPY_HOST_TO_DEVICE));
    OK(aclrtMemcpy(large, 100, small, 100, ACL_MEMCPY_DEVICE_TO_DEVICE));
    OK(aclrtMemcpy(back, 100, large, 100, ACL_MEMCPY_DEVICE_TO_HOST));
    OK(memcmp(bytes, back, 100));
    SAME(107000, aclrtMemcpy(small, 99, bytes, 100, ACL_MEMCPY_HOST_TO_DEVICE));
    OK(aclrtMemset(small, 100, 0x55, 50));
    OK(aclrtMemcpy(back, 100, small, 100, ACL_MEMCPY_DEVICE_TO_HOST));
    SAME(0x55, back[49]);
    SAME(50, back[50]);

    /* A stream reads pinned memory when it reaches the copy, other host memory at submission. */
    aclrtStream stream;
    OK(aclrtCreateStream(&stream));
    char *pinned;
    OK(aclrtMallocHost((void **)&pinned, 100));
    uint64_t *gate;
    OK(aclrtMalloc((void **)&gate, 8, ACL_MEM_MALLOC_NORMAL_ONLY));
    OK(aclrtMemset(gate, 8, 0, 8));
    OK(aclrtValueWait(gate, 1, 1, stream));
    memset(pinned, 1, 100);
    memset(bytes, 1, 100);
    OK(aclrtMemcpyAsync(small, 100, pinned, 50, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    OK(aclrtMemcpyAsync(small + 50, 50, bytes, 50, ACL_MEMCPY_HOST_TO_DEVICE, stream));
    SAME(107000, aclrtMemcpyAsync(small, 100, pinned, 50, ACL_MEMCPY_DEVICE_TO_DEVICE, stream));
    memset(pinned, 2, 100);
    memset(bytes, 2, 100);
    aclrtStream other;
    OK(aclrtCreateStream(&other));
    OK(aclrtValueWrite(gate, 1, 0, other));
    OK(aclrtSynchronizeStream(stream));
    OK(aclrtMemcpyAsync(pinned, 100, small, 100, ACL_MEMCPY_DEVICE_TO_HOST, stream));
    OK(aclrtSynchronizeStream(stream));
    SAME(2, pinned[49]);
    SAME(1, pinned[50]);

    static char registered[4096] __attribute__((aligned(4096)));
    void *device;
    SAME(507911, aclrtHostGetDevicePointer(registered, &device, 0));
    OK(aclrtHostRegisterV2(registered, sizeof registered, 2));
    SAME(507910, aclrtHostRegisterV2(registered, sizeof registered, 2));
    OK(aclrtHostGetDevicePointer(registered, &device, 0));
    OK(aclrtHostUnregister(registered));

    OK(aclrtFreeHost(pinned));
    OK(aclrtFree(gate));
    OK(aclrtFree(small));
    OK(aclrtFree(large));
    OK(aclrtFree(exact));
    OK(aclrtGetMemInfo(1, &free_now, &total));
    SAME(free_before, free_now);
    OK(aclrtDestroyStream(stream));
    OK(aclrtDestroyStream(other));
    OK(aclrtResetDevice(0));
    OK(aclFinalize());
    puts("ok");
    return 0;
}
