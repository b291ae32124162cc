/* The additive score e = v . tanh(P + q), Eq. 4, and its gradients. The (rows, L, A) hidden layer is not stored.

   P (B, L, A) are the projected annotations, q (B, R, A) the projected queries of R rows per image, e and its gradient g
   (B, R, L). P is float or bfloat16, everything else float.

   tanh(P + q) = 1 - 2 h with h = 1 / (1 + e^2P e^2q), and its derivative is 4 h (1 - h). e^2P is computed once for all
   rows of an image, and for all steps in the gradient of P; e^2q once for all locations. Each row and location then
   takes a product, a sum and a reciprocal. A float's range ends at e^87, where e^2P saturates. That is right while
   |q| <= 34, because tanh is then 1 or -1. An image with a larger q takes e^2(P + q) for each row and location. */

#include "vector.h"

typedef struct {
    const Pool *pool;
    const void *P;
    const float *const *q; /* T pointers; T = 1 except in the gradient of P */
    const float *const *g;
    const int64_t *images; /* (T): step t has the first images[t] images; NULL: all */
    const float *v;
    float *out;     /* e, or the gradient of q */
    void *dP;
    float *dv;      /* (threads, A) */
    float *scratch; /* (threads, size) */
    long size, T, B, R, L, A;
} Work;

#define TILE 4            /* locations at a time, which share the loads of a row */
#define LARGEST_QUERY 34  /* in size, for which e^2P e^2q is as exact as e^2(P + q) */
#define BLOCK (4 * WIDTH) /* units at a time in the gradient of P */
#define PADDED(A) ROUND_UP(A, 64)

/* A thread's part of the scratch: 1 + T R + TILE + 2 R rows of PADDED(A) numbers. */
typedef struct {
    float *v, *q;   /* v, padded with 0; e^2q (T, R) of an image, or 1 where it has a large q */
    float *tile;    /* e^2P of TILE locations, or e^2(P + q) of them and a row */
    float *s1, *s2; /* (R): sums over locations of g h and of g h^2 */
} Scratch;

static Scratch begin(const Work *w, long thread) {
    const long row = PADDED(w->A);
    float *start = w->scratch + thread * w->size;
    memset(start, 0, row * sizeof(float));
    memcpy(start, w->v, w->A * sizeof(float));
    float *tile = start + (1 + w->T * w->R) * row;
    return (Scratch){.v = start, .q = start + row, .tile = tile, .s1 = tile + TILE * row,
                     .s2 = tile + (TILE + w->R) * row};
}

static inline int has_step(const Work *w, long b, long t) { return !w->images || b < w->images[t]; }

/* Fills s->q for an image; returns whether it has a large q. */
static int exponentials_of_queries(const Work *w, long b, const Scratch *s) {
    const long A = w->A, row = PADDED(A);
    vec size = {0};
    for (long t = 0; t < w->T; t++)
        for (long r = 0; r < w->R && has_step(w, b, t); r++)
            for (long a = 0; a < row; a += WIDTH) {
                const vec q = part_float(w->q[t] + (b * w->R + r) * A, a, A);
                size = greatest(size, greatest(q, -q));
                store(s->q + (t * w->R + r) * row + a, exponential_float(q));
            }
    float largest = 0;
    for (int k = 0; k < WIDTH; k++) largest = size[k] > largest ? size[k] : largest;
    if (largest <= LARGEST_QUERY) return 0;
    for (long i = 0; i < w->T * w->R * row; i++) s->q[i] = 1;
    return 1;
}

#define KERNELS(TYPE, type)                                                                                           \
    /* Fills the tile with exponentials at n locations from l on: e^2P or, if the row q (A) is not NULL, e^2(P + q). */\
    static void exponentials_##type(const Work *w, long b, long l, long n, const float *q, float *tile) {             \
        const long A = w->A, row = PADDED(A);                                                                         \
        memset(tile + n * row, 0, (TILE - n) * row * sizeof(float));                                                  \
        for (long k = 0; k < n; k++)                                                                                  \
            for (long a = 0; a < A; a += WIDTH) {                                                                     \
                const vec p = part_##type((const TYPE *)w->P + (b * w->L + l + k) * A, a, A);                         \
                store(tile + k * row + a, q ? exponential_float(p + part_float(q, a, A)) : exponential_##type(p));    \
            }                                                                                                         \
    }                                                                                                                 \
    static void forward_##type(void *data) {                                                                          \
        const Work *w = data;                                                                                         \
        const long R = w->R, L = w->L, A = w->A, row = PADDED(A);                                                     \
        long first, end;                                                                                              \
        const Scratch s = begin(w, share(w->pool, w->B, &first, &end));                                               \
        float total = 0;                                                                                              \
        for (long a = 0; a < A; a++) total += s.v[a];                                                                 \
        for (long b = first; b < end; b++) {                                                                          \
            const int large = exponentials_of_queries(w, b, &s);                                                      \
            for (long l = 0; l < L; l += TILE) {                                                                      \
                const long n = L - l < TILE ? L - l : TILE;                                                           \
                if (!large) exponentials_##type(w, b, l, n, NULL, s.tile);                                            \
                for (long r = 0; r < R; r++) {                                                                        \
                    if (large) exponentials_##type(w, b, l, n, w->q[0] + (b * R + r) * A, s.tile);                    \
                    const float *q = s.q + r * row;                                                                   \
                    vec sum[TILE] = {{0}};                                                                            \
                    for (long a = 0; a < A; a += WIDTH) {                                                             \
                        const vec x = load(q + a), v = load(s.v + a);                                                 \
                        for (int k = 0; k < TILE; k++)                                                                \
                            sum[k] += v * reciprocal_##type(load(s.tile + k * row + a) * x);                          \
                    }                                                                                                 \
                    for (long k = 0; k < n; k++) w->out[(b * R + r) * L + l + k] = total - 2 * add_up(sum[k]);        \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    static void backward_##type(void *data) {                                                                         \
        const Work *w = data;                                                                                         \
        const long R = w->R, L = w->L, A = w->A, row = PADDED(A);                                                     \
        long first, end;                                                                                              \
        const long thread = share(w->pool, w->B, &first, &end);                                                       \
        const Scratch s = begin(w, thread);                                                                           \
        float *dv = w->dv + thread * A;                                                                               \
        memset(dv, 0, A * sizeof(float));                                                                             \
        for (long b = first; b < end; b++) {                                                                          \
            const int large = exponentials_of_queries(w, b, &s);                                                      \
            memset(s.s1, 0, 2 * R * row * sizeof(float));                                                             \
            for (long l = 0; l < L; l += TILE) {                                                                      \
                const long n = L - l < TILE ? L - l : TILE;                                                           \
                if (!large) exponentials_##type(w, b, l, n, NULL, s.tile);                                            \
                for (long r = 0; r < R; r++) {                                                                        \
                    if (large) exponentials_##type(w, b, l, n, w->q[0] + (b * R + r) * A, s.tile);                    \
                    const float *q = s.q + r * row;                                                                   \
                    float *s1 = s.s1 + r * row, *s2 = s.s2 + r * row;                                                 \
                    vec g[TILE];                                                                                      \
                    for (int k = 0; k < TILE; k++) g[k] = all(k < n ? w->g[0][(b * R + r) * L + l + k] : 0);          \
                    for (long a = 0; a < A; a += WIDTH) {                                                             \
                        const vec x = load(q + a);                                                                    \
                        vec sum = load(s1 + a), squares = load(s2 + a);                                               \
                        for (int k = 0; k < TILE; k++) {                                                              \
                            const vec h = reciprocal_##type(load(s.tile + k * row + a) * x), gh = g[k] * h;           \
                            sum += gh;                                                                                \
                            squares += gh * h;                                                                        \
                        }                                                                                             \
                        store(s1 + a, sum);                                                                           \
                        store(s2 + a, squares);                                                                       \
                    }                                                                                                 \
                }                                                                                                     \
            }                                                                                                         \
            for (long r = 0; r < R; r++) {                                                                            \
                const float *s1 = s.s1 + r * row, *s2 = s.s2 + r * row;                                               \
                float total = 0;                                                                                      \
                for (long l = 0; l < L; l++) total += w->g[0][(b * R + r) * L + l];                                   \
                for (long a = 0; a < A; a++) {                                                                        \
                    w->out[(b * R + r) * A + a] = 4 * s.v[a] * (s1[a] - s2[a]);                                       \
                    dv[a] += total - 2 * s1[a];                                                                       \
                }                                                                                                     \
            }                                                                                                         \
        }                                                                                                             \
    }                                                                                                                 \
    /* The gradient of P of an image with a large query. */                                                           \
    static void projected_large_##type(const Work *w, long b, const float *v) {                                       \
        const long R = w->R, L = w->L, A = w->A;                                                                      \
        for (long l = 0; l < L; l++)                                                                                  \
            for (long a = 0; a < A; a += WIDTH) {                                                                     \
                const vec P = part_##type((const TYPE *)w->P + (b * L + l) * A, a, A);                                \
                vec sum = {0};                                                                                        \
                for (long t = 0; t < w->T; t++)                                                                       \
                    for (long r = b * R; r < (b + 1) * R && has_step(w, b, t); r++) {                                 \
                        const vec h = reciprocal_float(exponential_float(P + part_float(w->q[t] + r * A, a, A)));     \
                        sum += w->g[t][r * L + l] * (h - h * h);                                                      \
                    }                                                                                                 \
                keep_##type((TYPE *)w->dP + (b * L + l) * A, a, A, 4.0f * sum * load(v + a));                         \
            }                                                                                                         \
    }                                                                                                                 \
    static void projected_##type(void *data) {                                                                        \
        const Work *w = data;                                                                                         \
        const long R = w->R, L = w->L, A = w->A, row = PADDED(A);                                                     \
        long first, end;                                                                                              \
        const Scratch s = begin(w, share(w->pool, w->B, &first, &end));                                               \
        for (long b = first; b < end; b++) {                                                                          \
            if (exponentials_of_queries(w, b, &s)) {                                                                  \
                projected_large_##type(w, b, s.v);                                                                    \
                continue;                                                                                             \
            }                                                                                                         \
            for (long a0 = 0; a0 < A; a0 += BLOCK)                                                                    \
                for (long l = 0; l < L; l++) {                                                                        \
                    const long position = (b * L + l) * A;                                                            \
                    vec E[4], sum[4] = {{0}};                                                                         \
                    for (int k = 0; k < 4; k++)                                                                       \
                        E[k] = exponential_##type(part_##type((const TYPE *)w->P + position, a0 + k * WIDTH, A));     \
                    for (long t = 0; t < w->T; t++)                                                                   \
                        for (long r = 0; r < R && has_step(w, b, t); r++) {                                           \
                            const vec g = all(w->g[t][(b * R + r) * L + l]);                                          \
                            const float *q = s.q + (t * R + r) * row + a0;                                            \
                            for (int k = 0; k < 4; k++) {                                                             \
                                const vec h = reciprocal_##type(E[k] * load(q + k * WIDTH));                          \
                                sum[k] += g * (h - h * h);                                                            \
                            }                                                                                         \
                        }                                                                                             \
                    for (int k = 0; k < 4; k++)                                                                       \
                        keep_##type((TYPE *)w->dP + position, a0 + k * WIDTH, A,                                      \
                                    4.0f * sum[k] * load(s.v + a0 + k * WIDTH));                                      \
                }                                                                                                     \
        }                                                                                                             \
    }

KERNELS(float, float)
KERNELS(uint16_t, bfloat16)

/* e (B, R, L). */
void additive_forward(const Pool *pool, int bfloat16, const void *P, const float *q, const float *v, float *e,
                      float *scratch, long size, long B, long R, long L, long A) {
    Work w = {.pool = pool, .P = P, .q = &q, .v = v, .out = e, .scratch = scratch, .size = size,
              .T = 1, .B = B, .R = R, .L = L, .A = A};
    run(pool, bfloat16 ? forward_bfloat16 : forward_float, &w);
}

/* The gradients of one step: dq (B, R, A), dv (threads, A) to be summed by the caller. */
void additive_backward(const Pool *pool, int bfloat16, const void *P, const float *q, const float *v, const float *g,
                       float *dq, float *dv, float *scratch, long size, long B, long R, long L, long A) {
    Work w = {.pool = pool, .P = P, .q = &q, .g = &g, .v = v, .out = dq, .dv = dv, .scratch = scratch,
              .size = size, .T = 1, .B = B, .R = R, .L = L, .A = A};
    run(pool, bfloat16 ? backward_bfloat16 : backward_float, &w);
}

/* The gradient of P (B, L, A) over T steps at once: h is computed again, so that no step keeps (L, A) values. Step t has
   the first images[t] images. */
void additive_backward_projected(const Pool *pool, int bfloat16, const void *P, const float *const *q, const float *v,
                                 const float *const *g, const int64_t *images, void *dP, float *scratch, long size,
                                 long T, long B, long R, long L, long A) {
    Work w = {.pool = pool, .P = P, .q = q, .g = g, .images = images, .v = v, .dP = dP, .scratch = scratch, .size = size,
              .T = T, .B = B, .R = R, .L = L, .A = A};
    run(pool, bfloat16 ? projected_bfloat16 : projected_float, &w);
}
