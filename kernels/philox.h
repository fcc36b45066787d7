/* Philox4x32-10: random words as a function of (key, counter), so that every draw has an address and no state is kept.
 *
 * Idea and source: Salmon, Moraes, Dror & Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011. The known-answer
 * vectors of their library Random123 are checked in tests/test_philox.py.
 *
 * On the GPU it is cuRAND's curand_Philox4x32_10; tests/emulation compares the two word for word.
 *
 * Layout: cuRAND's. Block b of curand_init(seed, subsequence, 0) has the counter {b lo, b hi, subsequence lo, subsequence hi}
 * and the key {seed lo, seed hi}. Ours fills these 128 bits so that no two operators, streams or rows share a word:
 *
 *   counter 0  block, low 32 bits
 *   counter 1  kind << 24 | high 24 bits of the block; von Mises: kind << 24 | attempt
 *   counter 2  stream, chosen by the caller, 0 <= stream < 2^32
 *   counter 3  number of the row where the batch shares a seed; 0 where each row has its own, so that a row drawn alone has
 *              the bits that it has within a batch
 *
 * Cost: 20 multiplications a block of four words; 0.9 ns a word where a loop over blocks vectorises.
 */
#ifndef MDPS_PHILOX_H
#define MDPS_PHILOX_H
#include <stdint.h>

#include "clones.h"
#ifdef __cplusplus /* CUDA */
#define QUALIFIERS static __host__ __device__ __forceinline__
#include <curand_philox4x32_x.h>
#undef QUALIFIERS
#endif

enum { KIND_UNIFORM = 0, KIND_NORMAL = 1, KIND_VON_MISES = 2, KIND_SPLIT = 3, KIND_RESAMPLE = 4 };

/* The seed argument of an operator: one number, or one for each row. */
typedef struct {
    const int64_t *seed;
    int64_t per_row; /* 0: seed (), shared; 1: seed (B) */
    int64_t stream;
} Seed;

/* Where the words of one row come from. */
typedef struct {
    uint32_t key0, key1, stream, row;
} Source;

typedef struct {
    uint32_t x, y, z, w;
} Words;

INLINE Source source_of_row(Seed s, int64_t b) {
    uint64_t key = (uint64_t)s.seed[s.per_row ? b : 0];
    return (Source){(uint32_t)key, (uint32_t)(key >> 32), (uint32_t)s.stream, s.per_row ? 0 : (uint32_t)b};
}

#ifdef __cplusplus
INLINE Words philox(uint32_t x, uint32_t y, uint32_t z, uint32_t w, uint32_t key0, uint32_t key1) {
    uint4 r = curand_Philox4x32_10(make_uint4(x, y, z, w), make_uint2(key0, key1));
    return Words{r.x, r.y, r.z, r.w};
}
#else
/* Words and keys are held in 64 bits, of which only the lower half counts: gcc 12 vectorises this form best (1.3 times the
 * other). */
INLINE Words philox(uint64_t x, uint64_t y, uint64_t z, uint64_t w, uint64_t key0, uint64_t key1) {
    for (int round = 0; round < 10; round++) {
        uint64_t p = (uint64_t)0xD2511F53u * (uint32_t)x, q = (uint64_t)0xCD9E8D57u * (uint32_t)z;
        x = (q >> 32) ^ y ^ key0;
        y = q;
        z = (p >> 32) ^ w ^ key1;
        w = p;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return (Words){(uint32_t)x, (uint32_t)y, (uint32_t)z, (uint32_t)w};
}
#endif

/* counter 0 and the low 24 bits of counter 1 are given; the rest is the row's. */
INLINE Words words_at(Source s, int kind, uint32_t low, uint32_t high) {
    return philox(low, (uint32_t)kind << 24 | high, s.stream, s.row, s.key0, s.key1);
}
INLINE Words words_of_block(Source s, int kind, int64_t block) {
    return words_at(s, kind, (uint32_t)block, (uint32_t)(block >> 32));
}

/* Words [4 first, 4 (first + n)) of a row, as they are. */
INLINE void draw_words(Source s, int kind, int64_t first, int64_t n, uint32_t *out) {
    for (int64_t i = 0; i < n; i++) {
        Words r = words_of_block(s, kind, first + i);
        out[4 * i] = r.x;
        out[4 * i + 1] = r.y;
        out[4 * i + 2] = r.z;
        out[4 * i + 3] = r.w;
    }
}
#endif
