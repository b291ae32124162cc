/* The additive score e = v . tanh(P + q), Eq. 4, and its gradients, without the (rows, L, A) hidden layer in memory.

   P (B, L, A) are the projected annotations, q (B, R, A) the projected queries of R rows per image, e and its gradient g
   (B, R, L). P is float or bfloat16, everything else float. */

#include "common.h"

typedef struct {
    const Pool *pool;
    const void *P;
    const float *const *q; /* T pointers; T = 1 but in the gradient of P */
    const float *const *g;
    const float *v;
    float *out;    /* e, or the gradient of q */
    void *dP;
    float *dv;     /* (threads, A) */
    long T, B, R, L, A;
} Work;

#define CHUNK 64

#define KERNELS(TYPE, type)                                                                                           \
    static void forward_##type(void *data) {                                                                          \
        const Work *w = data;                                                                                         \
        const long R = w->R, L = w->L, A = w->A;                                                                      \
        const float *restrict v = w->v;                                                                               \
        long begin, end;                                                                                              \
        share(w->pool, w->B, &begin, &end);                                                                           \
        for (long b = begin; b < end; b++)                                                                            \
            for (long l = 0; l < L; l++) {                                                                            \
                const TYPE *restrict p = (const TYPE *)w->P + (b * L + l) * A;                                        \
                for (long r = 0; r < R; r++) {                                                                        \
                    const float *restrict q = w->q[0] + (b * R + r) * A;                                              \
                    float sum = 0;                                                                                    \
                    for (long a = 0; a < A; a++) sum += v[a] * tanh_##type(load_##type(p[a]) + q[a]);                 \
                    w->out[(b * R + r) * L + l] = sum;                                                                \
                }                                                                                                     \
            }                                                                                                         \
    }                                                                                                                 \
    static void backward_##type(void *data) {                                                                         \
        const Work *w = data;                                                                                         \
        const long R = w->R, L = w->L, A = w->A;                                                                      \
        const float *restrict v = w->v;                                                                               \
        long begin, end;                                                                                              \
        const long thread = share(w->pool, w->B, &begin, &end);                                                       \
        float *restrict dv = w->dv + thread * A;                                                                      \
        memset(dv, 0, A * sizeof(float));                                                                             \
        memset(w->out + begin * R * A, 0, (end - begin) * R * A * sizeof(float));                                     \
        for (long b = begin; b < end; b++) {                                                                          \
            for (long l = 0; l < L; l++) {                                                                            \
                const TYPE *restrict p = (const TYPE *)w->P + (b * L + l) * A;                                        \
                for (long r = 0; r < R; r++) {                                                                        \
                    const float *restrict q = w->q[0] + (b * R + r) * A;                                              \
                    float *restrict dq = w->out + (b * R + r) * A;                                                    \
                    const float g = w->g[0][(b * R + r) * L + l];                                                     \
                    for (long a = 0; a < A; a++) {                                                                    \
                        const float t = tanh_##type(load_##type(p[a]) + q[a]);                                        \
                        dq[a] += g * (1.0f - t * t);                                                                  \
                        dv[a] += g * t;                                                                               \
                    }                                                                                                 \
                }                                                                                                     \
            }                                                                                                         \
            for (long r = 0; r < R; r++)                                                                              \
                for (long a = 0; a < A; a++) w->out[(b * R + r) * A + a] *= v[a];                                     \
        }                                                                                                             \
    }                                                                                                                 \
    static void projected_##type(void *data) {                                                                        \
        const Work *w = data;                                                                                         \
        const long R = w->R, L = w->L, A = w->A;                                                                      \
        long begin, end;                                                                                              \
        share(w->pool, w->B, &begin, &end);                                                                           \
        for (long b = begin; b < end; b++)                                                                            \
            for (long a0 = 0; a0 < A; a0 += CHUNK) {                                                                  \
                const long n = A - a0 < CHUNK ? A - a0 : CHUNK;                                                       \
                for (long l = 0; l < L; l++) {                                                                        \
                    const long place = (b * L + l) * A + a0;                                                          \
                    float x[CHUNK] = {0}, sum[CHUNK] = {0}, y[CHUNK] = {0};                                           \
                    for (long a = 0; a < n; a++) x[a] = load_##type(((const TYPE *)w->P)[place + a]);                 \
                    for (long t = 0; t < w->T; t++)                                                                   \
                        for (long r = 0; r < R; r++) {                                                                \
                            const float g = w->g[t][(b * R + r) * L + l];                                             \
                            const float *restrict q = w->q[t] + (b * R + r) * A + a0;                                 \
                            if (n < CHUNK) {                                                                          \
                                memcpy(y, q, n * sizeof(float));                                                      \
                                q = y;                                                                                \
                            }                                                                                         \
                            for (long a = 0; a < CHUNK; a++) {                                                        \
                                const float h = tanh_##type(x[a] + q[a]);                                             \
                                sum[a] += g * (1.0f - h * h);                                                         \
                            }                                                                                         \
                        }                                                                                             \
                    for (long a = 0; a < n; a++) ((TYPE *)w->dP)[place + a] = store_##type(sum[a] * w->v[a0 + a]);    \
                }                                                                                                     \
            }                                                                                                         \
    }

KERNELS(float, float)
KERNELS(uint16_t, bfloat16)

/* e (B, R, L) */
void additive_forward(const Pool *pool, int bfloat16, const void *P, const float *q, const float *v, float *e, long B,
                      long R, long L, long A) {
    Work w = {.pool = pool, .P = P, .q = &q, .v = v, .out = e, .T = 1, .B = B, .R = R, .L = L, .A = A};
    run(pool, bfloat16 ? forward_bfloat16 : forward_float, &w);
}

/* The gradients of one step: dq (B, R, A), dv (threads, A) to be summed by the caller. */
void additive_backward(const Pool *pool, int bfloat16, const void *P, const float *q, const float *v, const float *g,
                       float *dq, float *dv, long B, long R, long L, long A) {
    Work w = {.pool = pool, .P = P, .q = &q, .g = &g, .v = v, .out = dq, .dv = dv,
              .T = 1, .B = B, .R = R, .L = L, .A = A};
    run(pool, bfloat16 ? backward_bfloat16 : backward_float, &w);
}

/* The gradient of P (B, L, A) over T steps at once: tanh is computed again, so that no step keeps (L, A) values. */
void additive_backward_projected(const Pool *pool, int bfloat16, const void *P, const float *const *q, const float *v,
                                 const float *const *g, void *dP, long T, long B, long R, long L, long A) {
    Work w = {.pool = pool, .P = P, .q = q, .g = g, .v = v, .dP = dP, .T = T, .B = B, .R = R, .L = L, .A = A};
    run(pool, bfloat16 ? projected_bfloat16 : projected_float, &w);
}
