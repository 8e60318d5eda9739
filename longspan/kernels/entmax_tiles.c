// Causal α-entmax attention in tiles of 64 queries by 64 keys, α = 1.5 or 2: forward, and backward in two passes.
//
// Scores are computed transposed, with query rows along the vector lanes: maxima, histograms, sums and steps of sixteen rows
// go on side by side and never cross lanes. A row of tiles keeps its scores (64 x S) while thresholds are found; a tile's bit
// says whether it can hold weight, and values, and all of the backward pass, are computed for tiles with a bit only. What is
// skipped would add zeros, so skipping changes no result.
//
//     x = z - top,  z = (α-1) scale q.k,   u = [x - tau]_+,   p = u² (α = 1.5) or u (2),   w = dp/ds = u or [u > 0]

#include <stdlib.h>

#include "vectors.h"

#if defined(__AVX512F__)
enum { MR = 8, NV = 2 };                        // a product's MR * NV sums must fit the registers
#else
enum { MR = 4, NV = 1 };
#endif
enum { TILE = 64, GROUPS = TILE / LANES, BINS = 8, MOST_STEPS = 40, BLOCK = 256 };
#define TOLERANCE 1e-6f                         // of f; |f'| >= 1, so a threshold less this is below the true one
#define SLACK 1e-5f

typedef struct {                                // every field has 8 bytes; all arrays are dense
    const float *q, *k, *v;                     // (B,H,T,D), (B,G,S,D), (B,G,S,Dv)
    const int64_t *lengths;                     // (B): queries that are there; null for all
    float *out, *second;                        // (B,H,T,Dv); second (sum w v / sum w) may be null
    float *top, *tau;                           // (B,H,T)
    uint32_t *bits;                             // (B,H,NQ,NK/32)
    const float *grad, *delta;                  // backward: (B,H,T,Dv), (B,H,T)
    float *dq, *dk, *dv;
    int64_t batch, heads, kv_heads, q_len, k_len, dim, v_dim, skip, threads;
    double alpha, scale;
} Job;

typedef struct {                                // what one thread holds; widths are padded to whole products
    float *q, *k, *v, *q_rows, *g_rows, *g;     // [D][64], [64][D], [64][Dv], [64][D], [64][Dv], [Dv][64]
    float *strip, *tops, *kept;                 // [NK][64][64], [NK][64], [S][16]
    float *a, *b, *out, *second;                // [64][64] twice, accumulators
    vec top[GROUPS], tau[GROUPS], delta[GROUPS];
    int64_t d, dv;
    void *memory;
} Work;

TEMPLATE vec get(const float *p) { return *(const loose_vec *)p; }
TEMPLATE void put(float *p, vec x) { *(loose_vec *)p = x; }
TEMPLATE vec splat(float x) { return (vec){0} + x; }
TEMPLATE vec choose(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }
TEMPLATE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

TEMPLATE int any_lane(ivec mask) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= mask[i];
    return any != 0;
#endif
}

// c[r][n] (+)= sum_k a[r * am + k * ak] * b[k][n] for `rows` values r (a multiple of MR) and `columns` n (of NV * LANES).
TEMPLATE void product(const float *a, int64_t am, int64_t ak, const float *b, int64_t ldb, float *c, int64_t ldc, int64_t rows,
                      int64_t columns, int64_t depth, const int add) {
    for (int64_t r0 = 0; r0 < rows; r0 += MR)
        for (int64_t n0 = 0; n0 < columns; n0 += NV * LANES) {
            vec sum[MR][NV];
            float *to = c + r0 * ldc + n0;
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
                for (int n = 0; n < NV; n++) sum[r][n] = add ? get(to + r * ldc + n * LANES) : (vec){0};
            const float *left = a + r0 * am, *right = b + n0;
            for (int64_t k = 0; k < depth; k++, left += ak, right += ldb) {
                vec row[NV];
#pragma GCC unroll 2
                for (int n = 0; n < NV; n++) row[n] = get(right + n * LANES);
#pragma GCC unroll 8
                for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
                    for (int n = 0; n < NV; n++) sum[r][n] += left[r * am] * row[n];
            }
#pragma GCC unroll 8
            for (int r = 0; r < MR; r++)
#pragma GCC unroll 2
                for (int n = 0; n < NV; n++) put(to + r * ldc + n * LANES, sum[r][n]);
        }
}

// --------------------------------------------------------------------------------------------------------------- tiles

// n rows of `width` numbers into 64 rows of `padded`, zeros elsewhere.
static void load_tile(float *to, const float *from, int64_t n, int64_t width, int64_t padded) {
    for (int64_t r = 0; r < TILE; r++) {
        if (r < n) memcpy(to + r * padded, from + r * width, (size_t)width * 4);
        memset(to + r * padded + (r < n ? width : 0), 0, (size_t)(padded - (r < n ? width : 0)) * 4);
    }
}

static void load_turned(float *to, const float *from, int64_t n, int64_t width, float factor) {
    for (int64_t r = 0; r < TILE; r++)
        for (int64_t d = 0; d < width; d++) to[d * TILE + r] = r < n ? from[r * width + d] * factor : 0;
}

// The last key that each of sixteen rows may see; -1 for rows that aren't there.
TEMPLATE ivec limits(int64_t first_limit, int64_t n_rows, int group) {
    ivec limit;
    for (int i = 0; i < LANES; i++)
        limit[i] = group * LANES + i < n_rows ? (int32_t)(first_limit + group * LANES + i) : -1;
    return limit;
}

// Hides what lies after a row's own key in the scores [key][row] of one tile.
static void hide(float *scores, int64_t first_key, int64_t first_limit, int64_t n_rows) {
    for (int n = 0; n < GROUPS; n++) {
        const ivec limit = limits(first_limit, n_rows, n);
        float *at = scores + n * LANES;
        for (int64_t j = 0; j < TILE; j++, at += TILE)
            put(at, choose(limit >= (int32_t)(first_key + j), get(at), splat(-INFINITY)));
    }
}

TEMPLATE int64_t tiles_of(int64_t length) { return (length + TILE - 1) / TILE; }
TEMPLATE int64_t words_of(const Job *a) { return (tiles_of(a->k_len) + 31) / 32; }

// ------------------------------------------------------------------------------------------------------------ threshold

// Lower bounds of sixteen thresholds: roots with elements at the left edges of their bins and the maximum at its value.
static vec histogram_roots(const float *kept, int64_t n, const int square) {
    ivec count[BINS] = {{0}};
    vec found;
    for (int64_t j = 0; j < n; j++) {
        const vec x = get(kept + j * LANES);
        for (int r = 0; r < BINS; r++) count[r] -= (ivec)(x >= (float)r / BINS - 1);
    }
    for (int lane = 0; lane < LANES; lane++) {
        double s0 = 1, s1 = 1, s2 = 1, above = 1;
        for (int r = BINS - 1; r >= 0; r--) {
            const double c = count[r][lane] - above, e = (double)r / BINS;
            const double n0 = s0 + c, n1 = s1 + c * e, n2 = s2 + c * e * e;
            if ((square ? n0 * e * e - 2 * n1 * e + n2 : n1 - n0 * e) >= 1) break;
            above = count[r][lane], s0 = n0, s1 = n1, s2 = n2;
        }
        const double inside = s1 * s1 - s0 * (s2 - 1);
        found[lane] = (float)((square ? s1 - sqrt(inside > 0 ? inside : 0) : s1 - 1) / s0 - 1);
    }
    return found;
}

// The thresholds of sixteen rows: the middle of the histogram's bracket, then Halley's (α = 1.5) or Newton's steps.
static vec refine(const float *kept, int64_t n, ivec done, const int square) {
    const vec zero = {0}, one = splat(1);
    vec low = histogram_roots(kept, n, square), high = low + 1.0f / BINS;
    high = choose(high < zero, high, zero);
    vec t = (low + high) * 0.5f;
    for (int step = 0; step < MOST_STEPS; step++) {
        vec a0 = zero, a1 = zero, a2 = zero;
        for (int64_t start = 0; start < n; start += BLOCK) {
            vec s0 = zero, s1 = zero, s2 = zero;
            for (int64_t j = start; j < least(start + BLOCK, n); j++) {
                const vec u = larger(get(kept + j * LANES) - t, zero);
                if (square) s0 += u * u;
                s1 += u;
                s2 += choose(u > zero, one, zero);
            }
            a0 += s0, a1 += s1, a2 += s2;
        }
        const vec f = (square ? a0 : a1) - one;
        done |= (f < TOLERANCE) & (f > -TOLERANCE);
        if (!any_lane(~done)) break;
        low = choose(f > zero, t, low), high = choose(f < zero, t, high);
        vec next = square ? t + 2 * f * a1 / (4 * a1 * a1 - f * a2) : t + f / a2;
        next = choose((next > low - SLACK) & (next < high + SLACK), next, (low + high) * 0.5f);
        const vec move = next - t;
        const ivec stuck = (move <= t * -1.2e-7f) & (move >= t * 1.2e-7f);
        t = choose(done, t, next);
        done |= stuck;
    }
    return t;
}

static vec thresholds(const Job *a, Work *w, int64_t n_tiles, int group, ivec missing) {
    const vec top = w->top[group];
    int64_t n = 0;
    for (int64_t j = 0; j < n_tiles; j++) {
        if (!any_lane(get(w->tops + j * TILE + group * LANES) - top > -1.0f)) continue;
        for (int64_t i = 0; i < TILE; i++) {
            const vec x = get(w->strip + (j * TILE + i) * TILE + group * LANES) - top;
            put(w->kept + n * LANES, x);
            n += any_lane(x > -1.0f);
        }
    }
    return a->alpha == 1.5 ? refine(w->kept, n, missing, 1) : refine(w->kept, n, missing, 0);
}

// -------------------------------------------------------------------------------------------------------------- forward

static void finish(const Job *a, const Work *w, const float *total, int64_t at, int64_t n_rows, const ivec *odd) {
    for (int64_t r = 0; r < n_rows; r++) {
        float *out = a->out + (at + r) * a->v_dim, *second = a->second + (at + r) * a->v_dim;
        for (int64_t d = 0; d < a->v_dim; d++) out[d] = odd[r / LANES][r % LANES] ? NAN : w->out[d * TILE + r];
        for (int64_t d = 0; a->second && d < a->v_dim; d++) second[d] = total[r] > 0 ? w->second[d * TILE + r] / total[r] : 0;
        a->top[at + r] = w->top[r / LANES][r % LANES], a->tau[at + r] = w->tau[r / LANES][r % LANES];
    }
}

// Sums of p v and of w v over the tiles with a bit.
TEMPLATE void values(const Job *a, Work *w, const float *v, int64_t n_tiles, const uint32_t *bits, vec *total, const int square) {
    const vec zero = {0}, one = splat(1);
    memset(w->out, 0, (size_t)(w->dv * TILE) * 4), memset(w->second, 0, (size_t)(w->dv * TILE) * 4);
    for (int64_t j = 0; j < n_tiles; j++) {
        if (a->skip && !(bits[j / 32] >> (j % 32) & 1)) continue;
        const int64_t n_keys = least(TILE, a->k_len - j * TILE);
        load_tile(w->v, v + j * TILE * a->v_dim, n_keys, a->v_dim, w->dv);
        for (int64_t i = 0; i < n_keys; i++)
            for (int n = 0; n < GROUPS; n++) {
                const vec x = get(w->strip + (j * TILE + i) * TILE + n * LANES) - w->top[n];
                const vec u = larger(x - w->tau[n], zero), slope = square ? u : choose(u > zero, one, zero);
                put(w->a + i * TILE + n * LANES, square ? u * u : u);
                put(w->b + i * TILE + n * LANES, slope);
                total[n] += slope;
            }
        product(w->v, 1, w->dv, w->a, TILE, w->out, TILE, w->dv, TILE, n_keys, 1);
        if (a->second) product(w->v, 1, w->dv, w->b, TILE, w->second, TILE, w->dv, TILE, n_keys, 1);
    }
}

static void forward_tiles(const Job *a, Work *w, int64_t b, int64_t h, int64_t u) {
    const int64_t first = u * TILE, head = b * a->heads + h, source = b * a->kv_heads + h / (a->heads / a->kv_heads);
    const int64_t there = least(TILE, a->q_len - first), rows = a->lengths ? a->lengths[b] - first : there;
    const int64_t n_rows = least(there, rows > 0 ? rows : 0), first_limit = a->k_len - a->q_len + first;
    const int64_t n_tiles = n_rows ? tiles_of(first_limit + n_rows) : 0;
    uint32_t *bits = a->bits + (head * tiles_of(a->q_len) + u) * words_of(a);
    ivec odd[GROUPS], missing[GROUPS];
    vec total[GROUPS] = {{0}};
    load_turned(w->q, a->q + (head * a->q_len + first) * a->dim, n_rows, a->dim, (float)((a->alpha - 1) * a->scale));
    for (int n = 0; n < GROUPS; n++) w->top[n] = splat(-INFINITY), odd[n] = (ivec){0};
    for (int64_t j = 0; j < n_tiles; j++) {
        float *scores = w->strip + j * TILE * TILE;
        load_tile(w->k, a->k + (source * a->k_len + j * TILE) * a->dim, least(TILE, a->k_len - j * TILE), a->dim, w->d);
        product(w->k, w->d, 1, w->q, TILE, scores, TILE, TILE, TILE, a->dim, 0);
        if (j * TILE + TILE - 1 > first_limit || n_rows < TILE) hide(scores, j * TILE, first_limit, n_rows);
        for (int n = 0; n < GROUPS; n++) {
            vec top = splat(-INFINITY);
            for (int64_t i = 0; i < TILE; i++) {
                const vec x = get(scores + i * TILE + n * LANES);
                top = larger(x, top);
                odd[n] |= (ivec)(x != x);
            }
            put(w->tops + j * TILE + n * LANES, top);
            w->top[n] = larger(top, w->top[n]);
        }
    }
    for (int n = 0; n < GROUPS; n++) {
        missing[n] = limits(first_limit, n_rows, n) < 0;
        odd[n] |= ~missing[n] & ~((w->top[n] > -INFINITY) & (w->top[n] < INFINITY));
        const ivec off = missing[n] | odd[n];
        w->top[n] = choose(off, (vec){0}, w->top[n]);
        w->tau[n] = n_tiles ? choose(off, splat(INFINITY), thresholds(a, w, n_tiles, n, off)) : splat(INFINITY);
    }
    for (int64_t j = 0; j < n_tiles; j++) {
        ivec set = {0};
        for (int n = 0; n < GROUPS; n++) set |= get(w->tops + j * TILE + n * LANES) - w->top[n] > w->tau[n] - TOLERANCE;
        if (any_lane(set)) bits[j / 32] |= 1u << (j % 32);
    }
    const float *v = a->v + source * a->k_len * a->v_dim;
    a->alpha == 1.5 ? values(a, w, v, n_tiles, bits, total, 1) : values(a, w, v, n_tiles, bits, total, 0);
    finish(a, w, (const float *)total, head * a->q_len + first, there, odd);
}

// ------------------------------------------------------------------------------------------------------------- backward

// Rows of queries and of the output's gradient; rows that aren't there have a threshold that nothing reaches.
static void load_queries(const Job *a, Work *w, int64_t head, int64_t u, int by_rows) {
    const int64_t at = head * a->q_len + u * TILE, n = least(TILE, a->q_len - u * TILE);
    load_turned(w->q, a->q + at * a->dim, n, a->dim, (float)((a->alpha - 1) * a->scale));
    load_turned(w->g, a->grad + at * a->v_dim, n, a->v_dim, 1);
    for (int64_t r = 0; r < TILE; r++) {
        w->top[r / LANES][r % LANES] = r < n ? a->top[at + r] : 0;
        w->tau[r / LANES][r % LANES] = r < n ? a->tau[at + r] : INFINITY;
        w->delta[r / LANES][r % LANES] = r < n ? a->delta[at + r] : 0;
    }
    if (!by_rows) return;
    load_tile(w->q_rows, a->q + at * a->dim, n, a->dim, w->d), load_tile(w->g_rows, a->grad + at * a->v_dim, n, a->v_dim, w->dv);
}

static void load_keys(const Job *a, Work *w, int64_t source, int64_t j) {
    const int64_t at = source * a->k_len + j * TILE, n = least(TILE, a->k_len - j * TILE);
    load_tile(w->k, a->k + at * a->dim, n, a->dim, w->d), load_tile(w->v, a->v + at * a->v_dim, n, a->v_dim, w->dv);
}

// p in a and ds = w (dp - delta) in b, both [key][row], for the tile of loaded queries and keys.
TEMPLATE void weights(const Job *a, Work *w, int64_t u, int64_t j, const int square) {
    const int64_t first_limit = a->k_len - a->q_len + u * TILE;
    const vec zero = {0}, one = splat(1);
    product(w->k, w->d, 1, w->q, TILE, w->a, TILE, TILE, TILE, a->dim, 0);
    product(w->v, w->dv, 1, w->g, TILE, w->b, TILE, TILE, TILE, a->v_dim, 0);
    if (j * TILE + TILE - 1 > first_limit) hide(w->a, j * TILE, first_limit, TILE);
    for (int64_t i = 0; i < TILE; i++)
        for (int n = 0; n < GROUPS; n++) {
            float *p = w->a + i * TILE + n * LANES, *ds = w->b + i * TILE + n * LANES;
            const vec x = larger(get(p) - w->top[n] - w->tau[n], zero);
            const vec slope = square ? x : choose(x > zero, one, zero);
            put(p, square ? x * x : x);
            put(ds, slope * (get(ds) - w->delta[n]));
        }
}

static int wanted(const Job *a, int64_t head, int64_t u, int64_t j) {
    return !a->skip || (a->bits[(head * tiles_of(a->q_len) + u) * words_of(a) + j / 32] >> (j % 32) & 1);
}

static void query_gradient(const Job *a, Work *w, int64_t b, int64_t h, int64_t u) {
    const int64_t head = b * a->heads + h, source = b * a->kv_heads + h / (a->heads / a->kv_heads);
    const int64_t n = least(TILE, a->q_len - u * TILE), n_tiles = tiles_of(a->k_len - a->q_len + u * TILE + n);
    load_queries(a, w, head, u, 0);
    memset(w->out, 0, (size_t)(w->d * TILE) * 4);
    for (int64_t j = 0; j < n_tiles; j++) {
        if (!wanted(a, head, u, j)) continue;
        load_keys(a, w, source, j);
        a->alpha == 1.5 ? weights(a, w, u, j, 1) : weights(a, w, u, j, 0);
        product(w->k, 1, w->d, w->b, TILE, w->out, TILE, w->d, TILE, TILE, 1);
    }
    for (int64_t r = 0; r < n; r++)
        for (int64_t d = 0; d < a->dim; d++)
            a->dq[(head * a->q_len + u * TILE + r) * a->dim + d] = (float)a->scale * w->out[d * TILE + r];
}

static void key_gradient(const Job *a, Work *w, int64_t b, int64_t g, int64_t j) {
    const int64_t source = b * a->kv_heads + g, group = a->heads / a->kv_heads, n = least(TILE, a->k_len - j * TILE);
    load_keys(a, w, source, j);
    memset(w->out, 0, (size_t)(w->d * TILE) * 4), memset(w->second, 0, (size_t)(w->dv * TILE) * 4);
    for (int64_t h = g * group; h < (g + 1) * group; h++)
        for (int64_t u = 0; u < tiles_of(a->q_len); u++) {
            const int64_t head = b * a->heads + h, last = a->k_len - a->q_len + least((u + 1) * TILE, a->q_len) - 1;
            if (last < j * TILE || !wanted(a, head, u, j)) continue;
            load_queries(a, w, head, u, 1);
            a->alpha == 1.5 ? weights(a, w, u, j, 1) : weights(a, w, u, j, 0);
            product(w->b, TILE, 1, w->q_rows, w->d, w->out, w->d, TILE, w->d, TILE, 1);
            product(w->a, TILE, 1, w->g_rows, w->dv, w->second, w->dv, TILE, w->dv, TILE, 1);
        }
    for (int64_t i = 0; i < n; i++) {
        const int64_t at = source * a->k_len + j * TILE + i;
        for (int64_t d = 0; d < a->dim; d++) a->dk[at * a->dim + d] = (float)a->scale * w->out[i * w->d + d];
        for (int64_t d = 0; d < a->v_dim; d++) a->dv[at * a->v_dim + d] = w->second[i * w->dv + d];
    }
}

// ------------------------------------------------------------------------------------------------------------------ work

static int open_work(const Job *a, Work *w, int forward) {
    const int64_t whole = NV * LANES > MR ? NV * LANES : MR, keys = tiles_of(a->k_len) * TILE;
    const int64_t d = (a->dim + whole - 1) / whole * whole, dv = (a->v_dim + whole - 1) / whole * whole, most = d > dv ? d : dv;
    const int64_t sizes[] = {TILE * d, TILE * d, TILE * dv, TILE * d, TILE * dv, TILE * dv, forward ? keys * TILE : 0, keys,
                             forward ? (keys + 1) * LANES : 0, TILE * TILE, TILE * TILE, TILE * most, TILE * most};
    float **parts[] = {&w->q, &w->k, &w->v, &w->q_rows, &w->g_rows, &w->g, &w->strip, &w->tops, &w->kept, &w->a, &w->b, &w->out,
                       &w->second};
    int64_t total = 0;
    for (int i = 0; i < 13; i++) total += sizes[i];
    float *p = w->memory = aligned_alloc(64, (size_t)total * 4);
    if (!p) return 0;
    for (int i = 0; i < 13; p += sizes[i], i++) *parts[i] = p;
    return w->d = d, w->dv = dv, 1;
}

// Fills out, second, top, tau and bits (zeros before). Returns 0, or 1 when memory ran out.
int64_t entmax_tiles_forward(const Job *a) {
    const int64_t n_q = tiles_of(a->q_len), heads = a->batch * a->heads;
    int failed = 0;
#pragma omp parallel num_threads(a->threads) reduction(| : failed)
    {
        Work w;
        const int ready = open_work(a, &w, 1);
        failed |= !ready;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n_q * heads; i++)  // late tiles first: they have the most keys
            if (ready) forward_tiles(a, &w, i % heads / a->heads, i % heads % a->heads, n_q - 1 - i / heads);
        if (ready) free(w.memory);
    }
    return failed;
}

// Fills dq, dk and dv. Returns 0, or 1 when memory ran out.
int64_t entmax_tiles_backward(const Job *a) {
    const int64_t n_q = tiles_of(a->q_len), n_k = tiles_of(a->k_len);
    const int64_t heads = a->batch * a->heads, kv_heads = a->batch * a->kv_heads;
    int failed = 0;
#pragma omp parallel num_threads(a->threads) reduction(| : failed)
    {
        Work w;
        const int ready = open_work(a, &w, 0);
        failed |= !ready;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n_q * heads; i++)
            if (ready) query_gradient(a, &w, i % heads / a->heads, i % heads % a->heads, n_q - 1 - i / heads);
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n_k * kv_heads; i++)
            if (ready) key_gradient(a, &w, i % kv_heads / a->kv_heads, i % kv_heads % a->kv_heads, i / kv_heads);
        if (ready) free(w.memory);
    }
    return failed;
}
