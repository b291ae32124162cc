/* y = x W^T + b for few rows x: W is read once, from front to back, for any number of rows. */

#include "vector.h"

enum {
    LANES = 16,
    PARTS = LANES / WIDTH, /* vectors: a processor splits longer ones than its own through memory */
    TILE = WIDTH == 16 ? 8 : WIDTH == 8 ? 6 : 3, /* rows of x whose sums stay in registers */
    BLOCK = 16,   /* rows of W that stay in the first-level cache for all tiles of x */
    AHEAD = 4096, /* distance of the prefetch in W: hardware prefetchers stop at a page */
};

typedef float part __attribute__((vector_size(4 * WIDTH), aligned(4)));

typedef struct {
    const Pool *pool;
    const float *x, *W, *b; /* (N, K), (M, K), (M,) or NULL */
    float *y;               /* (N, M) */
    long N, M, K;
} Work;

/* The sum of the lanes and of the products that fill no lanes. No function of any number of rows has a copy of its own,
   in which a compiler might add up in another order: a row's result does not depend on the rows beside it. */
static __attribute__((noinline)) float total(const part *sum, const float *restrict w, const float *restrict x,
                                             long rest) {
    float product = 0;
    for (int i = 0; i < LANES; i++) product += sum[i / WIDTH][i % WIDTH];
    for (long k = 0; k < rest; k++) product += w[k] * x[k];
    return product;
}

/* The products of rows begin .. end of W with ROWS rows of x, which begin at row n. There is a function for every number
   of rows, so that the sums stay in registers. */
#define PRODUCTS(ROWS)                                                                                                 \
    static void products_##ROWS(const Work *work, long n, long begin, long end) {                                      \
        const long M = work->M, K = work->K;                                                                           \
        const float *restrict x = work->x + n * K;                                                                     \
        float *restrict y = work->y + n * M;                                                                           \
        for (long m = begin; m < end; m++) {                                                                           \
            const float *restrict w = work->W + m * K;                                                                 \
            part sum[ROWS][PARTS] = {{{0}}};                                                                           \
            long k = 0;                                                                                                \
            for (; k + LANES <= K; k += LANES) {                                                                       \
                __builtin_prefetch(w + k + AHEAD);                                                                     \
                for (int p = 0; p < PARTS; p++) {                                                                      \
                    const part weights = *(const part *)(w + k + p * WIDTH);                                           \
                    for (int r = 0; r < ROWS; r++)                                                                     \
                        sum[r][p] += weights * *(const part *)(x + r * K + k + p * WIDTH);                             \
                }                                                                                                      \
            }                                                                                                          \
            for (int r = 0; r < ROWS; r++) {                                                                           \
                const float product = total(sum[r], w + k, x + r * K + k, K - k);                                      \
                y[r * M + m] = product + (work->b ? work->b[m] : 0.0f);                                                \
            }                                                                                                          \
        }                                                                                                              \
    }

PRODUCTS(1) PRODUCTS(2) PRODUCTS(3) PRODUCTS(4) PRODUCTS(5) PRODUCTS(6) PRODUCTS(7) PRODUCTS(8)

static void (*const products[])(const Work *, long, long, long) = {
    NULL, products_1, products_2, products_3, products_4, products_5, products_6, products_7, products_8,
};

static void forward(void *data) {
    const Work *work = data;
    long begin, end;
    share(work->pool, work->M, &begin, &end);
    for (long m = begin; m < end; m += BLOCK)
        for (long n = 0; n < work->N; n += TILE)
            products[work->N - n < TILE ? work->N - n : TILE](work, n, m, m + BLOCK < end ? m + BLOCK : end);
}

void linear_forward(const Pool *pool, int bfloat16, const float *x, const float *W, const float *b, float *y, long N,
                    long M, long K) {
    (void)bfloat16; /* only float */
    Work work = {.pool = pool, .x = x, .W = W, .b = b, .y = y, .N = N, .M = M, .K = K};
    run(pool, forward, &work);
}
