/* How the threads of a kernel share its work. */

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* GOMP_parallel, omp_get_thread_num and omp_get_num_threads of the OpenMP runtime that PyTorch has loaded. A
   second runtime would compete with it for the cores. NULL: one thread. */
typedef struct {
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    int (*thread)(void);
    int (*team)(void);
    long threads;
} Pool;

static inline void run(const Pool *pool, void (*body)(void *), void *work) {
    if (pool->threads > 1)
        pool->parallel(body, work, (unsigned)pool->threads, 0);
    else
        body(work);
}

/* Sets this thread's range of n items; returns the thread's number. The runtime may provide fewer threads. */
static inline long share(const Pool *pool, long n, long *begin, long *end) {
    const long thread = pool->threads > 1 ? pool->thread() : 0, threads = pool->threads > 1 ? pool->team() : 1;
    *begin = n * thread / threads;
    *end = n * (thread + 1) / threads;
    return thread;
}
