// A hand-over of a state dict by hand: PyTorch's exchange functions of DLPack and the driver's IPC calls, and nothing else. No lease, no
// event, no check, no error that says why: what figures.py compares this library with.

#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct { int32_t type, id; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } Dtype;
typedef struct { void *data; Device device; int32_t ndim; Dtype dtype; int64_t *shape, *strides; uint64_t offset; } Tensor;
typedef struct Managed { uint32_t major, minor; void *context; void (*deleter)(struct Managed *); uint64_t flags; Tensor tensor; } Managed;
typedef struct {
    uint32_t major, minor;
    const void *previous, *allocate, *managed_from_object;
    int (*make)(Managed *, void **);
    int (*read)(void *, Tensor *);
} Api;

// Of the interpreter.
extern int PyDict_Next(void *dict, intptr_t *position, void **key, void **value);
extern int PyDict_SetItem(void *dict, void *key, void *value);
extern const char *PyUnicode_AsUTF8AndSize(void *text, intptr_t *bytes);
extern void *PyUnicode_FromStringAndSize(const char *text, intptr_t bytes);
extern void Py_IncRef(void *object);
extern void Py_DecRef(void *object);

// Of the driver.
typedef struct {
    int (*range)(uint64_t *base, uint64_t *bytes, uint64_t address);
    int (*handle)(char handle[64], uint64_t address);
} Driver;

enum { DIMENSIONS = 4, BLOCKS = 4096 };
typedef struct { uint64_t base, bytes; char handle[64]; } Block;
// In a message: a header, for each tensor a `Head`, its sizes and strides and its name, then the blocks.
typedef struct { uint32_t tensors, blocks; uint64_t blocks_at; } Header;
typedef struct { uint64_t offset; Dtype dtype; uint16_t block, name_bytes; int32_t ndim; } Head;

// Writes a message: handles of the blocks only if `driver` has the function. Returns the number of bytes, or 0. Objects in `kept` have one
// reference more.
int64_t describe(const Api *api, const Driver *driver, void *state, char *message, void **kept) {
    static Block blocks[BLOCKS];
    Header header = {0};
    uint32_t block = 0;
    char *next = message + sizeof header;
    void *key, *value;
    for (intptr_t position = 0; PyDict_Next(state, &position, &key, &value); header.tensors++) {
        Tensor found;
        if (api->read(value, &found) != 0 || found.ndim > DIMENSIONS) return 0;
        uint64_t address = (uint64_t)found.data + found.offset;
        if (header.blocks == 0 || address - blocks[block].base >= blocks[block].bytes)
            for (block = 0; block < header.blocks && address - blocks[block].base >= blocks[block].bytes;) block++;
        if (block == header.blocks) {
            if (block == BLOCKS || driver->range(&blocks[block].base, &blocks[block].bytes, address) != 0) return 0;
            if (driver->handle && driver->handle(blocks[block].handle, blocks[block].base) != 0) return 0;
            header.blocks++;
        }
        intptr_t bytes;
        const char *name = PyUnicode_AsUTF8AndSize(key, &bytes);
        Head head = {address - blocks[block].base, found.dtype, block, bytes, found.ndim};
        next = mempcpy(next, &head, sizeof head);
        next = mempcpy(next, found.shape, found.ndim * 8);
        next = mempcpy(next, found.strides, found.ndim * 8);
        next = mempcpy(next, name, bytes);
        Py_IncRef(value);
        kept[header.tensors] = value;
    }
    header.blocks_at = next - message;
    memcpy(message, &header, sizeof header);
    return (char *)mempcpy(next, blocks, header.blocks * sizeof *blocks) - message;
}

void release(void **kept, int64_t count) {
    for (int64_t i = 0; i < count; i++) Py_DecRef(kept[i]);
}

typedef struct { Managed managed; int64_t sizes[2 * DIMENSIONS]; } View;
typedef struct { uint32_t left; View views[]; } Views;

static void delete(Managed *managed) {
    Views *views = managed->context;
    if (--views->left == 0) free(views);
}

// Adds a tensor for each one of a message to a dictionary. `bases` has the addresses of the blocks here. Returns the number of tensors, or -1.
int64_t make(const Api *api, const char *message, const uint64_t *bases, int32_t device, void *state) {
    Header header;
    memcpy(&header, message, sizeof header);
    const char *next = message + sizeof header;
    Views *views = malloc(sizeof *views + header.tensors * sizeof *views->views);
    views->left = header.tensors;
    for (uint32_t i = 0; i < header.tensors; i++) {
        Head head;
        View *view = &views->views[i];
        memcpy(&head, next, sizeof head);
        memcpy(view->sizes, next += sizeof head, head.ndim * 16);
        void *data = (void *)(bases[head.block] + head.offset);
        Tensor tensor = {data, {2, device}, head.ndim, head.dtype, view->sizes, view->sizes + head.ndim, 0};
        view->managed = (Managed){1, 0, views, delete, 0, tensor};
        void *made, *name = PyUnicode_FromStringAndSize(next += head.ndim * 16, head.name_bytes);
        if (api->make(&view->managed, &made) != 0 || PyDict_SetItem(state, name, made) != 0) return -1;
        Py_DecRef(name);
        Py_DecRef(made);
        next += head.name_bytes;
    }
    return header.tensors;
}
