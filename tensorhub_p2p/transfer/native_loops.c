/* Loops of system calls and digests that run without the interpreter.
 *
 * Rule of this file. It knows no protocol, allocates nothing, keeps nothing and judges nothing: a loop goes on
 * while all goes well and returns how far it got. Its caller (native_loops.py) looks at what stopped it, and does
 * the same in Python where this library was not built.
 *
 * Theory. Read or received step by step, bytes are hashed while they are in the processor's cache. In Python each
 * step gives the GIL away and waits for it again, twice; here some megabytes cost that once, and a puller whose
 * other threads hold the GIL goes on reading. A step is below half of a common second-level cache, as the kernel's
 * side of a copy takes its part of it.
 *
 * The digest is xxh3's; its functions come as pointers from the module `xxhash`, which finds out at run time what
 * the processor has (AVX2, AVX512).
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

#define STEP ((size_t)128 << 10)
#define THE_END (-1)
#define VERSION 1 /* of the functions below, as native_loops.py calls them */

struct hasher {
    int (*update)(void *state, const void *data, size_t length);
    void *state;
    uint64_t nanoseconds; /* what updates took */
};

struct source {
    int64_t pid;
    struct iovec seal_here, seal_there; /* of equal length */
    const void *expected;               /* what the seal must be */
};

int loops_version(void)
{
    return VERSION;
}

static uint64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static void feed(struct hasher *hasher, const void *data, size_t length)
{
    uint64_t began = now();
    hasher->update(hasher->state, data, length);
    hasher->nanoseconds += now() - began;
}

/* Hash pieces of memory, one after the other. */
void hash_pieces(struct hasher *hasher, const struct iovec *pieces, size_t count)
{
    uint64_t began = now();
    for (size_t i = 0; i < count; i++)
        hasher->update(hasher->state, pieces[i].iov_base, pieces[i].iov_len);
    hasher->nanoseconds += now() - began;
}

/* Whether the source is still who it was and lets itself be read. A seal that was changed never comes back, so
 * one that is found after a read held during all of it. */
static int is_sealed(const struct source *source)
{
    ssize_t moved = process_vm_readv((pid_t)source->pid, &source->seal_here, 1, &source->seal_there, 1, 0);
    return moved == (ssize_t)source->seal_here.iov_len &&
           memcmp(source->seal_here.iov_base, source->expected, source->seal_here.iov_len) == 0;
}

/* Read and hash another process's memory; returns the bytes. Fewer than `length`: the next one can't be read; none:
 * or the seal is another one by now, and what was hashed is of no use. */
size_t read_process(struct hasher *hasher, const struct source *source, char *here, char *there, size_t length)
{
    size_t done = 0;
    while (done < length) {
        size_t step = length - done < STEP ? length - done : STEP;
        struct iovec local = {here + done, step}, remote = {there + done, step};
        ssize_t moved = process_vm_readv((pid_t)source->pid, &local, 1, &remote, 1, 0);
        if (moved <= 0)
            break;
        feed(hasher, here + done, (size_t)moved);
        done += (size_t)moved;
    }
    return is_sealed(source) ? done : 0;
}

/* Receive and hash; returns the bytes. Fewer than `length`: `why` is what ended it, an errno, THE_END, or 0 where
 * the kernel gave less than it was asked for and may have more, or where the deadline (of CLOCK_MONOTONIC, in
 * nanoseconds) came. */
size_t receive(struct hasher *hasher, int connection, char *here, size_t length, uint64_t deadline, int *why)
{
    size_t done = 0;
    *why = 0;
    while (done < length) {
        size_t step = length - done < STEP ? length - done : STEP;
        ssize_t got = recv(connection, here + done, step, MSG_WAITALL);
        if (got <= 0) {
            *why = got == 0 ? THE_END : errno == EINTR ? 0 : errno;
            break;
        }
        feed(hasher, here + done, (size_t)got);
        done += (size_t)got;
        if ((size_t)got < step || now() >= deadline)
            break;
    }
    return done;
}
