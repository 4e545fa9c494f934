/* Notifies between two processes, with and without a list of processes. */
#include "check.h"

static int importer(void)
{
    struct peer creator = parent();
    OK(aclInit(NULL));
    OK(aclrtSetDevice(1));
    int32_t pid;
    OK(aclrtDeviceGetBareTgid(&pid));
    say(creator, &pid, sizeof pid);
    char key[65];
    hear(creator, key, sizeof key);
    aclrtNotify notify;
    SAME(107000, aclrtNotifyImportByKey(&notify, key, 4));
    OK(aclrtNotifyImportByKey(&notify, key, 2));
    aclrtStream stream;
    OK(aclrtCreateStream(&stream));
    SAME(107000, aclrtWaitAndResetNotify(notify, stream, 0));
    turn(creator);
    await_turn(creator);
    OK(aclrtRecordNotify(notify, stream));
    OK(aclrtSynchronizeStream(stream));
    turn(creator);
    OK(aclrtDestroyNotify(notify));
    OK(aclFinalize());
    return 0;
}

static void creator(char **arguments, uint64_t flags)
{
    struct peer peer = start_peer(arguments, "importer", "");
    int32_t pid;
    hear(peer, &pid, sizeof pid);
    aclrtNotify notify, own;
    char key[65];
    OK(aclrtCreateNotify(&notify, 0));
    SAME(107000, aclrtNotifyGetExportKey(notify, key, 65, 1));
    OK(aclrtNotifyGetExportKey(notify, key, 65, flags));
    SAME(flags == 0 ? 0 : 207006, aclrtNotifySetImportPid(notify, &pid, 1));
    SAME(507899, aclrtNotifyImportByKey(&own, key, 2));
    say(peer, key, sizeof key);
    await_turn(peer);
    aclrtStream stream;
    OK(aclrtCreateStream(&stream));
    OK(aclrtWaitAndResetNotify(notify, stream, 0));
    SAME(507046, aclrtSynchronizeStreamWithTimeout(stream, 1));
    turn(peer);
    await_turn(peer);
    OK(aclrtSynchronizeStream(stream));
    /* The wait has reset the notify: the next wait is for the next record, and times out. */
    OK(aclrtWaitAndResetNotify(notify, stream, 1));
    SAME(107020, aclrtSynchronizeStream(stream));
    end_peer(peer);
    OK(aclrtDestroyNotify(notify));
}

int main(int count, char **arguments)
{
    if (count == 3) {
        return importer();
    }
    OK(aclInit(NULL));
    OK(aclrtSetDevice(0));
    creator(arguments, 0);
    creator(arguments, 2);
    OK(aclFinalize());
    puts("ok");
    return 0;
}
