// α-entmax of rows and its derivative. One row at a time, everything relative to its maximum: x = (α-1) (s - max s) <= 0.
//
// Forward: the maximum; the elements with x > -1, the only ones that can be in the support, side by side in a buffer that stays
// in the cache; a histogram of those, for a bracket of 1/8 (α = 1.5 and 2); Halley's or Newton's steps inside it; the result.
// Powers are constants of always-inlined functions: 1 (α = 2), 2 (α = 1.5), 4 (α = 1.25), and any other through logarithms.

#include <stdlib.h>

#include "vectors.h"

enum { BINS = 8, MOST_STEPS = 60, BLOCK = 256 * LANES };
enum { POWER_1, POWER_2, POWER_4, ANY_POWER };
#define TOLERANCE 1e-6
#define SLACK 1e-5
#define NEVER -4.0f                             // an x that no threshold lets in

typedef struct {                                // every field has 8 bytes; rows are dense
    const char *in;                             // (rows, n): scores; backward: probabilities
    const char *grad;                           // (rows, n), backward only
    char *out;                                  // (rows, n)
    int32_t *iterations;                        // (rows), forward only
    int64_t rows, n, dtype, threads;
    double alpha;
} Job;

TEMPLATE vec choose(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

TEMPLATE vec positive(vec x) { return larger(x, (vec){0}); }

TEMPLATE vec read(const float *row, int64_t i, int64_t n, float beyond) {
    if (i + LANES <= n) return *(const loose_vec *)(row + i);
    vec x = (vec){0} + beyond;
    memcpy(&x, row + i, (size_t)(n - i) * 4);
    return x;
}

TEMPLATE void write(float *row, int64_t i, int64_t n, vec x) {
    if (i + LANES <= n) *(loose_vec *)(row + i) = x;
    else memcpy(row + i, &x, (size_t)(n - i) * 4);
}

TEMPLATE int any_not_zero(vec x) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, _mm512_setzero_ps(), _CMP_NEQ_UQ) != 0;
#else
    (void)x;
    return 1;
#endif
}

TEMPLATE vec root(vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_sqrt_ps((__m512)x);
#else
    for (int i = 0; i < LANES; i++) x[i] = sqrtf(x[i]);
    return x;
#endif
}

// log2 of positive numbers: exponent, plus the series of the area tangent of (m - 1) / (m + 1) for m in [0.7, 1.4).
TEMPLATE vec logarithm(vec x) {
    ivec exponent = ((ivec)x - 0x3f3504f3) >> 23;
    vec m = (vec)((ivec)x - (exponent << 23)), s = (m - 1.0f) / (m + 1.0f), q = s * s;
    vec series = 0.26230819f * q + 0.32059890f;
    series = series * q + 0.41219858f;
    series = series * q + 0.57707802f;
    series = series * q + 0.96179669f;
    series = series * q + 2.88539008f;
    return __builtin_convertvector(exponent, vec) + series * s;
}

// u^e for u from 0 to about 1 and e >= 0; 0 where u is 0.
TEMPLATE vec raise(vec u, float e) { return choose(u > 0.0f, power_of_two(e * logarithm(u)), (vec){0}); }

// --------------------------------------------------------------------------------------------------------------- forward

typedef struct { double f, slope, bend; } Moments;

// f(t) = sum u^power - 1 and its two derivatives, u = [x - t]_+; sums of blocks are added in double precision.
TEMPLATE Moments moments(const float *x, int64_t n, float t, const int kind, double power) {
    double a0 = 0, a1 = 0, a2 = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t stop = start + BLOCK < n ? start + BLOCK : n;
        vec s0 = {0}, s1 = {0}, s2 = {0};
        for (int64_t i = start; i < stop; i += LANES) {
            const vec u = positive(*(const loose_vec *)(x + i) - t), one = choose(u > 0.0f, (vec){0} + 1.0f, (vec){0});
            if (kind == POWER_1) {
                s0 += u, s1 += one;
            } else if (kind == POWER_2) {
                s0 += u * u, s1 += u, s2 += one;
            } else if (kind == POWER_4 || power >= 2) {
                const vec w = kind == POWER_4 ? u * u : raise(u, (float)power - 2);
                s0 += w * u * u, s1 += w * u, s2 += w;
            } else {
                const vec w = raise(u, (float)power - 1);
                s0 += w * u, s1 += w;
            }
        }
        a0 += fold(s0, 0), a1 += fold(s1, 0), a2 += fold(s2, 0);
    }
    return (Moments){a0 - 1, -power * a1, power * (power - 1) * a2};
}

// The root of f with every element at its bin's left edge and the maximum at its own value: a lower bound of the threshold.
static double histogram_root(const float *x, int64_t n, int64_t kept, const int kind) {
    double above[BINS + 1] = {(double)kept};    // how many are at least at the left edge of bin r
    ivec count[BINS] = {{0}};
    for (int64_t i = 0; i < n; i += LANES)
        for (int r = 1; r < BINS; r++) count[r] -= (ivec)(*(const loose_vec *)(x + i) >= (float)r / BINS - 1);
    for (int r = 1; r < BINS; r++)
        for (int lane = 0; lane < LANES; lane++) above[r] += count[r][lane];
    above[BINS] = 1;                            // the maximum, taken out of its bin
    double s0 = 1, s1 = 1, s2 = 1;
    for (int r = BINS - 1; r >= 0; r--) {
        const double c = above[r] - above[r + 1], e = (double)r / BINS;
        const double n0 = s0 + c, n1 = s1 + c * e, n2 = s2 + c * e * e;
        if ((kind == POWER_1 ? n1 - n0 * e : n0 * e * e - 2 * n1 * e + n2) >= 1) break;
        s0 = n0, s1 = n1, s2 = n2;
    }
    if (kind == POWER_1) return (s1 - 1) / s0 - 1;
    const double inside = s1 * s1 - s0 * (s2 - 1);
    return (s1 - sqrt(inside > 0 ? inside : 0)) / s0 - 1;
}

// The threshold inside (low, high); `left` becomes 1 / the sum of powers there.
TEMPLATE float refine(const float *x, int64_t n, double low, double high, const int kind, double power, int32_t *steps,
                      float *left) {
    double t = (float)((low + high) / 2), t_before = 0, f_before = 0;
    int32_t step = 0;
    for (;; step++) {
        const Moments a = moments(x, n, (float)t, kind, power);
        *left = (float)(1 / (a.f + 1));
        if (fabs(a.f) < TOLERANCE || step == MOST_STEPS) break;
        if (a.f > 0) low = t;
        else high = t;
        const double halley = kind == POWER_1 ? 0 : a.slope * a.slope - a.f * a.bend / 2, secant = a.f - f_before;
        const double ways[3] = {power >= 2 ? t - a.f * a.slope / halley : NAN, t - a.f / a.slope,
                                step ? t - a.f * (t - t_before) / secant : NAN};
        double next = (low + high) / 2;
        for (int i = 0; i < 3; i++)
            if (isfinite(ways[i]) && ways[i] > low - SLACK && ways[i] < high + SLACK) {
                next = ways[i];
                break;
            }
        next = (float)next;
        if (fabs(next - t) <= 1.2e-7 * fabs(t)) break;  // float precision leaves nothing to move
        t_before = t, f_before = a.f, t = next;
    }
    *steps = step;
    return (float)t;
}

// Elements with x > -1 side by side, filled up to whole vectors; returns how many there are.
static int64_t collect(const float *scores, int64_t n, float top, float scale, float *kept) {
    int64_t count = 0;
    for (int64_t i = 0; i < n; i += LANES) {
        const vec x = (read(scores, i, n, -INFINITY) - top) * scale;
#if defined(__AVX512F__)
        const __mmask16 near = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-1), _CMP_GT_OQ);
        if (!near) continue;
        *(loose_vec *)(kept + count) = (vec)_mm512_maskz_compress_ps(near, (__m512)x);
        count += __builtin_popcount(near);
#else
        for (int lane = 0; lane < LANES; lane++) {
            kept[count] = x[lane];
            count += x[lane] > -1.0f;
        }
#endif
    }
    *(loose_vec *)(kept + count) = (vec){0} + NEVER;
    return count;
}

// The largest score; NaN where a score is NaN.
static float largest(const float *scores, int64_t n) {
    vec top[4], sound = {0};
    for (int j = 0; j < 4; j++) top[j] = (vec){0} - INFINITY;
    int64_t i = 0;
    ivec odd = {0};
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int j = 0; j < 4; j++) {
            const vec x = *(const loose_vec *)(scores + i + j * LANES);
            top[j] = larger(x, top[j]);
            odd |= (ivec)(x != x);
        }
    for (; i < n; i += LANES) {
        const vec x = read(scores, i, n, -INFINITY);
        top[0] = larger(x, top[0]);
        odd |= (ivec)(x != x);
    }
    sound = choose(odd, (vec){0} + 1.0f, (vec){0});
    return fold(sound, 0) > 0 ? NAN : fold(larger(larger(top[0], top[1]), larger(top[2], top[3])), 1);
}

TEMPLATE int32_t forward_row(const float *scores, float *out, int64_t n, double alpha, float *kept, const int kind) {
    const float top = largest(scores, n), scale = (float)(alpha - 1);
    const double power = kind == POWER_1 ? 1 : kind == POWER_2 ? 2 : kind == POWER_4 ? 4 : 1 / (alpha - 1);
    if (!isfinite(top)) {                       // nothing to choose from, or nothing that can be said
        for (int64_t i = 0; i < n; i++) out[i] = top == -INFINITY ? 0 : NAN;
        return 0;
    }
    const int64_t count = collect(scores, n, top, scale, kept), n_kept = (count + LANES - 1) / LANES * LANES;
    int32_t steps = 0;
    float t = -1, left = 1;
    if (count > 1) {
        double low = -1, high = 0;
        if (kind == POWER_1 || kind == POWER_2) {
            low = histogram_root(kept, n_kept, count, kind);
            high = low + 1.0 / BINS < 0 ? low + 1.0 / BINS : 0;
        }
        t = refine(kept, n_kept, low, high, kind, power, &steps, &left);
    }
    for (int64_t i = 0; i < n; i += LANES) {
        const vec u = positive((read(scores, i, n, -INFINITY) - top) * scale - t);
        vec p = u;
        if (kind == POWER_2) p = u * u;
        if (kind == POWER_4) p = u * u * (u * u);
        if (kind == ANY_POWER) p = any_not_zero(u) ? raise(u, (float)power) * left : u;
        write(out, i, n, p);
    }
    return steps;
}

// -------------------------------------------------------------------------------------------------------------- backward

// out = u (g - <u,g> / sum u) with u = p^(2-α) on the support; g counts only there.
TEMPLATE void backward_row(const float *p, const float *grad, float *out, int64_t n, double alpha, float *weights,
                           const int kind) {
    double total = 0, product = 0;
    for (int64_t start = 0; start < n; start += BLOCK) {
        const int64_t stop = start + BLOCK < n ? start + BLOCK : n;
        vec sum = {0}, dot = {0};
        for (int64_t i = start; i < stop; i += LANES) {
            const vec x = read(p, i, n, 0);
            vec u = {0};
            if (any_not_zero(x)) {
                const vec half = kind == POWER_2 || kind == POWER_4 ? root(x) : x;
                u = kind == POWER_1 ? choose(x > 0.0f, (vec){0} + 1.0f, x) : kind == POWER_2 ? half
                    : kind == POWER_4 ? half * root(half) : choose(x == x, raise(x, (float)(2 - alpha)), x);
                sum += u;
                dot += u * read(grad, i, n, 0);
            }
            *(loose_vec *)(weights + i) = u;
        }
        total += fold(sum, 0), product += fold(dot, 0);
    }
    const float mean = total == 0 ? 0 : (float)(product / total);
    for (int64_t i = 0; i < n; i += LANES) {
        const vec u = *(const loose_vec *)(weights + i);
        write(out, i, n, any_not_zero(u) ? u * (read(grad, i, n, 0) - mean) : u);
    }
}

// ------------------------------------------------------------------------------------------------------------------ rows

static int kind_of(double alpha) { return alpha == 2 ? POWER_1 : alpha == 1.5 ? POWER_2 : alpha == 1.25 ? POWER_4 : ANY_POWER; }

// Row `from` as floats: itself, or widened into `to`.
static const float *floats(const char *from, int64_t n, int64_t dtype, float *to) {
    if (dtype == F32) return (const float *)from;
    load_row(to, from, n, n, dtype);
    return to;
}

static void one_row(const Job *a, int64_t row, float *work, int64_t size, int kind) {
    const int64_t at = row * a->n * bytes_of(a->dtype);
    const float *in = floats(a->in + at, a->n, a->dtype, work + size);
    float *out = a->dtype == F32 ? (float *)(a->out + at) : work + 2 * size;
    if (a->grad) {
        const float *grad = floats(a->grad + at, a->n, a->dtype, work + 3 * size);
        if (kind == POWER_1) backward_row(in, grad, out, a->n, a->alpha, work, POWER_1);
        else if (kind == POWER_2) backward_row(in, grad, out, a->n, a->alpha, work, POWER_2);
        else if (kind == POWER_4) backward_row(in, grad, out, a->n, a->alpha, work, POWER_4);
        else backward_row(in, grad, out, a->n, a->alpha, work, ANY_POWER);
    } else {
        int32_t *steps = a->iterations + row;
        if (kind == POWER_1) *steps = forward_row(in, out, a->n, a->alpha, work, POWER_1);
        else if (kind == POWER_2) *steps = forward_row(in, out, a->n, a->alpha, work, POWER_2);
        else if (kind == POWER_4) *steps = forward_row(in, out, a->n, a->alpha, work, POWER_4);
        else *steps = forward_row(in, out, a->n, a->alpha, work, ANY_POWER);
    }
    if (a->dtype != F32) store_row(a->out + at, out, 1, a->n, a->dtype);
}

// Fills out, and iterations where `grad` is null. Returns 0, or 1 when memory ran out.
int64_t entmax_rows(const Job *a) {
    const int64_t size = (a->n + 2 * LANES) / LANES * LANES;
    const int kind = kind_of(a->alpha);
    int failed = 0;
#pragma omp parallel num_threads(a->threads) reduction(| : failed)
    {
        float *work = aligned_alloc(64, (size_t)(4 * size) * 4);
        failed |= !work;
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a->rows; row++)
            if (work) one_row(a, row, work, size, kind);
        free(work);
    }
    return failed;
}
