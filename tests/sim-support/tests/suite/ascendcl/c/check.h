/* Common code of both processes: checks that print their location, and the start of the second one. */
#ifndef DEVICE_IPC_CHECK_H
#define DEVICE_IPC_CHECK_H

#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "acl_sim.h"

extern char **environ;

static const char *whose = "first";

static void check_at(int line, const char *text, long expected, long got)
{
    if (expected == got) {
        return;
    }
    const char *message = aclGetRecentErrMsg();
    fprintf(stderr, "%s process, line %d: %s is %ld, not %ld (%s)\n", whose, line, text, got, expected,
            message ? message : "no message");
    exit(1);
}

#define SAME(expected, value) check_at(__LINE__, #value, (long)(expected), (long)(value))
#define OK(call) SAME(0, call)
#define TRUE(value) SAME(1, !!(value))

/* The descriptors of the pipes in the second process, above those of the first one and of the library. */
enum { IN = 100, OUT = 101 };

/* The second process, and the two pipes to it. */
struct peer {
    pid_t pid;
    int from, to;
};

/* Starts this program with a role as an additional argument. */
static inline struct peer start_peer(char **arguments, const char *role, const char *option)
{
    int down[2], up[2];
    OK(pipe(down));
    OK(pipe(up));
    posix_spawn_file_actions_t actions;
    OK(posix_spawn_file_actions_init(&actions));
    OK(posix_spawn_file_actions_adddup2(&actions, down[0], IN));
    OK(posix_spawn_file_actions_adddup2(&actions, up[1], OUT));
    OK(posix_spawn_file_actions_addclose(&actions, down[1]));
    OK(posix_spawn_file_actions_addclose(&actions, up[0]));
    char *words[] = {arguments[0], (char *)role, (char *)option, NULL};
    struct peer peer = {0, up[0], down[1]};
    OK(posix_spawn(&peer.pid, arguments[0], &actions, NULL, words, environ));
    OK(posix_spawn_file_actions_destroy(&actions));
    OK(close(down[0]));
    OK(close(up[1]));
    return peer;
}

static inline struct peer parent(void)
{
    whose = "second";
    struct peer peer = {0, IN, OUT};
    return peer;
}

static inline void say(struct peer peer, const void *bytes, size_t len)
{
    SAME(len, write(peer.to, bytes, len));
}

static inline void hear(struct peer peer, void *bytes, size_t len)
{
    size_t have = 0;
    while (have < len) {
        ssize_t got = read(peer.from, (char *)bytes + have, len - have);
        TRUE(got > 0);
        have += (size_t)got;
    }
}

static inline void turn(struct peer peer)
{
    char mark = '.';
    say(peer, &mark, 1);
}

static inline void await_turn(struct peer peer)
{
    char mark;
    hear(peer, &mark, 1);
}

static inline void end_peer(struct peer peer)
{
    int status;
    SAME(peer.pid, waitpid(peer.pid, &status, 0));
    TRUE(WIFEXITED(status));
    SAME(0, WEXITSTATUS(status));
    OK(close(peer.from));
    OK(close(peer.to));
}

#endif
