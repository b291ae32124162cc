/* Vectors as wide as the processor supports, and 1 / x in one instruction, which compilers do not make of plain C.

   They are the vector extension of GCC and Clang, which add and multiply such vectors on any processor. */

#include "common.h"

#if defined(__AVX512F__) && defined(__AVX512DQ__)
#define WIDTH 16
#elif defined(__AVX2__) && defined(__FMA__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#define ROUND_UP(n, size) (((n) + (size)-1) / (size) * (size))

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t whole __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t bits __attribute__((vector_size(4 * WIDTH)));
typedef uint16_t half __attribute__((vector_size(2 * WIDTH)));

/* For every width: the smaller and the larger of two (y or NaN if one is NaN), an estimate of 1 / x, conversion between
   16 and 32 bits. REFINEMENTS: Newton steps after the estimate, for float and for bfloat16. */
#if WIDTH == 16
#include <immintrin.h>
static inline vec least(vec x, vec y) { return (vec)_mm512_min_ps((__m512)x, (__m512)y); }
static inline vec greatest(vec x, vec y) { return (vec)_mm512_max_ps((__m512)x, (__m512)y); }
static inline vec estimate(vec x) { return (vec)_mm512_rcp14_ps((__m512)x); } /* within 2^-14, relatively */
static inline bits widened(half x) { return (bits)_mm512_cvtepu16_epi32((__m256i)x); }
static inline half narrowed(bits x) { return (half)_mm512_cvtepi32_epi16((__m512i)x); }
#define REFINEMENTS_BFLOAT16 0
#define REFINEMENTS_FLOAT 1
#elif WIDTH == 8
#include <immintrin.h>
static inline vec least(vec x, vec y) { return (vec)_mm256_min_ps((__m256)x, (__m256)y); }
static inline vec greatest(vec x, vec y) { return (vec)_mm256_max_ps((__m256)x, (__m256)y); }
static inline vec estimate(vec x) { return (vec)_mm256_rcp_ps((__m256)x); } /* within 1.5 * 2^-12 */
static inline bits widened(half x) { return (bits)_mm256_cvtepu16_epi32((__m128i)x); }
static inline half narrowed(bits x) { return __builtin_convertvector(x, half); }
#define REFINEMENTS_BFLOAT16 1
#define REFINEMENTS_FLOAT 1
#elif defined(__ARM_NEON)
#include <arm_neon.h>
static inline vec least(vec x, vec y) { return (vec)vminq_f32((float32x4_t)x, (float32x4_t)y); }
static inline vec greatest(vec x, vec y) { return (vec)vmaxq_f32((float32x4_t)x, (float32x4_t)y); }
static inline vec estimate(vec x) { return (vec)vrecpeq_f32((float32x4_t)x); } /* within 2^-8 */
static inline bits widened(half x) { return (bits)vmovl_u16((uint16x4_t)x); }
static inline half narrowed(bits x) { return (half)vmovn_u32((uint32x4_t)x); }
#define REFINEMENTS_BFLOAT16 1
#define REFINEMENTS_FLOAT 2
#else
static inline vec chosen(whole first, vec x, vec y) { return (vec)((first & (whole)x) | (~first & (whole)y)); }
static inline vec least(vec x, vec y) { return chosen(x < y, x, y); }
static inline vec greatest(vec x, vec y) { return chosen(x > y, x, y); }
/* Compilers may turn this into an estimate and a Newton step, which is inexact and fails for infinite x. */
static inline vec estimate(vec x) { return 1.0f / least((vec){0} + 1e37f, x); }
static inline bits widened(half x) { return __builtin_convertvector(x, bits); }
static inline half narrowed(bits x) { return __builtin_convertvector(x, half); }
#define REFINEMENTS_BFLOAT16 0
#define REFINEMENTS_FLOAT 1
#endif

static inline vec all(float x) { return (vec){0} + x; }
static inline vec load(const float *p) {
    vec x;
    memcpy(&x, p, sizeof x);
    return x;
}
static inline void store(float *p, vec x) { memcpy(p, &x, sizeof x); }

static inline float add_up(vec x) {
    float sum = 0;
    for (int k = 0; k < WIDTH; k++) sum += x[k];
    return sum;
}

/* The numbers of a row of n from index a on; 0 past its end. */
#define PARTS(TYPE, type, lanes)                                                                                      \
    static inline vec part_##type(const TYPE *row, long a, long n) {                                                  \
        lanes x, end = {0};                                                                                           \
        if (a + WIDTH <= n) {                                                                                         \
            memcpy(&x, row + a, sizeof x);                                                                            \
            return from_##type(x);                                                                                    \
        }                                                                                                             \
        if (a < n) memcpy(&end, row + a, (n - a) * sizeof *row);                                                      \
        return from_##type(end);                                                                                      \
    }                                                                                                                 \
    static inline void keep_##type(TYPE *row, long a, long n, vec x) {                                                \
        const lanes y = to_##type(x);                                                                                 \
        if (a + WIDTH <= n) {                                                                                         \
            memcpy(row + a, &y, sizeof y);                                                                            \
        } else if (a < n) {                                                                                           \
            const lanes end = y;                                                                                      \
            memcpy(row + a, &end, (n - a) * sizeof *row);                                                             \
        }                                                                                                             \
    }

static inline vec from_float(vec x) { return x; }
static inline vec to_float(vec x) { return x; }
static inline vec from_bfloat16(half x) { return (vec)(widened(x) << 16); }
static inline half to_bfloat16(vec x) { /* to nearest even */
    const bits b = (bits)x;
    return narrowed((b + 0x7fff + ((b >> 16) & 1)) >> 16);
}
PARTS(float, float, vec)
PARTS(uint16_t, bfloat16, half)

/* 1 / (1 + z) of z >= 0. The Newton step multiplies by z, which must be finite. */
static inline vec reciprocal(vec z, int refinements) {
    const vec x = (refinements ? least(all(1e37f), z) : z) + 1.0f;
    vec r = estimate(x);
    for (int k = 0; k < refinements; k++) r += r * (1.0f - x * r);
    return r;
}
static inline vec reciprocal_bfloat16(vec z) { return reciprocal(z, REFINEMENTS_BFLOAT16); }
static inline vec reciprocal_float(vec z) { return reciprocal(z, REFINEMENTS_FLOAT); }

static inline vec between(float low, vec x, float high) { return least(all(high), greatest(all(low), x)); }

/* x - floor x, and y 2^floor x. The second may be 0 or infinite for a large x; without AVX-512 it saturates earlier. */
#if WIDTH == 16
static inline vec fraction(vec x) { return (vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF); }
static inline vec scaled(vec y, vec x) { return (vec)_mm512_scalef_ps((__m512)y, (__m512)x); }
#else
static inline whole floor_of(vec x) {
    return __builtin_convertvector(between(-125.5f, x, 125.5f) + 128.0f, whole) - 128;
}
static inline vec fraction(vec x) {
    return between(-125.5f, x, 125.5f) - __builtin_convertvector(floor_of(x), vec);
}
static inline vec scaled(vec y, vec x) { return y * (vec)((floor_of(x) + 127) << 23); }
#endif

/* e^2x for x of bfloat16, within 8e-5 relatively. */
static inline vec exponential_bfloat16(vec x) {
    const vec y = 2.88539008f * x, f = fraction(y); /* 2 / ln 2 */
    return scaled(((7.80245215e-2f * f + 0.226067156f) * f + 0.695833564f) * f + 0.999925196f, y);
}

/* e^2x, within 3e-7 relatively. Beyond |x| = 43.5 it is e^87 or e^-87: never 0, never infinite. */
static inline vec exponential_float(vec x) {
#if WIDTH == 16
    const __m512 z = (__m512)between(-43.5f, x, 43.5f);
    const __m512 y = _mm512_mul_ps(z, _mm512_set1_ps(2.88539004f));
    const __m512 rest = _mm512_fmsub_ps(z, _mm512_set1_ps(2.88539004f), y); /* the rounding error of y */
    const vec f = fraction((vec)y) + ((vec)rest + (vec)z * 3.85192607e-8f); /* low bits of 2 / ln 2 */
    vec p = ((((1.87757669e-3f * f + 8.98933969e-3f) * f + 5.58263175e-2f) * f + 0.240153611f) * f + 0.693153083f) * f;
    return scaled(p + 0.99999994f, (vec)y);
#else
    const vec y = 2.0f * between(-43.5f, x, 43.5f);
    const vec n = 1.44269504f * y - fraction(1.44269504f * y);
    const vec f = y - n * 0.693145752f; /* the high bits of ln 2, so that this is exact; the low bits follow */
    vec p = ((((1.17346561e-2f * f + 3.89426909e-2f) * f + 0.167634189f) * f + 0.499848276f) * f + 1.00000846f) * f;
    p += 0.99999994f;
    return scaled(p - p * (n * 1.42860677e-6f), n);
#endif
}
