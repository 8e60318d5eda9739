// The low-bit estimate of attention scores: 4-bit codes of queries and keys, and which blocks hold a score above its row's limit.
//
// Query rows lie along the vector lanes, sixteen to a vector, and a word is four neighbouring codes of a row. With q + 8 as
// unsigned bytes one instruction adds four products per lane; the surplus of 8 times a key's sum is taken off beforehand.
// A block is left as soon as one of its scores is above the limit.

#include <stdlib.h>

#include "vectors.h"

enum { ROWS = 64, KEYS = 4, VECTORS = ROWS / LANES };
#if defined(__AVX512F__)
enum { NV = 4 };                                // vectors of rows at once: NV * KEYS sums must fit the registers
#else
enum { NV = 1 };
#endif
#define MOST_CODE 7.0f

typedef signed char byte;

TEMPLATE ivec dot4(ivec sum, ivec q, ivec k) {  // four unsigned bytes times four signed ones, in every lane
#if defined(__AVX512VNNI__)
    return (ivec)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)q, (__m512i)k);
#elif defined(__AVX512BW__)
    __m512i pairs = _mm512_maddubs_epi16((__m512i)q, (__m512i)k);
    return sum + (ivec)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
#elif defined(__AVX2__)
    __m256i half[2], a[2], b[2];
    memcpy(half, &sum, 64), memcpy(a, &q, 64), memcpy(b, &k, 64);
    for (int i = 0; i < 2; i++) {
        __m256i pairs = _mm256_maddubs_epi16(a[i], b[i]);
        half[i] = _mm256_add_epi32(half[i], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    memcpy(&sum, half, 64);
    return sum;
#else
    for (int i = 0; i < 32; i += 8) sum += (ivec)((uvec)q >> i & 255) * ((ivec)((uvec)k << (24 - i)) >> 24);
    return sum;
#endif
}

TEMPLATE vec round_even(vec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    for (int i = 0; i < LANES; i++) x[i] = __builtin_rintf(x[i]);
    return x;
#endif
}

TEMPLATE vec to_float(ivec x) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps((__m512i)x);
#else
    return __builtin_convertvector(x, vec);
#endif
}

TEMPLATE ivec larger_int(ivec a, ivec b) {
#if defined(__AVX512F__)
    return (ivec)_mm512_max_epi32((__m512i)a, (__m512i)b);
#else
    ivec first = a > b;
    return (a & first) | (b & ~first);
#endif
}

TEMPLATE int any_exceeds(vec x, vec limit) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)x, (__m512)limit, _CMP_GT_OQ) != 0;
#else
    ivec above = x > limit;
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= above[i];
    return any;
#endif
}

// ---------------------------------------------------------------------------------------------------------- important blocks

typedef struct {                                // every field has 8 bytes; all arrays are dense
    const byte *q, *k;                          // codes (B,Hq,T,D), (B,Hkv,S,D); D a multiple of 4
    const float *k_scale;                       // (B,Hkv,S)
    const float *bias;                          // (B,Hq,S), over the key's scale if `rounded`
    const float *q_inverse, *limit;             // (B,Hq,T): 1 / scale, and the limit in units of the scale
    const int64_t *begin, *end;                 // (B,NQ): the key blocks asked about; all of their keys exist
    uint8_t *out;                               // (B,Hq,NQ,NK), zeros
    int64_t batch, q_heads, kv_heads, q_len, k_len, dim, q_block, k_block, rounded, threads;
} Job;

typedef struct {
    ivec *q;                                    // [word][VECTORS]
    float inverse[ROWS], limit[ROWS];
    const int32_t *order;                       // keys of a block in the order they are read: those of one scale together
} Work;

TEMPLATE int32_t word_of(const byte *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return word;
}

// Whether one of 64 rows scores above its limit with a key of the block at `k`.
TEMPLATE int block_exceeds(const Job *a, const Work *w, const byte *k, const int32_t *surplus, const float *scale,
                           const float *bias, const int rounded) {
    for (int64_t t = 0; t < a->k_block; t += KEYS) {
        const int32_t *j = w->order + t;
        float most_bias = bias[j[0]];
        for (int r = 1; r < KEYS; r++) most_bias = bias[j[r]] > most_bias ? bias[j[r]] : most_bias;
        for (int first = 0; first < VECTORS; first += NV) {
            ivec sum[KEYS][NV];
#pragma GCC unroll 4
            for (int r = 0; r < KEYS; r++)
#pragma GCC unroll 4
                for (int n = 0; n < NV; n++) sum[r][n] = (ivec){0} - surplus[j[r]];
            for (int64_t word = 0; word < a->dim / 4; word++) {
                ivec key[KEYS];
#pragma GCC unroll 4
                for (int r = 0; r < KEYS; r++) key[r] = (ivec){0} + word_of(k + j[r] * a->dim + 4 * word);
#pragma GCC unroll 4
                for (int n = 0; n < NV; n++) {
                    const ivec q = w->q[word * VECTORS + first + n];
#pragma GCC unroll 4
                    for (int r = 0; r < KEYS; r++) sum[r][n] = dot4(sum[r][n], q, key[r]);
                }
            }
#pragma GCC unroll 4
            for (int n = 0; n < NV; n++) {
                const vec inverse = load((const char *)(w->inverse + (first + n) * LANES), F32);
                const vec limit = load((const char *)(w->limit + (first + n) * LANES), F32);
                vec best = (vec){0} - INFINITY;
                if (rounded) {                  // keys of one scale: the best product with the best bias is no less than the best
                    const ivec product = larger_int(larger_int(sum[0][n], sum[1][n]), larger_int(sum[2][n], sum[3][n]));
                    if (!any_exceeds((to_float(product) + round_even(inverse * most_bias)) * scale[j[0]], limit)) continue;
                }
#pragma GCC unroll 4
                for (int r = 0; r < KEYS; r++) {
                    const vec product = to_float(sum[r][n]), shift = inverse * bias[j[r]];
                    best = larger(rounded ? product + round_even(shift) : product * scale[j[r]] + shift, best);
                }
                if (any_exceeds(rounded ? best * scale[j[0]] : best, limit)) return 1;
            }
        }
    }
    return 0;
}

// Rows that don't exist get a limit that nothing is above. Returns the least limit.
static float load_rows(const Job *a, Work *w, int64_t at, int64_t n) {
    uint32_t *to = (uint32_t *)w->q;
    float least = INFINITY;
    for (int64_t r = 0; r < ROWS; r++) {
        for (int64_t word = 0; word < a->dim / 4; word++)
            to[word * ROWS + r] = r < n ? (uint32_t)word_of(a->q + (at + r) * a->dim + 4 * word) : 0;
        w->inverse[r] = r < n ? a->q_inverse[at + r] : 1;
        w->limit[r] = r < n ? a->limit[at + r] : INFINITY;
        least = w->limit[r] < least ? w->limit[r] : least;
    }
    byte *bytes = (byte *)w->q;
    for (int64_t i = 0; i < ROWS * a->dim; i++) bytes[i] += 8;
    return least;
}

static void query_block(const Job *a, Work *w, const int32_t *surplus, int64_t b, int64_t h, int64_t u) {
    const int64_t n_q = (a->q_len + a->q_block - 1) / a->q_block, n_k = (a->k_len + a->k_block - 1) / a->k_block;
    const int64_t head = b * a->q_heads + h, source = b * a->kv_heads + h / (a->q_heads / a->kv_heads);
    const int64_t stop = (u + 1) * a->q_block < a->q_len ? (u + 1) * a->q_block : a->q_len;
    uint8_t *out = a->out + (head * n_q + u) * n_k;
    for (int64_t row = u * a->q_block; row < stop; row += ROWS) {
        const float least = load_rows(a, w, head * a->q_len + row, stop - row < ROWS ? stop - row : ROWS);
        if (least == INFINITY) continue;
        for (int64_t v = a->begin[b * n_q + u]; v < a->end[b * n_q + u]; v++) {
            const int64_t j = v * a->k_block, key = source * a->k_len + j;
            const float *bias = a->bias + head * a->k_len + j;
            if (out[v]) continue;
            if (a->rounded)
                out[v] = (uint8_t)block_exceeds(a, w, a->k + key * a->dim, surplus + key, a->k_scale + key, bias, 1);
            else
                out[v] = (uint8_t)block_exceeds(a, w, a->k + key * a->dim, surplus + key, a->k_scale + key, bias, 0);
        }
    }
}

// Keys of one scale one after the other: j, j + 1, j + 8, j + 9, ... for j = 0, 2, 4, 6.
static void set_order(int32_t *order, int64_t k_block, int64_t rounded) {
    int64_t n = 0;
    for (int32_t group = 0; group < 4; group++)
        for (int32_t j = 0; j < k_block; j++)
            if (rounded ? j % 8 / 2 == group : j * 4 / k_block == group) order[n++] = j;
}

// Fills out. Returns 0, or 1 when memory ran out.
int64_t low_bit_blocks(const Job *a) {
    const int64_t n_q = (a->q_len + a->q_block - 1) / a->q_block, heads = a->batch * a->q_heads;
    const int64_t keys = a->batch * a->kv_heads * a->k_len;
    int32_t *surplus = malloc((size_t)(keys + a->k_block) * 4), *order = surplus + keys;
    int failed = !surplus;
    if (failed) return 1;
    set_order(order, a->k_block, a->rounded);
#pragma omp parallel num_threads(a->threads) reduction(| : failed)
    {
        Work w = {.order = order, .q = aligned_alloc(64, (size_t)(ROWS * a->dim))};
        failed |= !w.q;
#pragma omp for schedule(static)
        for (int64_t j = 0; j < keys; j++) {
            int32_t total = 0;
            for (int64_t d = 0; d < a->dim; d++) total += a->k[j * a->dim + d];
            surplus[j] = 8 * total;
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < n_q * heads; i++)  // late query blocks first: they have the most keys
            if (w.q) query_block(a, &w, surplus, i % heads / a->q_heads, i % heads % a->q_heads, n_q - 1 - i / heads);
        free(w.q);
    }
    free(surplus);
    return failed;
}

// ------------------------------------------------------------------------------------------------------------------- codes

typedef struct {                                // every field has 8 bytes
    const char *x;                              // (B,H,L,D) with strides in elements; D a multiple of 16
    const float *mean, *weigh;                  // (B,H,D); (B,H,G,D)
    const uint8_t *valid;                       // (B,L) or null
    byte *codes;                                // (B,H,L,D)
    float *scales, *dots;                       // (B,H,L), (B,H,G,L)
    int64_t batch, heads, length, dim, x_batch, x_head, x_row, dtype;
    int64_t tile, shared, weights, threads;     // rows of a tile; how rows share scales; G
} Codes;

enum { ROW_ALONE, QUERIES, KEY_ROWS };          // the values of `shared`

TEMPLATE int64_t scale_of(int64_t shared, int64_t row) {
    return shared == QUERIES ? row % 8 : shared == KEY_ROWS ? row % 8 / 2 : row;
}

static void code_tile(const Codes *a, float *rows, float *most, int64_t b, int64_t h, int64_t first) {
    const int64_t n = a->length - first < a->tile ? a->length - first : a->tile, head = b * a->heads + h;
    const float *mean = a->mean + head * a->dim, *weigh = a->weigh + head * a->weights * a->dim;
    const int dtype = (int)a->dtype;
    for (int64_t r = 0; r < a->tile; r++) most[r] = 0;
    for (int64_t r = 0; r < n; r++) {
        const char *x = a->x + (b * a->x_batch + h * a->x_head + (first + r) * a->x_row) * bytes_of(dtype);
        const int there = !a->valid || a->valid[b * a->length + first + r];
        float *row = rows + r * a->dim;
        vec top = {0};
        for (int64_t d = 0; d < a->dim; d += LANES) {
            vec value = dtype == F32 ? load(x + 4 * d, F32) : dtype == BF16 ? load(x + 2 * d, BF16) : load(x + 2 * d, F16);
            value = there ? value - load((const char *)(mean + d), F32) : (vec){0};
            store((char *)(row + d), value, F32);
            top = larger((vec)((ivec)value & 0x7fffffff), top);
        }
        const float size = fold(top, 1);
        float *own = most + scale_of(a->shared, r);
        *own = size > *own ? size : *own;
        for (int64_t g = 0; g < a->weights; g++) {
            vec sum = {0};
            for (int64_t d = 0; d < a->dim; d += LANES)
                sum += load((const char *)(row + d), F32) * load((const char *)(weigh + g * a->dim + d), F32);
            a->dots[(head * a->weights + g) * a->length + first + r] = fold(sum, 0);
        }
    }
    for (int64_t r = 0; r < n; r++) {
        const float top = most[scale_of(a->shared, r)], scale = top < MOST_CODE * 0x1p-126f ? 1 : top / MOST_CODE;
        byte *to = a->codes + (head * a->length + first + r) * a->dim;
        a->scales[head * a->length + first + r] = scale;
        for (int64_t d = 0; d < a->dim; d += LANES) {
            const vec x = round_even(load((const char *)(rows + r * a->dim + d), F32) / scale);
#if defined(__AVX512F__)
            _mm_storeu_si128((__m128i *)(to + d), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32((__m512)x)));
#else
            for (int i = 0; i < LANES; i++) to[d + i] = (byte)x[i];
#endif
        }
    }
}

// Fills codes, scales and dots. Returns 0, or 1 when memory ran out.
int64_t low_bit_codes(const Codes *a) {
    const int64_t tiles = (a->length + a->tile - 1) / a->tile, heads = a->batch * a->heads;
    int failed = 0;
#pragma omp parallel num_threads(a->threads) reduction(| : failed)
    {
        float *rows = aligned_alloc(64, (size_t)(a->tile * (a->dim + LANES)) * 4);
        failed |= !rows;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tiles * heads; i++) {
            const int64_t head = i / tiles;
            if (rows) code_tile(a, rows, rows + a->tile * a->dim, head / a->heads, head % a->heads, i % tiles * a->tile);
        }
        free(rows);
    }
    return failed;
}
