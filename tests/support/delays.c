// SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
//
// Preloaded (scripts/load_test.py --delays): a thread sleeps before one in 200 locks of a mutex and after as many
// unlocks, below 3 ms; before or after one in 4,000 below 200 ms. OPD_DELAYS: the seed.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

static __thread uint64_t state;
static uint64_t threads; // that have drawn so far: each has draws of its own, as by its address it would not

static uint64_t next(void) {
    if (state == 0) {
        const char* seed = getenv("OPD_DELAYS");
        const uint64_t before = __atomic_fetch_add(&threads, 1, __ATOMIC_RELAXED);
        state = ((seed ? strtoull(seed, NULL, 10) : 1) * 0x9e3779b97f4a7c15u ^ before * 0xbf58476d1ce4e5b9u) | 1;
    }
    state ^= state << 13, state ^= state >> 7, state ^= state << 17; // xorshift
    return state;
}
static void sometimes_sleep(void) {
    const uint64_t r = next();
    struct timespec t = {0, 0};
    if ((r >> 20) % 4000 == 0)
        t.tv_nsec = (long)((r >> 34) % 200000000);
    else if ((r >> 20) % 200 == 0)
        t.tv_nsec = (long)((r >> 34) % 3000000);
    else
        return;
    nanosleep(&t, NULL);
}

typedef int (*of_mutex)(pthread_mutex_t*);
int pthread_mutex_lock(pthread_mutex_t* m) {
    static of_mutex real;
    if (!real) real = (of_mutex)dlsym(RTLD_NEXT, "pthread_mutex_lock");
    sometimes_sleep();
    return real(m);
}
int pthread_mutex_unlock(pthread_mutex_t* m) {
    static of_mutex real;
    if (!real) real = (of_mutex)dlsym(RTLD_NEXT, "pthread_mutex_unlock");
    const int status = real(m);
    sometimes_sleep();
    return status;
}
