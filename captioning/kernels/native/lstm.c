/* The LSTM cell, Eq. 1-3, from the three summands of its gates to h and c, and its gradient.

   The summands (N, 4H) come from the embedded word (rows `stride` numbers apart), h_{t-1} and the context; the gates are
   in the order i, f, o, g. Summands and h are float or bfloat16, c is float. */

#include "common.h"

typedef struct {
    const Pool *pool;
    const void *embedded, *hidden, *context; /* summands of the gates; backward: the gradient of h in `hidden` */
    const float *c;
    const float *c_new;
    const float *dc;
    float *activations; /* (N, 4H): sigmoid of i, f, o, tanh of g */
    void *out;          /* h; backward: the gradient of every summand */
    float *out_c;       /* c_t; backward: the gradient of c_{t-1} */
    long N, H, stride;
} Work;

static inline float sigmoid(float x) { return 0.5f + 0.5f * tanh_float(0.5f * x); }

#define KERNELS(TYPE, type)                                                                                           \
    static void forward_##type(void *data) {                                                                          \
        const Work *w = data;                                                                                         \
        const long H = w->H;                                                                                          \
        long begin, end;                                                                                              \
        share(w->pool, w->N, &begin, &end);                                                                           \
        for (long n = begin; n < end; n++) {                                                                          \
            const TYPE *restrict e = (const TYPE *)w->embedded + n * w->stride;                                       \
            const TYPE *restrict h = (const TYPE *)w->hidden + n * 4 * H;                                             \
            const TYPE *restrict z = (const TYPE *)w->context + n * 4 * H;                                            \
            float *restrict a = w->activations + n * 4 * H;                                                           \
            const float *restrict c = w->c + n * H;                                                                   \
            float *restrict c_new = w->out_c + n * H;                                                                 \
            TYPE *restrict out = (TYPE *)w->out + n * H;                                                              \
            for (long k = 0; k < 3 * H; k++)                                                                          \
                a[k] = sigmoid(load_##type(e[k]) + load_##type(h[k]) + load_##type(z[k]));                            \
            for (long k = 3 * H; k < 4 * H; k++)                                                                      \
                a[k] = tanh_float(load_##type(e[k]) + load_##type(h[k]) + load_##type(z[k]));                         \
            for (long k = 0; k < H; k++) {                                                                            \
                const float x = a[H + k] * c[k] + a[k] * a[3 * H + k];                                                \
                c_new[k] = x;                                                                                         \
                out[k] = store_##type(a[2 * H + k] * tanh_float(x));                                                  \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    static void backward_##type(void *data) {                                                                         \
        const Work *w = data;                                                                                         \
        const long H = w->H;                                                                                          \
        long begin, end;                                                                                              \
        share(w->pool, w->N, &begin, &end);                                                                           \
        for (long n = begin; n < end; n++) {                                                                          \
            const float *restrict i = w->activations + n * 4 * H, *restrict f = i + H, *restrict o = f + H,           \
                                  *restrict g = o + H;                                                                \
            const TYPE *restrict dh = (const TYPE *)w->hidden + n * H;                                                \
            TYPE *restrict d = (TYPE *)w->out + n * 4 * H;                                                            \
            for (long k = 0; k < H; k++) {                                                                            \
                const float t = tanh_float(w->c_new[n * H + k]);                                                      \
                const float for_h = load_##type(dh[k]);                                                               \
                const float for_c = w->dc[n * H + k] + for_h * o[k] * (1.0f - t * t);                                 \
                d[k] = store_##type(for_c * g[k] * i[k] * (1.0f - i[k]));                                             \
                d[H + k] = store_##type(for_c * w->c[n * H + k] * f[k] * (1.0f - f[k]));                              \
                d[2 * H + k] = store_##type(for_h * t * o[k] * (1.0f - o[k]));                                        \
                d[3 * H + k] = store_##type(for_c * i[k] * (1.0f - g[k] * g[k]));                                     \
                w->out_c[n * H + k] = for_c * f[k];                                                                   \
            }                                                                                                         \
        }                                                                                                             \
    }

KERNELS(float, float)
KERNELS(uint16_t, bfloat16)

void lstm_forward(const Pool *pool, int bfloat16, const void *embedded, const void *hidden, const void *context,
                  const float *c, float *activations, void *h, float *c_new, long N, long H, long stride) {
    Work w = {.pool = pool, .embedded = embedded, .hidden = hidden, .context = context, .c = c,
              .activations = activations, .out = h, .out_c = c_new, .N = N, .H = H, .stride = stride};
    run(pool, bfloat16 ? forward_bfloat16 : forward_float, &w);
}

void lstm_backward(const Pool *pool, int bfloat16, float *activations, const float *c, const float *c_new,
                   const void *dh, const float *dc, void *dgates, float *dc_before, long N, long H) {
    Work w = {.pool = pool, .activations = activations, .c = c, .c_new = c_new, .hidden = dh, .dc = dc, .out = dgates,
              .out_c = dc_before, .N = N, .H = H};
    run(pool, bfloat16 ? backward_bfloat16 : backward_float, &w);
}
