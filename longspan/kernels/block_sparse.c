/* Block-sparse attention over a read plan, for the CPU.
 *
 * One work item is up to ROWS query rows of one query block, head and batch row. The item lists the key positions it
 * reads (listed blocks and single columns, without padding), then walks them in tiles of KEYS keys as flash attention
 * does: logits, running maximum, exponentials, weighted values.
 *
 * Everything is computed transposed, with query rows along the vector lanes:
 *     S^T[key][row] = K[key][:] . Q^T[:][row]         O^T[d][row] += V^T[d][key] . P^T[key][row]
 * so maxima, sums and rescaling never cross lanes, keys need no transposition, and the same small product serves both.
 * A "word" is 32 bits: one float, or two neighbouring bfloat16 numbers of the summed index (AVX512-BF16 adds pairs).
 * Without AVX512-BF16, bfloat16 input is widened to float while it is copied into the tiles.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define NV 2 /* vectors of rows in one product; its NV * MR sums must fit the register file */
#define MR 8
#elif defined(__AVX2__)
#define LANES 8
#define NV 2
#define MR 4
#else
#define LANES 4
#define NV 4
#define MR 4
#endif
#if defined(__AVX512BF16__) && defined(__AVX512BW__)
#define PAIRS 1
#else
#define PAIRS 0
#endif
#define KEYS 64
#define STRIP (NV * LANES)
#define ROWS 128
#define LAZY 8.0f      /* rescale only when a maximum grows by more than 2^LAZY: sums stay far from overflow */
#define NOTHING -1e30f /* running maximum before any key was seen */

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const void *q, *k, *v; /* v NULL: only lse is wanted */
    void *out;
    float *lse; /* (B,Hq,T) */
    const int64_t *offsets;
    const int32_t *blocks;
    const int64_t *column_offsets; /* (plan_batch, plan_heads, column_groups + 1) or NULL */
    const int32_t *columns;
    const uint8_t *valid; /* (B,S) or NULL */
    int64_t batch, q_heads, kv_heads, q_len, k_len, dim;
    int64_t plan_batch, plan_heads, q_block, k_block, column_groups, first_limit;
    int64_t q_stride[3], k_stride[3], v_stride[3], out_stride[3]; /* batch, head, row; elements */
    int64_t bf16, threads;
    double scale;
} Job;

typedef struct { /* what one thread holds */
    uint32_t *q, *k, *v;
    float *s, *o, *l, *m;
    int32_t *keys;
    uint8_t *listed;
    void *memory;
} Work;

INLINE vec splat(float x) { return (vec){} + x; }
INLINE vec load(const void *p) { vec x; memcpy(&x, p, sizeof x); return x; }
INLINE void store(void *p, vec x) { memcpy(p, &x, sizeof x); }
INLINE vec pick(ivec mask, vec yes, vec no) { return (vec)(((ivec)yes & mask) | ((ivec)no & ~mask)); }

INLINE vec larger(vec a, vec b) { /* b where either is not a number, so that such input shows in the output */
#if defined(__AVX512F__)
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return pick(a > b, a, b);
#endif
}

INLINE int any_larger(vec a, vec b) {
#if defined(__AVX512F__)
    return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_GT_OQ) != 0;
#else
    ivec mask = a > b;
    int any = 0;
    for (int i = 0; i < LANES; i++) any |= mask[i];
    return any != 0;
#endif
}

/* 2^x for x <= LAZY, about 1e-7 relative; x below -125 gives (almost) nothing. */
INLINE vec exp2_lanes(vec x) {
    const vec magic = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to a whole number in the low bits */
    x = larger(splat(-125.0f), x); /* in this order NaN stays NaN */
    vec whole = x + magic;
    vec f = x - (whole - magic);
    vec p = splat(1.32764996e-3f); /* least relative error of degree 5 on [-1/2, 1/2] */
    p = p * f + splat(9.67554189e-3f);
    p = p * f + splat(5.55071354e-2f);
    p = p * f + splat(2.40221202e-1f);
    p = p * f + splat(6.93146970e-1f);
    p = p * f + splat(1.00000007f);
    return (vec)((ivec)p + ((ivec)whole << 23));
}

INLINE float widen(uint16_t x) { uint32_t w = (uint32_t)x << 16; float f; memcpy(&f, &w, 4); return f; }

INLINE uint16_t narrow(float f) { /* to bfloat16, nearest even */
    uint32_t w;
    memcpy(&w, &f, 4);
    if ((w & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((w >> 16) | 0x40);
    return (uint16_t)((w + 0x7fffu + ((w >> 16) & 1)) >> 16);
}

/* c[r][n] (+)= sum_k a[r * am + k * ak] * b[k][n] for MR values r and STRIP lanes n. */
INLINE void product(const int pairs, const uint32_t *a, long am, long ak, const uint32_t *b, long ldb, float *c,
                    long ldc, long depth, const int add) {
    vec acc[MR][NV];
    (void)pairs;
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
        for (int n = 0; n < NV; n++) acc[r][n] = add ? load(c + r * ldc + n * LANES) : (vec){};
    for (long k = 0; k < depth; k++, a += ak, b += ldb) {
        vec bv[NV];
#pragma GCC unroll 16
        for (int n = 0; n < NV; n++) {
            bv[n] = load(b + n * LANES);
#if defined(__AVX512F__)
            __asm__("" : "+v"(bv[n])); /* stay in a register: loads for each r would cost as much as the sums */
#endif
        }
#pragma GCC unroll 16
        for (int r = 0; r < MR; r++) {
            float one;
            memcpy(&one, a + r * am, 4);
            const vec av = splat(one);
#pragma GCC unroll 16
            for (int n = 0; n < NV; n++) {
#if PAIRS
                if (pairs) {
                    acc[r][n] = (vec)_mm512_dpbf16_ps((__m512)acc[r][n], (__m512bh)av, (__m512bh)bv[n]);
                    continue;
                }
#endif
                acc[r][n] += av * bv[n];
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < MR; r++)
#pragma GCC unroll 16
        for (int n = 0; n < NV; n++) store(c + r * ldc + n * LANES, acc[r][n]);
}

/* Turns the logits s[key][row] of one strip into weights, in place (pairs: two keys to a word), and brings the running
 * maximum m (in powers of two), the sum l and the weighted values o up to date. `keys` is given only where needed. */
INLINE void softmax(const int pairs, float *s, long n_keys, const int32_t *keys, int32_t first_limit, float scale,
                    float *m, float *l, float *o, long dim) {
    (void)pairs;
    for (int n = 0; n < STRIP; n += LANES) {
        vec best = splat(NOTHING), top = load(m + n), sum = load(l + n);
        const vec scales = splat(scale);
        if (keys) {
            ivec limit;
            for (int i = 0; i < LANES; i++) limit[i] = first_limit + n + i;
            for (long j = 0; j < n_keys; j++) {
                const vec x = pick(((ivec){} + keys[j]) <= limit, load(s + j * STRIP + n), splat(-INFINITY));
                store(s + j * STRIP + n, x);
                best = larger(best, x);
            }
        } else {
            for (long j = 0; j < n_keys; j++) best = larger(best, load(s + j * STRIP + n));
        }
        best *= scales;
        if (any_larger(best, top + splat(LAZY))) {
            const vec new_top = larger(best, top), fade = exp2_lanes(top - new_top);
            sum *= fade;
            for (long d = 0; d < dim; d++) store(o + d * STRIP + n, load(o + d * STRIP + n) * fade);
            top = new_top;
            store(m + n, top);
        }
        for (long j = 0; j < n_keys; j += 2) {
            const vec p0 = exp2_lanes(load(s + j * STRIP + n) * scales - top);
            const vec p1 = exp2_lanes(load(s + (j + 1) * STRIP + n) * scales - top);
            sum += p0 + p1;
#if PAIRS
            if (pairs) {
                const __m512i up = _mm512_set1_epi32(0x8000), high = _mm512_set1_epi32((int)0xffff0000u);
                const __m512i low = _mm512_srli_epi32(_mm512_add_epi32((__m512i)p0, up), 16);
                const __m512i both = _mm512_or_si512(low, _mm512_and_si512(_mm512_add_epi32((__m512i)p1, up), high));
                store(s + j / 2 * STRIP + n, (vec)both);
                continue;
            }
#endif
            store(s + j * STRIP + n, p0);
            store(s + (j + 1) * STRIP + n, p1);
        }
        store(l + n, sum);
    }
}

/* The key positions an item reads, single columns first; returns how many. */
static long list_keys(const Job *job, const Work *w, long b, long h, long u, int32_t last_limit) {
    const long n_q = (job->q_len + job->q_block - 1) / job->q_block;
    const long row = (job->plan_batch == 1 ? 0 : b) * job->plan_heads + h / (job->q_heads / job->plan_heads);
    const int64_t *at = job->offsets + row * (n_q + 1) + u;
    const uint8_t *valid = job->valid ? job->valid + b * job->k_len : NULL;
    const long stop = last_limit + 1 < job->k_len ? last_limit + 1 : job->k_len;
    long n = 0;
    if (job->column_offsets) { /* a column inside a listed block is read once */
        const int64_t *c = job->column_offsets + row * (job->column_groups + 1) + (job->column_groups == 1 ? 0 : u);
        for (int64_t i = at[0]; i < at[1]; i++) w->listed[job->blocks[i]] = 1;
        for (int64_t i = c[0]; i < c[1] && job->columns[i] < stop; i++) {
            const int32_t j = job->columns[i];
            if (!w->listed[j / job->k_block] && (!valid || valid[j])) w->keys[n++] = j;
        }
        for (int64_t i = at[0]; i < at[1]; i++) w->listed[job->blocks[i]] = 0;
    }
    for (int64_t i = at[0]; i < at[1]; i++) {
        const long begin = job->blocks[i] * job->k_block;
        const long end = begin + job->k_block < stop ? begin + job->k_block : stop;
        for (long j = begin; j < end; j++)
            if (!valid || valid[j]) w->keys[n++] = (int32_t)j;
    }
    return n;
}

INLINE void gather_keys(const Job *job, const int pairs, const Work *w, const int32_t *keys, long n_keys, long at,
                        long k_words) {
    for (long j = 0; j < n_keys; j++) {
        uint32_t *k = w->k + j * k_words;
        const long from = at + keys[j] * job->k_stride[2];
        if (pairs) k[k_words - 1] = 0;
        if (keys[j] == INT32_MAX) memset(k, 0, k_words * 4);
        else if (!job->bf16) memcpy(k, (const float *)job->k + from, job->dim * 4);
        else if (pairs) memcpy(k, (const uint16_t *)job->k + from, job->dim * 2);
        else for (long d = 0; d < job->dim; d++) k[d] = (uint32_t)((const uint16_t *)job->k)[from + d] << 16;
    }
}

/* Copies the rows `keys` of k and v into the tile; absent ones (INT32_MAX) become zeros. */
INLINE void gather(const Job *job, const int pairs, const Work *w, const int32_t *keys, long n_keys, long b, long h,
                   long k_words, long dim) {
    const long at_k = b * job->k_stride[0] + h * job->k_stride[1], at_v = b * job->v_stride[0] + h * job->v_stride[1];
    if (!job->v) {
        gather_keys(job, pairs, w, keys, n_keys, at_k, k_words);
        return;
    }
    for (long j = 0; j < n_keys; j++) {
        uint32_t *k = w->k + j * k_words, *v = w->v + (pairs ? j / 2 : j) * dim;
        if (keys[j] == INT32_MAX) {
            memset(k, 0, k_words * 4);
            if (!pairs) memset(v, 0, dim * 4);
            else for (long d = 0; d < dim; d++) v[d] = j % 2 ? v[d] & 0xffffu : 0;
            continue;
        }
        const long from_k = at_k + keys[j] * job->k_stride[2], from_v = at_v + keys[j] * job->v_stride[2];
        if (!job->bf16) {
            memcpy(k, (const float *)job->k + from_k, job->dim * 4);
            memcpy(v, (const float *)job->v + from_v, job->dim * 4);
            continue;
        }
        const uint16_t *k16 = (const uint16_t *)job->k + from_k, *v16 = (const uint16_t *)job->v + from_v;
        if (!pairs) {
            for (long d = 0; d < job->dim; d++) {
                k[d] = (uint32_t)k16[d] << 16;
                v[d] = (uint32_t)v16[d] << 16;
            }
        } else {
            k[k_words - 1] = 0;
            memcpy(k, k16, job->dim * 2);
            if (j % 2) for (long d = 0; d < job->dim; d++) v[d] |= (uint32_t)v16[d] << 16;
            else for (long d = 0; d < job->dim; d++) v[d] = v16[d];
        }
    }
}

INLINE void load_queries(const Job *job, const int pairs, const Work *w, long b, long h, long first, long n_rows,
                         long k_words, long n_strips) {
    memset(w->q, 0, n_strips * k_words * STRIP * 4);
    for (long r = 0; r < n_rows; r++) {
        uint32_t *to = w->q + r / STRIP * k_words * STRIP + r % STRIP;
        const long from = b * job->q_stride[0] + h * job->q_stride[1] + (first + r) * job->q_stride[2];
        const uint16_t *q16 = (const uint16_t *)job->q + from;
        const uint32_t *q32 = (const uint32_t *)job->q + from;
        for (long d = 0; d < job->dim; d++) {
            if (pairs) to[d / 2 * STRIP] |= (uint32_t)q16[d] << (16 * (d % 2));
            else to[d * STRIP] = job->bf16 ? (uint32_t)q16[d] << 16 : q32[d];
        }
    }
}

/* Writes rows of the output; rows that read nothing, and those of padding, become 0 with log-sum-exp -inf. */
static void finish(const Job *job, const Work *w, long b, long h, long first, long n_rows, long dim) {
    const uint8_t *own = job->valid ? job->valid + (b + 1) * job->k_len - job->q_len + first : NULL;
    for (long r = 0; r < n_rows; r++) {
        const float *o = w->o + r / STRIP * dim * STRIP + r % STRIP;
        const int empty = (own && !own[r]) || (w->m[r] <= NOTHING && !isnan(w->l[r]));
        const float inverse = empty ? 0.0f : 1.0f / w->l[r];
        const long to = b * job->out_stride[0] + h * job->out_stride[1] + (first + r) * job->out_stride[2];
        for (long d = 0; d < (job->v ? job->dim : 0); d++) {
            const float x = empty ? 0.0f : o[d * STRIP] * inverse;
            if (job->bf16) ((uint16_t *)job->out)[to + d] = narrow(x);
            else ((float *)job->out)[to + d] = x;
        }
        job->lse[(b * job->q_heads + h) * job->q_len + first + r] =
            empty ? -INFINITY : 0.69314718f * (w->m[r] + log2f(w->l[r]));
    }
}

INLINE void item(const Job *job, const int pairs, Work *w, long b, long h, long u, long first, long n_rows) {
    const long k_words = pairs ? (job->dim + 1) / 2 : job->dim, dim = job->v ? (job->dim + MR - 1) / MR * MR : 0;
    const long n_strips = (n_rows + STRIP - 1) / STRIP;
    const int32_t limit = (int32_t)(job->first_limit + first); /* the last key the first row may read */
    const float scale = (float)(job->scale * 1.4426950408889634);
    const long n = list_keys(job, w, b, h, u, limit + (int32_t)n_rows - 1);

    load_queries(job, pairs, w, b, h, first, n_rows, k_words, n_strips);
    memset(w->o, 0, n_strips * dim * STRIP * 4);
    memset(w->l, 0, ROWS * 4);
    for (long r = 0; r < ROWS; r++) w->m[r] = NOTHING;
    for (long t = 0; t < n; t += KEYS) {
        const long count = n - t < KEYS ? n - t : KEYS, n_keys = (count + MR - 1) / MR * MR;
        int32_t *keys = w->keys + t, least = INT32_MAX, most = 0;
        for (long j = count; j < n_keys; j++) keys[j] = INT32_MAX;
        for (long j = 0; j < n_keys; j++) {
            least = keys[j] < least ? keys[j] : least;
            most = keys[j] > most ? keys[j] : most;
        }
        gather(job, pairs, w, keys, n_keys, b, h / (job->q_heads / job->kv_heads), k_words, dim);
        for (long i = 0; i < n_strips; i++) {
            const int32_t row_limit = limit + (int32_t)(i * STRIP);
            const uint32_t *q = w->q + i * k_words * STRIP;
            float *o = w->o + i * dim * STRIP;
            if (least > row_limit + STRIP - 1) continue;
            for (long j = 0; j < n_keys; j += MR)
                product(pairs, w->k + j * k_words, k_words, 1, q, STRIP, w->s + j * STRIP, STRIP, k_words, 0);
            softmax(pairs, w->s, n_keys, most > row_limit ? keys : NULL, row_limit, scale, w->m + i * STRIP,
                    w->l + i * STRIP, o, dim);
            for (long d = 0; d < dim; d += MR)
                product(pairs, w->v + d, 1, dim, (const uint32_t *)w->s, STRIP, o + d * STRIP, STRIP,
                        pairs ? n_keys / 2 : n_keys, 1);
        }
    }
    finish(job, w, b, h, first, n_rows, dim);
}

static int open_work(const Job *job, Work *w) {
    const size_t dim = (job->dim + MR - 1) / MR * MR, n_k = (job->k_len + job->k_block - 1) / job->k_block;
    const size_t sizes[] = {ROWS * dim * 4, KEYS * dim * 4, KEYS * dim * 4, KEYS * STRIP * 4, ROWS * dim * 4,
                            ROWS * 4, ROWS * 4, (job->k_len + KEYS) * 4, n_k};
    void **parts[] = {(void **)&w->q, (void **)&w->k, (void **)&w->v, (void **)&w->s, (void **)&w->o,
                      (void **)&w->l, (void **)&w->m, (void **)&w->keys, (void **)&w->listed};
    size_t total = 0;
    for (int i = 0; i < 9; i++) total += (sizes[i] + 63) / 64 * 64;
    char *p = w->memory = aligned_alloc(64, total);
    if (!p) return 0;
    memset(p, 0, total);
    for (int i = 0; i < 9; p += (sizes[i] + 63) / 64 * 64, i++) *parts[i] = p;
    return 1;
}

/* Fills out and lse. Returns 0, or 1 when memory ran out. */
int64_t block_sparse_attention(const Job *job) {
    const long n_q = (job->q_len + job->q_block - 1) / job->q_block, cuts = (job->q_block + ROWS - 1) / ROWS;
    const long pairs_of_heads = job->batch * job->q_heads, items = pairs_of_heads * n_q * cuts;
    int failed = 0;
#pragma omp parallel num_threads(job->threads) reduction(| : failed)
    {
        Work w;
        const int ready = open_work(job, &w);
        failed |= !ready;
#pragma omp for schedule(dynamic, 1)
        for (long i = 0; i < items; i++) { /* late query blocks first: they have the most keys */
            const long u = n_q - 1 - i / (pairs_of_heads * cuts), cut = i % cuts, head = i / cuts % pairs_of_heads;
            const long begin = u * job->q_block + cut * ROWS;
            long end = (u + 1) * job->q_block < job->q_len ? (u + 1) * job->q_block : job->q_len;
            if (end > begin + ROWS) end = begin + ROWS;
            if (!ready || begin >= end) continue;
            const long b = head / job->q_heads, h = head % job->q_heads;
            if (job->bf16 && PAIRS) item(job, PAIRS, &w, b, h, u, begin, end - begin);
            else item(job, 0, &w, b, h, u, begin, end - begin);
        }
        if (ready) free(w.memory);
    }
    return failed;
}
