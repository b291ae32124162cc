/* Shared by the kernels: threads, number formats and a tanh that compilers can vectorise. */

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

/* Calls row(work, m) for m = 0 .. rows - 1, each thread with its range of rows. */
typedef struct {
    const Pool *pool;
    void (*row)(const void *, long);
    const void *work;
    long rows;
} Rows;

static inline void part_of_rows(void *data) {
    const Rows *r = data;
    long begin, end;
    share(r->pool, r->rows, &begin, &end);
    for (long m = begin; m < end; m++) r->row(r->work, m);
}

static inline void run_rows(const Pool *pool, long rows, void (*row)(const void *, long), const void *work) {
    Rows r = {pool, row, work, rows};
    run(pool, part_of_rows, &r);
}

static inline float load_float(float x) { return x; }
static inline float store_float(float x) { return x; }
static inline float load_bfloat16(uint16_t x) {
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint16_t store_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16); /* to nearest even */
}

/* Rational approximation of tanh, odd 13 over even 6, as in Eigen; within 4e-7 of tanh. */
static inline float tanh_float(float x) {
    const float limit = 7.90531110763549805f;
    x = x > limit ? limit : x;
    x = x < -limit ? -limit : x;
    const float s = x * x;
    float p = -2.76076847742355e-16f;
    p = p * s + 2.00018790482477e-13f;
    p = p * s - 8.60467152213735e-11f;
    p = p * s + 5.12229709037114e-08f;
    p = p * s + 1.48572235717979e-05f;
    p = p * s + 6.37261928875436e-04f;
    p = p * s + 4.89352455891786e-03f;
    float d = 1.19825839466702e-06f;
    d = d * s + 1.18534705686654e-04f;
    d = d * s + 2.26843463243900e-03f;
    d = d * s + 4.89352518554385e-03f;
    return x * p / d;
}
