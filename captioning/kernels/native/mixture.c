/* Element-wise operations of the mixture over locations, each in one pass over a row of V words.

   captioning/kernels/marginal.py has the formulas and the matrix products between the operations. Rows are float or bfloat16;
   sums, logarithms and log p are float. */

#include "vector.h"
#include "vector_math.h"

#define SMALLEST 1e-15f
#define BLOCK 256

typedef struct {
    const void *in, *mixed, *scale;
    const float *a0, *c0, *gradient;
    float *shift, *sum, *least, *log_p;
    void *out;
    long V;
} Work;

#define KERNELS(TYPE, type)                                                                                           \
    /* exp(x) divided by its largest value, the logarithm of that divisor, and the sum. May work in place. */         \
    static void exponentials_##type(const void *data, long m) {                                                       \
        const Work *w = data;                                                                                         \
        const long V = w->V;                                                                                          \
        const TYPE *x = (const TYPE *)w->in + m * V;                                                                  \
        TYPE *out = (TYPE *)w->out + m * V;                                                                           \
        const float largest = largest_##type(x, V);                                                                   \
        float sum = 0;                                                                                                \
        for (long a = 0; a < V; a += BLOCK) {                                                                         \
            const long n = V - a < BLOCK ? V - a : BLOCK;                                                             \
            float values[BLOCK]; /* in and out may alias */                                                           \
            for (long i = 0; i < n; i++) values[i] = exp_(load_##type(x[a + i]) - largest);                           \
            for (long i = 0; i < n; i++) sum += values[i];                                                            \
            for (long i = 0; i < n; i++) out[a + i] = store_##type(values[i]);                                        \
        }                                                                                                             \
        w->shift[m] = largest;                                                                                        \
        w->sum[m] = sum;                                                                                              \
    }                                                                                                                 \
    /* log p = s - shift + log(mixed + a_0), and the row's smallest mixed + a_0. */                                   \
    static void log_probs_##type(const void *data, long m) {                                                          \
        const Work *w = data;                                                                                         \
        const long V = w->V;                                                                                          \
        const TYPE *restrict s = (const TYPE *)w->in + m * V, *restrict mixed = (const TYPE *)w->mixed + m * V;       \
        float *restrict log_p = w->log_p + m * V;                                                                     \
        const float a0 = w->a0[m], shift = w->shift[m];                                                               \
        for (long i = 0; i < V; i++) {                                                                                \
            const float total = load_##type(mixed[i]) + a0;                                                           \
            log_p[i] = load_##type(s[i]) - shift + log_(total < SMALLEST ? SMALLEST : total);                         \
        }                                                                                                             \
        w->least[m] = smallest_##type(mixed, V) + a0;                                                                 \
    }                                                                                                                 \
    /* U = q / (mixed + a_0), and the sum of each row. */                                                             \
    static void ratios_##type(const void *data, long m) {                                                             \
        const Work *w = data;                                                                                         \
        const long V = w->V;                                                                                          \
        const TYPE *restrict mixed = (const TYPE *)w->mixed + m * V;                                                  \
        const float *restrict q = w->gradient + m * V;                                                                \
        TYPE *restrict out = (TYPE *)w->out + m * V;                                                                  \
        const float a0 = w->a0[m];                                                                                    \
        float sum = 0;                                                                                                \
        for (long i = 0; i < V; i++) {                                                                                \
            const float total = load_##type(mixed[i]) + a0;                                                           \
            const float ratio = q[i] / (total < SMALLEST ? SMALLEST : total);                                         \
            sum += ratio;                                                                                             \
            out[i] = store_##type(ratio);                                                                             \
        }                                                                                                             \
        w->sum[m] = sum;                                                                                              \
    }                                                                                                                 \
    /* The gradient of s: q + (mixed - c_0) scale, where mixed is -c exp(G). */                                       \
    static void gradient_##type(const void *data, long m) {                                                           \
        const Work *w = data;                                                                                         \
        const long V = w->V;                                                                                          \
        const TYPE *restrict mixed = (const TYPE *)w->mixed + m * V, *restrict e = (const TYPE *)w->scale + m * V;    \
        const float *restrict q = w->gradient + m * V;                                                                \
        TYPE *restrict out = (TYPE *)w->out + m * V;                                                                  \
        const float c0 = w->c0[m];                                                                                    \
        for (long i = 0; i < V; i++)                                                                                  \
            out[i] = store_##type(q[i] + (load_##type(mixed[i]) - c0) * load_##type(e[i]));                           \
    }

KERNELS(float, float)
KERNELS(uint16_t, bfloat16)

void mixture_exponentials(const Pool *pool, int bfloat16, const void *in, void *out, float *shift, float *sum, long M,
                          long V) {
    Work w = {.in = in, .out = out, .shift = shift, .sum = sum, .V = V};
    run_rows(pool, M, bfloat16 ? exponentials_bfloat16 : exponentials_float, &w);
}

void mixture_log_probs(const Pool *pool, int bfloat16, const void *s, const void *mixed, const float *a0, float *shift,
                       float *log_p, float *least, long M, long V) {
    Work w = {.in = s, .mixed = mixed, .a0 = a0, .shift = shift, .log_p = log_p, .least = least, .V = V};
    run_rows(pool, M, bfloat16 ? log_probs_bfloat16 : log_probs_float, &w);
}

void mixture_ratios(const Pool *pool, int bfloat16, const float *gradient, const void *mixed, const float *a0, void *out,
                    float *sum, long M, long V) {
    Work w = {.gradient = gradient, .mixed = mixed, .a0 = a0, .out = out, .sum = sum, .V = V};
    run_rows(pool, M, bfloat16 ? ratios_bfloat16 : ratios_float, &w);
}

void mixture_gradient(const Pool *pool, int bfloat16, const float *gradient, const void *mixed, const float *c0,
                      const void *scale, void *out, long M, long V) {
    Work w = {.gradient = gradient, .mixed = mixed, .c0 = c0, .scale = scale, .out = out, .V = V};
    run_rows(pool, M, bfloat16 ? gradient_bfloat16 : gradient_float, &w);
}
