// See stddef.h.

#ifndef DEVICE_IPC_STDBOOL_H
#define DEVICE_IPC_STDBOOL_H

#define bool _Bool
#define true 1
#define false 0

#endif
