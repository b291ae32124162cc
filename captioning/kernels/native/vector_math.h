/* Exponential and logarithm in plain C that compilers can vectorise. */

#include "common.h"

/* exp of x <= 0; relative error below 5e-7. */
static inline float exp_(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float n = __builtin_rintf(x * 1.44269504f);
    const float f = x - n * 0.69314718f;
    float p = 1.0f / 720;
    p = p * f + 1.0f / 120;
    p = p * f + 1.0f / 24;
    p = p * f + 1.0f / 6;
    p = p * f + 0.5f;
    p = p * f + 1.0f;
    p = p * f + 1.0f;
    const int32_t bits = ((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

/* log of a positive, normal number or NaN; error below 2e-7 of the result or of 1, whichever is larger. The polynomial
   of Cephes. */
static inline float log_(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    const int32_t exponent = (bits - 0x3f3504f3) >> 23; /* so that the rest is in [sqrt 1/2, sqrt 2) */
    bits -= exponent << 23;
    float m;
    memcpy(&m, &bits, 4);
    m -= 1.0f;
    float p = 7.0376836292e-2f;
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    const float n = (float)exponent;
    const float found = m + (m * m * (p * m - 0.5f) - 2.12194440e-4f * n) + 0.693359375f * n;
    return x == x ? found : x;
}
