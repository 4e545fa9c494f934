// The part of the C library header that the headers of ACL require, from predefined macros of the compiler. These three
// headers make the bindings independent of the C library of the machine.

#ifndef DEVICE_IPC_STDDEF_H
#define DEVICE_IPC_STDDEF_H

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
#define NULL ((void *)0)

#endif
