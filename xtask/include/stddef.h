// The part of the C library's header that ACL's headers need, by what the compiler says of itself. With these three
// the bindings come out the same on every machine, with or without the headers of a C library.

#ifndef DEVICE_IPC_STDDEF_H
#define DEVICE_IPC_STDDEF_H

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
#define NULL ((void *)0)

#endif
