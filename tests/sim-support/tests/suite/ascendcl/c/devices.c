/* Devices, contexts, and peers in one process. */
#include "check.h"

int main(void)
{
    uint32_t count;
    int32_t device, can, status, major, minor, patch;
    int mode;
    char version[128];
    SAME(100001, aclrtSetDevice(0));
    OK(aclrtGetDeviceCount(&count));
    OK(aclInit(NULL));
    SAME(100002, aclInit(NULL));
    OK(aclrtGetDeviceCount(&count));
    SAME(2, count);
    OK(aclrtGetVersion(&major, &minor, &patch));
    SAME(1, major);
    OK(aclsysGetVersionStr("runtime", version));
    TRUE(strlen(version) > 0);
    OK(aclrtGetRunMode(&mode));
    SAME(1, mode);
    TRUE(strstr(aclrtGetSocName(), "Ascend") != NULL);

    SAME(107002, aclrtGetDevice(&device));
    TRUE(strstr(aclGetRecentErrMsg(), "aclrtSetDevice") != NULL);
    TRUE(aclGetRecentErrMsg() == NULL);
    SAME(107001, aclrtSetDevice(2));
    OK(aclrtSetDevice(1));
    OK(aclrtGetDevice(&device));
    SAME(1, device);
    OK(aclrtSetDevice(0));

    aclrtUuid first, second;
    OK(aclrtDeviceGetUuid(0, &first));
    OK(aclrtDeviceGetUuid(1, &second));
    TRUE(memcmp(&first, &second, sizeof first) != 0);
    int32_t physical;
    OK(aclrtGetPhyDevIdByLogicDevId(1, &physical));
    SAME(1, physical);

    aclrtContext before, context, current;
    OK(aclrtGetCurrentContext(&before));
    OK(aclrtCreateContext(&context, 1));
    OK(aclrtGetDevice(&device));
    SAME(1, device);
    OK(aclrtSetCurrentContext(before));
    OK(aclrtGetCurrentContext(&current));
    TRUE(current == before);
    OK(aclrtDestroyContext(context));

    SAME(100000, aclrtDeviceCanAccessPeer(&can, 0, 0));
    OK(aclrtDeviceCanAccessPeer(&can, 0, 1));
    SAME(1, can);
    SAME(200006, aclrtDeviceEnablePeerAccess(1, 1));
    SAME(100000, aclrtDeviceEnablePeerAccess(0, 0));
    void *here, *there;
    char text[8] = "";
    OK(aclrtMalloc(&here, 8, ACL_MEM_MALLOC_HUGE_FIRST_P2P));
    OK(aclrtMemcpy(here, 8, "peerless", 8, ACL_MEMCPY_HOST_TO_DEVICE));
    OK(aclrtSetDevice(1));
    OK(aclrtMalloc(&there, 8, ACL_MEM_MALLOC_HUGE_FIRST_P2P));
    SAME(507899, aclrtMemcpy(there, 8, here, 8, ACL_MEMCPY_DEVICE_TO_DEVICE));
    OK(aclrtDeviceEnablePeerAccess(0, 0));
    /* One direction has no effect without the other. */
    OK(aclrtDevicePeerAccessStatus(1, 0, &status));
    SAME(0, status);
    SAME(507899, aclrtMemcpy(there, 8, here, 8, ACL_MEMCPY_DEVICE_TO_DEVICE));
    OK(aclrtSetDevice(0));
    OK(aclrtDeviceEnablePeerAccess(1, 0));
    OK(aclrtSetDevice(1));
    OK(aclrtDevicePeerAccessStatus(1, 0, &status));
    SAME(1, status);
    OK(aclrtDevicePeerAccessStatus(0, 1, &status));
    SAME(1, status);
    OK(aclrtMemcpy(there, 8, here, 8, ACL_MEMCPY_DEVICE_TO_DEVICE));
    OK(aclrtMemcpy(text, 8, there, 8, ACL_MEMCPY_DEVICE_TO_HOST));
    OK(memcmp(text, "peerless", 8));
    OK(aclrtDeviceDisablePeerAccess(0));
    SAME(507899, aclrtMemcpy(there, 8, here, 8, ACL_MEMCPY_DEVICE_TO_DEVICE));
    OK(aclrtFree(there));
    OK(aclrtSetDevice(0));
    OK(aclrtFree(here));
    OK(aclFinalize());
    SAME(100037, aclFinalize());
    puts("ok");
    return 0;
}
