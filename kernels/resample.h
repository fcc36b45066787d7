/* Ancestors of M draws from each of B rows of N weighted particles.
 *
 *   log_weights (B, N)     any real numbers, normalised or not; -inf is a dead particle, which is never drawn
 *   seed        () or (B)  int64, with a stream number (philox.h, KIND_RESAMPLE)
 *   ancestors   (B, M)     int64 in [0, N); non-decreasing in a row unless the scheme is multinomial
 *   scratch                RESAMPLE_SCRATCH(N) bytes for each of `chunks` chunks of rows, where the scheme needs it; CUDA:
 *                          resample_cuda_scratch(p) bytes, and no chunks
 *
 * Schemes (Douc, Cappe & Moulines 2005; the paper, section 2.2). With w normalised, component j owns the points p with
 * W_{j-1} <= p < W_j, W the cumulative weights:
 *   multinomial  M independent points; point i from words 2 i and 2 i + 1
 *   stratified   point (i + u_i) / M with u_i from word i
 *   systematic   point (i + u) / M with u from word 0
 *   residual     floor(M w_j) copies of j, then multinomial draws from the fractional parts of M w, sorted
 *
 * Collapse: a row that is -inf throughout, or holds NaN or +inf, has uniform ancestors: floor(i N / M), and independent uniform
 * draws if multinomial. 1 <= N < 2^31 and 0 <= M < 2^31 - 1. Items are chunks: chunk i has the rows [i B / chunks, (i + 1) B /
 * chunks). Deterministic, O(N + M) a row. Cost: stratified about 4 ns a draw (N = M, float, one core).
 */
#ifndef MDPS_RESAMPLE_H
#define MDPS_RESAMPLE_H
#include <stdbool.h>

#include "cuda_launch.h"
#include "philox.h"

enum { MULTINOMIAL = 0, STRATIFIED = 1, SYSTEMATIC = 2, RESIDUAL = 3 };

typedef struct {
    int64_t B, N, M, chunks;
    int scheme;
    Seed seed;
    const void *log_weights;
    int64_t *ancestors;
    char *scratch;
} Resample;

/* Multinomial and residual: cumulative weights (N), guide (N + 1), counts (N). The others need none. */
#define RESAMPLE_ROUND(bytes) (((bytes) + 63) / 64 * 64)
#define RESAMPLE_SCRATCH(N) (RESAMPLE_ROUND(8 * (N)) + RESAMPLE_ROUND(4 * ((N) + 1)) + RESAMPLE_ROUND(4 * (N)))

/* CUDA: a row has one block, which keeps up to RESAMPLE_KEPT particles in shared memory; a row of more than RESAMPLE_BLOCK
 * particles or draws has `parts` blocks, up to 256, unless the scheme is residual. */
enum { RESAMPLE_KEPT = 4096, RESAMPLE_BLOCK = 2048 };
INLINE bool resample_in_parts(const Resample *p) {
    return p->scheme != RESIDUAL && (p->N > RESAMPLE_BLOCK || p->M > RESAMPLE_BLOCK);
}
INLINE int64_t resample_parts(int64_t N) {
    int64_t parts = (N + 1023) / 1024;
    return parts < 256 ? parts : 256;
}
/* Cumulative weights (B, N), counts (B, N) or, for rows in parts, totals and largest log-weights (B, parts). */
INLINE int64_t resample_cuda_scratch(const Resample *p) {
    if (resample_in_parts(p)) return p->B * 8 * (p->N + 2 * resample_parts(p->N));
    return p->N > RESAMPLE_KEPT ? p->B * p->N * (p->scheme == RESIDUAL ? 12 : 8) : 0;
}

void resample_f32(int64_t begin, int64_t end, void *parameters);
void resample_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int resample_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
