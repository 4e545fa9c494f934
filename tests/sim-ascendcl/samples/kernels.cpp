// The kernels of the vendor's samples, as functions of the host that the simulator runs on a stream. The launchers synchronise
// the stream, as those that the vendor's compiler makes of a kernel with printf do (hicann/runtime, `AdumpPrintWorkSpace`).

#include <cstdint>
#include <cstdio>

#include "acl/acl.h"
#include "kernel_func/kernel_ops.h"

extern "C" {
struct DeviceIpcSimMemory;
typedef int (*DeviceIpcSimKernel)(struct DeviceIpcSimMemory *memory, void *argument);
aclError deviceIpcSimKernel(aclrtStream stream, DeviceIpcSimKernel kernel, void *argument);
int deviceIpcSimLoad(struct DeviceIpcSimMemory *memory, uint64_t address, uint64_t len, uint64_t *value);
int deviceIpcSimStore(struct DeviceIpcSimMemory *memory, uint64_t address, uint64_t len, uint64_t value);
}

namespace {
struct Word {
    int *at;
    int value;
};

int Write(DeviceIpcSimMemory *memory, void *argument)
{
    const Word *word = static_cast<const Word *>(argument);
    const int status = deviceIpcSimStore(memory, reinterpret_cast<uint64_t>(word->at), sizeof(int), word->value);
    if (status == 0) {
        std::printf("Source data: %d\n", word->value);
    }
    return status;
}

int Read(DeviceIpcSimMemory *memory, void *argument)
{
    const Word *word = static_cast<const Word *>(argument);
    uint64_t value = 0;
    const int status = deviceIpcSimLoad(memory, reinterpret_cast<uint64_t>(word->at), sizeof(int), &value);
    if (status == 0) {
        std::printf("Destination data: %d\n", static_cast<int>(value));
    }
    return status;
}

int Add(DeviceIpcSimMemory *memory, void *argument)
{
    const uint64_t at = reinterpret_cast<uint64_t>(argument);
    uint64_t value = 0;
    const int status = deviceIpcSimLoad(memory, at, sizeof(uint32_t), &value);
    return status != 0 ? status : deviceIpcSimStore(memory, at, sizeof(uint32_t), value + 1);
}

int Fail(DeviceIpcSimMemory *, void *) { return 1; }

void Launch(void *stream, DeviceIpcSimKernel kernel, Word word)
{
    aclError status = deviceIpcSimKernel(stream, kernel, &word);
    if (status == ACL_SUCCESS) {
        status = aclrtSynchronizeStream(stream);
    }
    if (status != ACL_SUCCESS) {
        std::printf("[ERROR]  a kernel failed with %d\n", status);
    }
    std::fflush(stdout);
}
} // namespace

void WriteDo(uint32_t, void *stream, int *at, int value) { Launch(stream, Write, Word{at, value}); }

void EasyOP(uint32_t, void *stream, uint32_t *at) { deviceIpcSimKernel(stream, Add, at); }

void ShortOP(uint32_t, void *stream, uint32_t *at) { deviceIpcSimKernel(stream, Add, at); }

void LongOP(uint32_t, void *stream, uint32_t *at) { deviceIpcSimKernel(stream, Add, at); }

void ErrorOP(uint32_t, void *stream) { deviceIpcSimKernel(stream, Fail, nullptr); }

void ReadDo(uint32_t, void *stream, int *at) { Launch(stream, Read, Word{at, 0}); }
