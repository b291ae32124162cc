/* Cross entropy of logits (M, V) with label smoothing, and its gradient, each in one pass over a row.

   With e = smoothing: nll = log sum exp(x) - (1 - e) x_target - e mean(x). Logits are float or bfloat16, so is their
   gradient; everything else is float. */

#include "vector.h"
#include "vector_math.h"

typedef struct {
    const Pool *pool;
    const void *logits;
    const int64_t *targets;
    const float *smoothing;
    float *nll, *lse; /* (M,) */
    const float *gradient;
    void *out;
    long M, V;
} Work;

#define KERNELS(TYPE, type)                                                                                           \
    static void forward_##type(void *data) {                                                                          \
        const Work *w = data;                                                                                         \
        const long V = w->V;                                                                                          \
        long begin, end;                                                                                              \
        share(w->pool, w->M, &begin, &end);                                                                           \
        for (long m = begin; m < end; m++) {                                                                          \
            const TYPE *restrict x = (const TYPE *)w->logits + m * V;                                                 \
            const float largest = largest_##type(x, V), e = w->smoothing[0];                                          \
            float sum = 0, total = 0;                                                                                 \
            for (long i = 0; i < V; i++) {                                                                            \
                const float value = load_##type(x[i]);                                                                \
                total += exp_(value - largest);                                                                       \
                sum += value;                                                                                         \
            }                                                                                                         \
            w->lse[m] = largest + logf(total);                                                                        \
            const float evenly = e ? e * sum / V : 0; /* -inf logits make the sum infinite */                         \
            w->nll[m] = w->lse[m] - (1 - e) * load_##type(x[w->targets[m]]) - evenly;                                 \
        }                                                                                                             \
    }                                                                                                                 \
    static void backward_##type(void *data) {                                                                         \
        const Work *w = data;                                                                                         \
        const long V = w->V;                                                                                          \
        const float e = w->smoothing[0], even = e / V;                                                                \
        long begin, end;                                                                                              \
        share(w->pool, w->M, &begin, &end);                                                                           \
        for (long m = begin; m < end; m++) {                                                                          \
            const TYPE *restrict x = (const TYPE *)w->logits + m * V;                                                 \
            TYPE *restrict out = (TYPE *)w->out + m * V;                                                              \
            const float lse = w->lse[m], g = w->gradient[m];                                                          \
            for (long i = 0; i < V; i++) out[i] = store_##type(g * (exp_(load_##type(x[i]) - lse) - even));           \
            const long t = w->targets[m];                                                                             \
            out[t] = store_##type(g * (exp_(load_##type(x[t]) - lse) - even - (1 - e)));                              \
        }                                                                                                             \
    }

KERNELS(float, float)
KERNELS(uint16_t, bfloat16)

void cross_entropy_forward(const Pool *pool, int bfloat16, const void *logits, const int64_t *targets,
                           const float *smoothing, float *nll, float *lse, long M, long V) {
    Work w = {.pool = pool, .logits = logits, .targets = targets, .smoothing = smoothing, .nll = nll, .lse = lse,
              .M = M, .V = V};
    run(pool, bfloat16 ? forward_bfloat16 : forward_float, &w);
}

void cross_entropy_backward(const Pool *pool, int bfloat16, const void *logits, const int64_t *targets,
                            const float *smoothing, float *lse, const float *gradient, void *out, long M, long V) {
    Work w = {.pool = pool, .logits = logits, .targets = targets, .smoothing = smoothing, .lse = lse,
              .gradient = gradient, .out = out, .M = M, .V = V};
    run(pool, bfloat16 ? backward_bfloat16 : backward_float, &w);
}
