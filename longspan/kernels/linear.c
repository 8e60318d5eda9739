// The modules of a decode step for a few rows x: linear layers, the gated MLP, RMS norms. Weights are read once, in place.
//
// A tile is R rows of W times M rows of x with R * M = 16 sums, each sixteen lanes wide; the lanes of all sixteen are
// added up at once. Threads share the rows of W. Numbers are bfloat16, sums float32.

#include "vectors.h"

enum { SUMS = 16 };

// One call; linear.py packs it field by field (every field has 8 bytes). Row strides are in elements.
typedef struct {
    const char *x, *w, *bias;                   // (m,k), (n,k), (n) or null
    char *y;                                    // (m,n)
    int64_t m, n, k, x_row, w_row, y_row, threads;
} Call;

// Lane sums of R rows of W from `n` on times M rows of x from `m` on. Rows past the end repeat the last one.
TEMPLATE void products(vec *sum, const Call *a, int64_t n, int64_t m, const int R, const int M) {
    const uint16_t *w[SUMS], *x[SUMS];
    for (int r = 0; r < R; r++) w[r] = (const uint16_t *)a->w + (n + r < a->n ? n + r : a->n - 1) * a->w_row;
    for (int i = 0; i < M; i++) x[i] = (const uint16_t *)a->x + (m + i < a->m ? m + i : a->m - 1) * a->x_row;
    for (int i = 0; i < SUMS; i++) sum[i] = (vec){0};
#if defined(__AVX512BF16__)
    for (int64_t c = 0; c < a->k; c += 2 * LANES) {
        __m512bh left[SUMS];
        for (int r = 0; r < R; r++) left[r] = (__m512bh)_mm512_loadu_si512(w[r] + c);
        for (int i = 0; i < M; i++) {
            __m512bh right = (__m512bh)_mm512_loadu_si512(x[i] + c);
            for (int r = 0; r < R; r++)
                sum[r * M + i] = (vec)_mm512_dpbf16_ps((__m512)sum[r * M + i], left[r], right);
        }
    }
#else
    for (int64_t c = 0; c < a->k; c += LANES) {
        vec left[SUMS];
        for (int r = 0; r < R; r++) left[r] = load((const char *)(w[r] + c), BF16);
        for (int i = 0; i < M; i++) {
            vec right = load((const char *)(x[i] + c), BF16);
            for (int r = 0; r < R; r++) sum[r * M + i] += left[r] * right;
        }
    }
#endif
}

TEMPLATE void tile(const Call *a, int64_t n, int64_t m, const int M) {
    const int R = SUMS / M;
    vec sum[SUMS], quarters[4];
    products(sum, a, n, m, R, M);
    for (int i = 0; i < 4; i++) quarters[i] = sum_into_quarters(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]);
    vec total = sum_quarters(quarters);
    for (int r = 0; r < R && n + r < a->n; r++) {
        float bias = a->bias ? load_one(a->bias + 2 * (n + r), BF16) : 0;
        for (int i = 0; i < M && m + i < a->m; i++)
            store_one(a->y + 2 * ((m + i) * a->y_row + n + r), total[r * M + i] + bias, BF16);
    }
}

static void rows_of_w(const Call *a, int64_t first, int64_t last, const int M) {
    for (int64_t n = first; n < last; n += SUMS / M)
        for (int64_t m = 0; m < a->m; m += M) {
            if (M == 1) tile(a, n, m, 1);
            else if (M == 2) tile(a, n, m, 2);
            else if (M == 4) tile(a, n, m, 4);
            else tile(a, n, m, 8);
        }
}

static void linear(const Call *a) {
    int M = a->m > 4 ? 8 : a->m > 2 ? 4 : a->m;
    int64_t parts = a->threads < 1 ? 1 : a->threads, share = (a->n / parts + SUMS) / SUMS * SUMS;
    if (parts == 1) {
        rows_of_w(a, 0, a->n, M);
        return;
    }
#pragma omp parallel for num_threads(parts) schedule(static, 1)
    for (int64_t part = 0; part < parts; part++) {
        int64_t last = (part + 1) * share;
        rows_of_w(a, part * share, last < a->n ? last : a->n, M);
    }
}

int longspan_linear(const Call *a) {
    if (a->k % (2 * LANES)) return 1;
    linear(a);
    return 0;
}

// down(silu(gate(x)) * up(x)); what PyTorch rounds to bfloat16 on the way is rounded here too.
typedef struct {
    Call gate, up, down;                        // gate.y and up.y: scratch of (m,n); gate.y is down.x
} Mlp;

// gate = silu(gate) * up for sixteen numbers; e^-|x| never overflows.
TEMPLATE void gated(char *gate, const char *up) {
    vec x = load(gate, BF16), size = (vec)((ivec)x & 0x7fffffff), e = power_of_two(size * -1.44269504f);
    ivec negative = x < 0.0f;
    vec share = (vec)(((ivec)e & negative) | ((ivec)(vec){0} + 0x3f800000 & ~negative)) / (1.0f + e);
    store(gate, x * share, BF16);
    store(gate, load(gate, BF16) * load(up, BF16), BF16);
}

int longspan_mlp(const Mlp *a) {
    if (a->gate.k % (2 * LANES) || a->down.k % (2 * LANES)) return 1;
    linear(&a->gate);
    linear(&a->up);
    for (int64_t i = 0; i < a->gate.m * a->gate.n; i += LANES) gated(a->gate.y + 2 * i, a->up.y + 2 * i);
    linear(&a->down);
    return 0;
}

// y = w * x / sqrt(mean(x^2) + eps), rounded to bfloat16 before the product with w, as the models do.
typedef struct {
    const char *x, *w;
    char *y;
    int64_t rows, width, x_row;
    double eps;
} Norm;

int longspan_rms_norm(const Norm *a) {
    if (a->width % LANES) return 1;
    for (int64_t row = 0; row < a->rows; row++) {
        const char *x = a->x + 2 * row * a->x_row;
        char *y = a->y + 2 * row * a->width;
        vec squares = {0};
        for (int64_t i = 0; i < a->width; i += LANES) {
            vec value = load(x + 2 * i, BF16);
            squares += value * value;
        }
        float factor = 1.0f / sqrtf(fold(squares, 0) / (float)a->width + (float)a->eps);
        for (int64_t i = 0; i < a->width; i += LANES) {
            store(y + 2 * i, load(x + 2 * i, BF16) * factor, BF16);
            store(y + 2 * i, load(a->w + 2 * i, BF16) * load(y + 2 * i, BF16), BF16);
        }
    }
    return 0;
}
