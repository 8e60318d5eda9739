// Attention of a few query rows over a ragged prefix and a dense tail, in one pass over the keys and values.
//
// Keys of one (batch row, key head) pair are its segment of the flat prefix followed by its slots of the tail buffer.
// All pairs' keys, laid end to end, are cut into one equal share per thread (flash-decoding's split along the keys),
// so that two threads are balanced over three heads of unequal length. A thread walks its share in blocks: scores of
// the pair's query rows (all heads of the group and all steps share each load of K and V), online softmax in base 2,
// weighted sum of the values. A pair that two threads share is merged at the end through its log-sum-exp.
//
// Statistics and sums are float32.

#include <stdlib.h>

#include "vectors.h"

// Keys a block (small enough to keep K and V streaming side by side), query rows a tile (sums stay in registers).
enum { BLOCK = 32, TILE = 4 };

// One call; ragged.py packs it field by field (every field has 8 bytes). Strides are in elements.
typedef struct {
    const char *q;                              // (B,Hq,T,D)
    char *out;                                  // (B,Hq,T,D)
    float *lse;                                 // (B,Hq,T) contiguous, or null
    int64_t batch, kv_heads, group, steps, width, dtype, threads;
    int64_t q_b, q_h, q_t, out_b, out_h, out_t;
    const char *k, *v;                          // flat prefix (N,D); null without a prefix, as all up to `window`
    const int64_t *offsets, *rows;              // (prefix rows * Hkv + 1); prefix row of each batch row, or null
    const int32_t *positions;                   // (N), or null; only read when window > 0, as the next
    const int64_t *q_positions;                 // (B,T), or null
    int64_t k_n, v_n, prefix_rows, entries, window;
    const char *tail_k, *tail_v;                // (B,Hkv,capacity,D); null without a tail
    const uint8_t *tail_mask;                   // (B,tail_len), or null
    int64_t tail_len, tail_k_b, tail_k_h, tail_k_s, tail_v_b, tail_v_h, tail_v_s, mask_b;
    double scale, softcap;                      // softcap 0: none
} Call;

// What a thread knows about the pair it is at: query rows, running maxima (base 2), sums (one a lane), weighted values.
typedef struct {
    int64_t rows, padded;                       // query rows (group * steps), width rounded up to whole vectors
    float *q, *scores, *top, *sums, *acc;       // rows x padded, rows x BLOCK, rows, rows x LANES, rows x padded
    uint16_t *q_raw;                            // rows x width in bf16, for the bf16 dot product
    float *k_wide, *v_wide;                     // BLOCK x padded, for widths that aren't whole vectors
} State;

// --------------------------------------------------------------------------------------------------- one block of keys

// sum[r] += q[r] * key, lane by lane; the lanes are added up later, for many keys at once.
TEMPLATE void dot_lanes(vec *sum, const State *s, int64_t first, const char *key, int64_t vectors, const int rows,
                        const int dtype) {
#if defined(__AVX512BF16__)
    if (dtype == BF16 && vectors % 2 == 0) {
        const uint16_t *q = s->q_raw + first * s->padded;
        for (int64_t c = 0; c < vectors / 2; c++) {
            __m512bh x = (__m512bh)_mm512_loadu_si512(key + 64 * c);
            for (int r = 0; r < rows; r++) {
                __m512bh y = (__m512bh)_mm512_loadu_si512(q + r * s->padded + 2 * LANES * c);
                sum[r] = (vec)_mm512_dpbf16_ps((__m512)sum[r], x, y);
            }
        }
        return;
    }
#endif
    const float *q = s->q + first * s->padded;
    for (int64_t c = 0; c < vectors; c++) {
        vec x = load(key + c * LANES * bytes_of(dtype), dtype);
        for (int r = 0; r < rows; r++) sum[r] += x * *(const loose_vec *)(q + r * s->padded + c * LANES);
    }
}

// scores[r][j] = q[r] . k[j] for `rows` query rows (1..TILE) and n keys (1..BLOCK); scores from n on are meaningless.
TEMPLATE void dot_rows(const State *s, int64_t first, const char *k, int64_t stride, int64_t n, int64_t vectors,
                       const int rows, const int dtype) {
    for (int64_t j0 = 0; j0 < n; j0 += LANES) {
        vec quarters[TILE][4] = {{{0}}};
        for (int64_t i = 0; i < 4 && j0 + 4 * i < n; i++) {
            vec sum[4][TILE] = {{{0}}};
            for (int j = 0; j < 4; j++) {
                int64_t at = j0 + 4 * i + j < n ? j0 + 4 * i + j : n - 1;
                dot_lanes(sum[j], s, first, k + at * stride * bytes_of(dtype), vectors, rows, dtype);
            }
            for (int r = 0; r < rows; r++)
                quarters[r][i] = sum_into_quarters(sum[0][r], sum[1][r], sum[2][r], sum[3][r]);
        }
        for (int r = 0; r < rows; r++) *(loose_vec *)(s->scores + (first + r) * BLOCK + j0) = sum_quarters(quarters[r]);
    }
}

// acc[r] += sum_j scores[r][j] v[j] for `rows` query rows and `columns` vectors of the width from vector c0 on.
TEMPLATE void mix_rows(const State *s, int64_t first, const char *v, int64_t stride, int64_t n, int64_t c0,
                       const int columns, const int rows, const int dtype) {
    vec sum[TILE][4];
    float *acc = s->acc + first * s->padded + c0 * LANES;
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) sum[r][c] = *(loose_vec *)(acc + r * s->padded + c * LANES);
    v += c0 * LANES * bytes_of(dtype);
    for (int64_t j = 0; j < n; j++, v += stride * bytes_of(dtype)) {
        vec x[4];
        for (int c = 0; c < columns; c++) x[c] = load(v + c * LANES * bytes_of(dtype), dtype);
        for (int r = 0; r < rows; r++) {
            float weight = s->scores[(first + r) * BLOCK + j];
            for (int c = 0; c < columns; c++) sum[r][c] += weight * x[c];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++) *(loose_vec *)(acc + r * s->padded + c * LANES) = sum[r][c];
}

// Dot products of one row and block -> scores to the base 2: scaled, capped; -inf from n to the end of the vector.
static void scale_row(State *s, int64_t row, int64_t n, float scale, float softcap) {
    const float log2_e = 1.44269504f;
    float *score = s->scores + row * BLOCK;
    if (softcap > 0)
        for (int64_t j = 0; j < n; j++) score[j] = softcap * log2_e * tanhf(score[j] * scale / softcap);
    else
        for (int64_t j = 0; j < n; j += LANES) *(loose_vec *)(score + j) *= scale * log2_e;
    for (int64_t j = n; j % LANES; j++) score[j] = -INFINITY;
}

static void raise_top(State *s, int64_t row, float top) {
    float *acc = s->acc + row * s->padded, shrink = s->top[row] == -INFINITY ? 0.0f : exp2f(s->top[row] - top);
    for (int64_t c = 0; c < s->padded; c += LANES) *(loose_vec *)(acc + c) *= shrink;
    *(loose_vec *)(s->sums + row * LANES) *= shrink;
    s->top[row] = top;
}

// Scores of one row and block -> weights 2^(score - top) with the running maximum; earlier sums are rescaled.
static void soften(State *s, int64_t row, int64_t n) {
    float *score = s->scores + row * BLOCK;
    vec highest = *(loose_vec *)score;
    for (int64_t j = LANES; j < n; j += LANES) highest = larger(*(loose_vec *)(score + j), highest);
    if (any_above(highest, s->top[row])) {
        float top = fold(highest, 1);
        if (top > s->top[row]) raise_top(s, row, top);
    }
    float base = s->top[row] == -INFINITY ? 0.0f : s->top[row];  // nothing seen yet: -inf - 0 gives the weight 0
    vec sum = *(loose_vec *)(s->sums + row * LANES);
    for (int64_t j = 0; j < n; j += LANES) {
        vec weight = power_of_two(*(loose_vec *)(score + j) - base);
        *(loose_vec *)(score + j) = weight;
        sum += weight;
    }
    *(loose_vec *)(s->sums + row * LANES) = sum;
}

TEMPLATE void dot_tile(const State *s, int64_t first, const char *k, int64_t stride, int64_t n, const int rows,
                       const int dtype) {
    if (s->padded == 4 * LANES) dot_rows(s, first, k, stride, n, 4, rows, dtype);
    else dot_rows(s, first, k, stride, n, s->padded / LANES, rows, dtype);
}

TEMPLATE void mix_tile(const State *s, int64_t first, const char *v, int64_t stride, int64_t n, const int rows,
                       const int dtype) {
    int64_t c = 0, vectors = s->padded / LANES;
    for (; c + 4 <= vectors; c += 4) mix_rows(s, first, v, stride, n, c, 4, rows, dtype);
    for (; c < vectors; c++) mix_rows(s, first, v, stride, n, c, 1, rows, dtype);
}

#define EACH_TILE(function, dtype) \
    for (int64_t r = 0; r < s->rows; r += TILE) switch (s->rows - r) { \
        case 1: function(s, r, p, stride, n, 1, dtype); break; \
        case 2: function(s, r, p, stride, n, 2, dtype); break; \
        case 3: function(s, r, p, stride, n, 3, dtype); break; \
        default: function(s, r, p, stride, n, 4, dtype); \
    }
#define EACH_DTYPE(function) \
    if (dtype == F32) EACH_TILE(function, F32) \
    else if (dtype == BF16) EACH_TILE(function, BF16) \
    else EACH_TILE(function, F16)

static void dot(const State *s, const char *p, int64_t stride, int64_t n, int64_t dtype) { EACH_DTYPE(dot_tile) }

static void mix(const State *s, const char *p, int64_t stride, int64_t n, int64_t dtype) { EACH_DTYPE(mix_tile) }

// ------------------------------------------------------------------------------------------------- one pair of heads

static void widen(float *to, const char *from, int64_t stride, int64_t n, const Call *c, int64_t padded) {
    for (int64_t j = 0; j < n; j++)
        load_row(to + j * padded, from + j * stride * bytes_of(c->dtype), c->width, padded, c->dtype);
}

static void begin(const Call *c, State *s, int64_t b, int64_t h) {
    for (int64_t r = 0; r < s->rows; r++) {
        int64_t g = r / c->steps, t = r % c->steps;
        const char *q = c->q + (b * c->q_b + (h * c->group + g) * c->q_h + t * c->q_t) * bytes_of(c->dtype);
        load_row(s->q + r * s->padded, q, c->width, s->padded, c->dtype);
        if (c->dtype == BF16) memcpy(s->q_raw + r * s->padded, q, (size_t)c->width * 2);
        s->top[r] = -INFINITY;
    }
    memset(s->sums, 0, sizeof(float) * (size_t)(s->rows * LANES));
    memset(s->acc, 0, sizeof(float) * (size_t)(s->rows * s->padded));
}

// Scores that a row may not see become -inf: prefix entries outside the window, tail slots masked or in its future.
static void hide(const Call *c, State *s, int64_t b, int64_t from, int64_t n, int tail) {
    for (int64_t r = 0; r < s->rows; r++) {
        float *score = s->scores + r * BLOCK;
        int64_t t = r % c->steps, last = c->tail_len - c->steps + t;
        for (int64_t j = 0; j < n; j++) {
            int hidden = tail ? from + j > last || (c->tail_mask && !c->tail_mask[b * c->mask_b + from + j])
                              : c->q_positions[b * c->steps + t] - c->positions[from + j] >= c->window;
            if (hidden) score[j] = -INFINITY;
        }
    }
}

static void read_keys(const Call *c, State *s, int64_t b, const char *k, int64_t k_stride, const char *v,
                      int64_t v_stride, int64_t from, int64_t n, int tail) {
    int hides = tail ? c->tail_mask || c->steps > 1 : c->window > 0;
    int64_t dtype = c->width % LANES ? F32 : c->dtype;
    k += from * k_stride * bytes_of(c->dtype);
    v += from * v_stride * bytes_of(c->dtype);
    for (int64_t done = 0; done < n; done += BLOCK) {
        int64_t now = n - done < BLOCK ? n - done : BLOCK;
        const char *kb = k + done * k_stride * bytes_of(c->dtype), *vb = v + done * v_stride * bytes_of(c->dtype);
        int64_t ks = k_stride, vs = v_stride;
        if (c->width % LANES) {
            widen(s->k_wide, kb, ks, now, c, s->padded);
            widen(s->v_wide, vb, vs, now, c, s->padded);
            kb = (char *)s->k_wide, vb = (char *)s->v_wide, ks = vs = s->padded;
        }
        dot(s, kb, ks, now, dtype);
        for (int64_t r = 0; r < s->rows; r++) scale_row(s, r, now, (float)c->scale, (float)c->softcap);
        if (hides) hide(c, s, b, from + done, now, tail);
        for (int64_t r = 0; r < s->rows; r++) soften(s, r, now);
        mix(s, vb, vs, now, dtype);
    }
}

static void finish(const Call *c, const State *s, int64_t b, int64_t h) {
    for (int64_t r = 0; r < s->rows; r++) {
        int64_t g = r / c->steps, t = r % c->steps, head = h * c->group + g;
        float sum = fold(*(loose_vec *)(s->sums + r * LANES), 0), share = sum == 0 ? 0.0f : 1.0f / sum;
        char *out = c->out + (b * c->out_b + head * c->out_h + t * c->out_t) * bytes_of(c->dtype);
        store_row(out, s->acc + r * s->padded, share, c->width, c->dtype);
        if (c->lse)
            c->lse[(b * c->kv_heads * c->group + head) * c->steps + t] =
                sum == 0 ? -INFINITY : (s->top[r] + log2f(sum)) * 0.693147181f;
    }
}

static int64_t segment(const Call *c, int64_t b, int64_t h) {
    return (c->rows ? c->rows[b] : b) * c->kv_heads + h;
}

static int64_t prefix_length(const Call *c, int64_t b, int64_t h) {
    if (!c->offsets) return 0;
    int64_t at = segment(c, b, h);
    return c->offsets[at + 1] - c->offsets[at];
}

static void read_pair(const Call *c, State *s, int64_t b, int64_t h, int64_t from, int64_t to) {
    int64_t prefix = prefix_length(c, b, h), size = bytes_of(c->dtype);
    begin(c, s, b, h);
    if (from < prefix) {
        int64_t start = c->offsets[segment(c, b, h)], stop = to < prefix ? to : prefix;
        read_keys(c, s, b, c->k, c->k_n, c->v, c->v_n, start + from, stop - from, 0);
    }
    if (to > prefix) {
        int64_t start = from > prefix ? from - prefix : 0;
        read_keys(c, s, b, c->tail_k + (b * c->tail_k_b + h * c->tail_k_h) * size, c->tail_k_s,
                  c->tail_v + (b * c->tail_v_b + h * c->tail_v_h) * size, c->tail_v_s, start, to - prefix - start, 1);
    }
}

// --------------------------------------------------------------------------------------------------- shares of threads

// Part of a pair that one thread has read: pair, then top, sum and acc of every row. -1: unused.
typedef struct { int64_t pair; float *values; } Part;

static size_t state_floats(int64_t rows, int64_t padded) {
    return (size_t)(rows * (3 * padded + BLOCK + 2 * LANES) + 2 * BLOCK * padded);
}

static void lay_out(State *s, float *memory, int64_t rows, int64_t padded) {
    s->rows = rows, s->padded = padded;
    s->q = memory;
    s->acc = s->q + rows * padded;
    s->scores = s->acc + rows * padded;
    s->k_wide = s->scores + rows * BLOCK;
    s->v_wide = s->k_wide + BLOCK * padded;
    s->q_raw = (uint16_t *)(s->v_wide + BLOCK * padded);
    s->top = s->v_wide + BLOCK * padded + rows * padded;
    s->sums = s->top + rows * LANES;
}

static void read_share(const Call *c, State *s, Part *parts, int64_t lo, int64_t hi) {
    int64_t start = 0;
    for (int64_t pair = 0; pair < c->batch * c->kv_heads && start < hi; pair++) {
        int64_t b = pair / c->kv_heads, h = pair % c->kv_heads, length = prefix_length(c, b, h) + c->tail_len;
        int64_t from = lo > start ? lo - start : 0, to = hi - start < length ? hi - start : length;
        start += length;
        if (from >= to) continue;
        read_pair(c, s, b, h, from, to);
        if (to - from == length) {
            finish(c, s, b, h);
            continue;
        }
        Part *part = parts + (from == 0);  // a share begins inside at most one pair and ends inside at most one
        part->pair = pair;
        memcpy(part->values, s->top, sizeof(float) * (size_t)s->rows);
        memcpy(part->values + s->rows, s->sums, sizeof(float) * (size_t)(s->rows * LANES));
        memcpy(part->values + s->rows * (1 + LANES), s->acc, sizeof(float) * (size_t)(s->rows * s->padded));
    }
}

static void add_scaled(float *to, float keep, const float *from, float take, int64_t n) {
    for (int64_t i = 0; i < n; i++) to[i] = to[i] * keep + from[i] * take;
}

static void add_part(State *s, const float *values) {
    const float *sums = values + s->rows, *acc = sums + s->rows * LANES;
    for (int64_t r = 0; r < s->rows; r++) {
        float there = values[r], here = s->top[r], top = there > here ? there : here;
        float keep = here == -INFINITY ? 0.0f : exp2f(here - top), take = exp2f(there - top);
        if (there == -INFINITY) keep = 1.0f, take = 0.0f;
        add_scaled(s->sums + r * LANES, keep, sums + r * LANES, take, LANES);
        add_scaled(s->acc + r * s->padded, keep, acc + r * s->padded, take, s->padded);
        s->top[r] = top;
    }
}

static void merge_parts(const Call *c, State *s, const Part *parts, int64_t count) {
    int64_t open = -1;
    for (int64_t i = 0; i <= count; i++) {
        if (i < count && parts[i].pair < 0) continue;
        if (open >= 0 && (i == count || parts[i].pair != open)) finish(c, s, open / c->kv_heads, open % c->kv_heads);
        if (i == count) break;
        if (parts[i].pair != open) begin(c, s, 0, 0);
        open = parts[i].pair;
        add_part(s, parts[i].values);
    }
}

// The number of keys to read, or -1 when a segment or row pointer leads outside the prefix.
static int64_t count_keys(const Call *c) {
    int64_t total = 0;
    for (int64_t b = 0; b < c->batch; b++) {
        int64_t row = c->rows ? c->rows[b] : b;
        if (c->offsets && (row < 0 || row >= c->prefix_rows)) return -1;
        for (int64_t h = 0; h < c->kv_heads; h++) {
            if (c->offsets) {
                const int64_t *at = c->offsets + row * c->kv_heads + h;
                if (at[0] < 0 || at[1] < at[0] || at[1] > c->entries) return -1;
            }
            total += prefix_length(c, b, h) + c->tail_len;
        }
    }
    return total;
}

// 0: done. 1: offsets or row pointers lead outside the prefix. 2: no memory.
int longspan_ragged_attend(const Call *c) {
    int64_t rows = c->group * c->steps, padded = (c->width + LANES - 1) / LANES * LANES, total = count_keys(c);
    if (total < 0) return 1;
    // Waking a team costs some microseconds: a share must be worth that. The team is always torch's whole team.
    int64_t threads = total * c->width * rows < 1 << 17 ? 1 : c->threads;
    size_t state = state_floats(rows, padded), part = (size_t)(rows * (padded + 2 * LANES));
    float *memory = aligned_alloc(64, sizeof(float) * (size_t)threads * (state + 2 * part));
    Part *parts = malloc(sizeof(Part) * 2 * (size_t)threads);
    if (!memory || !parts) {
        free(memory), free(parts);
        return 2;
    }
    for (int64_t i = 0; i < 2 * threads; i++)
        parts[i] = (Part){-1, memory + (size_t)threads * state + (size_t)i * part};
    State first;
    lay_out(&first, memory, rows, padded);
    for (int64_t pair = 0; pair < c->batch * c->kv_heads; pair++) {
        int64_t b = pair / c->kv_heads, h = pair % c->kv_heads;
        if (prefix_length(c, b, h) + c->tail_len == 0) begin(c, &first, b, h), finish(c, &first, b, h);
    }
    if (threads == 1) {
        read_share(c, &first, parts, 0, total);
    } else {
#pragma omp parallel for schedule(static, 1) num_threads((int)threads)
        for (int64_t t = 0; t < threads; t++) {
            State own;
            lay_out(&own, memory + (size_t)t * state, rows, padded);
            read_share(c, &own, parts + 2 * t, total * t / threads, total * (t + 1) / threads);
        }
        merge_parts(c, &first, parts, 2 * threads);
    }
    free(memory), free(parts);
    return 0;
}
