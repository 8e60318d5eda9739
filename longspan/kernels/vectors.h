// Sixteen floats as one vector on every machine: loads and stores of three number formats, sums over lanes, 2^x.
//
// Vector extensions of GCC (12 on) and Clang; the compiler lowers them to whatever registers the processor has.
// Constant arguments of always-inlined functions (TEMPLATE) play the part of templates.

#ifndef LONGSPAN_VECTORS_H
#define LONGSPAN_VECTORS_H

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { F32 = 0, BF16 = 1, F16 = 2 };
enum { LANES = 16 };

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint16_t hvec __attribute__((vector_size(32)));
typedef uint32_t uvec __attribute__((vector_size(64)));
typedef float loose_vec __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t loose_hvec __attribute__((vector_size(32), aligned(2), may_alias));

#define TEMPLATE static inline __attribute__((always_inline))
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)

TEMPLATE int64_t bytes_of(int64_t dtype) { return dtype == F32 ? 4 : 2; }

TEMPLATE uvec widen_bits(hvec h) {
#if defined(__AVX512F__)
    return (uvec)_mm512_cvtepu16_epi32((__m256i)h);
#else
    return __builtin_convertvector(h, uvec);
#endif
}

TEMPLATE vec half_to_float(hvec h) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps((__m256i)h);
#else
    uvec wide = widen_bits(h), magnitude = (wide & 0x7fff) << 13;
    vec value = (vec)magnitude * 0x1p112f;      // moves the exponent; denormals come out right too
    uvec special = (uvec)(magnitude >= 0x0f800000u);
    value = (vec)(((uvec)value & ~special) | ((magnitude | 0x7f800000u) & special));
    return (vec)((uvec)value | ((wide & 0x8000) << 16));
#endif
}

TEMPLATE vec load(const char *p, const int dtype) {
    if (dtype == F32) return *(const loose_vec *)p;
    hvec h = *(const loose_hvec *)p;
    return dtype == BF16 ? (vec)(widen_bits(h) << 16) : half_to_float(h);
}

static inline float load_one(const char *p, int64_t dtype) {
    if (dtype == F32) return *(const float *)p;
    hvec h = {*(const uint16_t *)p};
    return dtype == BF16 ? ((vec)(widen_bits(h) << 16))[0] : half_to_float(h)[0];
}

static inline uint16_t float_to_half(float x) {  // round to nearest even, denormals and infinities included
    uint32_t bits, sign;
    memcpy(&bits, &x, 4);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (bits < 0x38800000) {                    // below the smallest normal half: let the adder round
        float y = fabsf(x) + 0.5f;
        memcpy(&bits, &y, 4);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | ((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13));
}

static inline void store_one(char *p, float x, int64_t dtype) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (dtype == F32) *(float *)p = x;
    else if (dtype == F16) *(uint16_t *)p = float_to_half(x);
    else if (x != x) *(uint16_t *)p = 0x7fc0;
    else *(uint16_t *)p = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

TEMPLATE void store(char *p, vec x, int64_t dtype) {
    if (dtype == F32) {
        *(loose_vec *)p = x;
    } else if (dtype == BF16) {
        uvec bits = (uvec)x, nan = (uvec)(x != x);
        bits = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        *(loose_hvec *)p = __builtin_convertvector((bits & ~nan) | (0x7fc0 & nan), hvec);
    } else {
#if defined(__AVX512F__)
        *(loose_hvec *)p = (hvec)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#else
        for (int i = 0; i < LANES; i++) *(uint16_t *)(p + 2 * i) = float_to_half(x[i]);
#endif
    }
}

// A row of n numbers as floats, with zeros up to `padded` (a multiple of LANES), and back.
static inline void load_row(float *to, const char *from, int64_t n, int64_t padded, int64_t dtype) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        const char *p = from + i * bytes_of(dtype);
        *(loose_vec *)(to + i) = dtype == F32 ? load(p, F32) : dtype == BF16 ? load(p, BF16) : load(p, F16);
    }
    for (; i < padded; i++) to[i] = i < n ? load_one(from + i * bytes_of(dtype), dtype) : 0;
}

static inline void store_row(char *to, const float *from, float factor, int64_t n, int64_t dtype) {
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i * bytes_of(dtype), *(const loose_vec *)(from + i) * factor, dtype);
    for (; i < n; i++) store_one(to + i * bytes_of(dtype), from[i] * factor, dtype);
}

// Every quarter of the result holds the sums of a, b, c, d over that quarter: half of the way to `sum_quarters`.
TEMPLATE vec sum_into_quarters(vec a, vec b, vec c, vec d) {
    vec ab = SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
             SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    vec cd = SHUFFLE(c, d, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29) +
             SHUFFLE(c, d, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31);
    return SHUFFLE(ab, cd, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
           SHUFFLE(ab, cd, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}

// Quarter i of the result is the sum of the quarters of x[i].
TEMPLATE vec sum_quarters(const vec *x) {
    vec low = SHUFFLE(x[0], x[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
              SHUFFLE(x[0], x[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    vec high = SHUFFLE(x[2], x[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(x[2], x[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    return SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
           SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
}

// 2^x for x <= 0 (0 below -126): 2^round(x) times a polynomial in the rest, 3e-8 relative; NaN stays NaN.
TEMPLATE vec power_of_two(vec x) {
    ivec gone = x < -126.0f;
    x = (vec)((ivec)x & ~gone);
    vec shifted = x + 0x1.8p23f, rest = x - (shifted - 0x1.8p23f);
    ivec exponent = ((ivec)shifted - 0x4b400000 + 127) << 23;
    vec p = 1.53707049e-4f * rest + 1.33998482e-3f;
    p = p * rest + 9.61837359e-3f;
    p = p * rest + 5.55032901e-2f;
    p = p * rest + 2.40226477e-1f;
    p = p * rest + 6.93147182e-1f;
    p = p * rest + 1.0f;
    return (vec)((ivec)(p * (vec)exponent) & ~gone);
}

TEMPLATE vec larger(vec a, vec b) {
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    ivec first = a > b;
    return (vec)(((ivec)a & first) | ((ivec)b & ~first));
#endif
}

// Whether a lane of x is above the limit; may say yes wrongly where asking costs more than the answer saves.
TEMPLATE int any_above(vec x, float limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(limit), _CMP_GT_OQ) != 0;
#else
    (void)x, (void)limit;
    return 1;
#endif
}

// The lanes of x folded to one number by + or by the maximum.
TEMPLATE float fold(vec x, const int maximum) {
    vec y = SHUFFLE(x, x, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    x = maximum ? larger(x, y) : x + y;
    y = SHUFFLE(x, x, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    x = maximum ? larger(x, y) : x + y;
    y = SHUFFLE(x, x, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    x = maximum ? larger(x, y) : x + y;
    return maximum ? (x[0] > x[1] ? x[0] : x[1]) : x[0] + x[1];
}

#endif
