/* Log-density of Gaussian x von Mises mixtures at M points, B mixtures of N components (paper, eq. of m(x; x, w, beta)).
 *
 *   log_prob[b][i] = log sum_j exp(log_weights[b][j]) K(x[b][i] - means[b][j]; bandwidths[b])
 *   K = prod_g Normal(x_g - mu_g; beta_g^2) prod_a VonMises(x_a - mu_a; beta_a^-2)
 *
 *   x            (B, M, D)  D = G linear dimensions followed by A angular ones (radians, any range); 1 <= D <= 16
 *   means        (B, N, D)
 *   log_weights  (B, N)     need not be normalised; -inf is a dead component
 *   bandwidths   (B, D)     or (D) for all (bandwidth_stride 0): standard deviations; concentration = beta^-2
 *   log_prob     (B, M)     -inf where every component is dead; exact however far x is
 *   log2_sum     (B, M)     for backward: log2 of the sum relative to the row's largest weight; +inf: computed in double
 *
 * Two ways to the same number (mixture_row.h has the mathematics of both):
 *   tiles   64 queries as lanes, components one by one, in REAL, shifted by the largest weight alone: one pass, no maximum.
 *   exactly one query, components as lanes, in double: for few queries (M < 16), for queries that no heavy component is near
 *           (the sum of a tile lane says so), and for rows whose coordinates exceed 1024 bandwidths or whose concentration
 *           exceeds 3.6e5, where float32 arithmetic would lose digits.
 *
 * Gradients, with P_ij = grad_i w_j K_ij / m_i:
 *   log_weights_j  sum_i P
 *   means_j        sum_i P (x - mu) / beta^2, or sum_i P kappa sin(x - mu)
 *   x_i            minus the same summed over j
 *   bandwidths     sum_ij P ((x - mu)^2 / beta^2 - 1) / beta, or
 *                  2 beta^-3 (sum_ij P 2 sin^2((x - mu) / 2) - (1 - I1/I0) sum_ij P)
 *
 * Cost: O(MN) time: 2 G + 3 A vector operations and an exp2 a pair forward, about 2.4 times as long backward; memory O(M + N):
 * no array has M x N entries. Results do not depend on how items are split over threads.
 */
#ifndef MDPS_MIXTURE_LOG_PROB_H
#define MDPS_MIXTURE_LOG_PROB_H
#include <stdbool.h>
#include <stdint.h>

#include "clones.h"
#include "cuda_launch.h"

enum {
    MIXTURE_MAX_D = 16,
    MIXTURE_TILE = 64,        /* queries that are lanes together */
    MIXTURE_FEW_QUERIES = 16, /* fewer queries a row are computed one by one */
    MIXTURE_BLOCK = 128,      /* components that are lanes together then */
    MIXTURE_SUPER = 512,      /* queries whose gradients are summed in REAL */
    MIXTURE_SUMMED = 256,     /* components whose kernels are summed in REAL: rounding must not grow with N */
    MIXTURE_SHORT = 128       /* the most components of a short row */
};

/* A component's c_j is its log2 weight relative to the row's largest, so a <= 0. Forward sums 2^(a + BIAS); what is below
 * 2^LEAST is flushed to 0, so a sum above N 2^(LEAST + BIAS + digits) has lost less than half a digit: the test of each query.
 */
#define MIXTURE_BIAS (IS_DOUBLE ? 900 : 100)
#define MIXTURE_LEAST (IS_DOUBLE ? -1922 : -226)
#define MIXTURE_ENOUGH (IS_DOUBLE ? 0x1p-969 : 0x1p-102)

/* What a row of the batch needs before its pairs: filled by mixture_prepare. */
typedef struct {
    double scale[MIXTURE_MAX_D];  /* linear: sqrt(log2(e) / 2) / beta; angular: sqrt(2 kappa log2(e)) */
    double centre[MIXTURE_MAX_D]; /* linear: subtracted before scaling */
    double top;                   /* the largest log-weight */
    double log_norm;              /* log of the kernel at its mean */
    int exactly;                  /* the whole row is computed in double */
} MixtureRow;

typedef struct {
    int64_t B, M, N;
    int G, A;
    int64_t bandwidth_stride; /* D, or 0 for bandwidths shared by the batch */
    const void *x, *means, *log_weights, *bandwidths;
    void *log_prob, *log2_sum;
    const void *grad;                                               /* backward: (B, M) */
    void *grad_x, *grad_means, *grad_log_weights, *grad_bandwidths; /* backward; grad_x may be NULL */
    MixtureRow *rows;                                               /* scratch (B) */
    void *components;                                               /* scratch (B, 1 + G + 2 A, mixture_padded(N)) */
    double *sums;                                                   /* scratch of backward (B, mixture_row_sums) */
    void *scratch;                                                  /* CUDA, instead of these three: see mixture_cuda.h */
} MixtureLogProb;

INLINE int64_t mixture_padded(int64_t n) { return (n + 15) / 16 * 16; }
INLINE int64_t mixture_features(const MixtureLogProb *p) { return p->G + 2 * p->A; }
INLINE int64_t mixture_tiles(const MixtureLogProb *p) { return (p->M + MIXTURE_TILE - 1) / MIXTURE_TILE; }
/* Short rows are prepared, summed and differentiated one after the other, a row an item: nothing of them goes through memory
 * but arguments and results. */
INLINE bool mixture_is_short(const MixtureLogProb *p) { return p->N > 0 && p->N <= MIXTURE_SHORT && p->M <= MIXTURE_SUPER; }
/* Backward splits a row's queries into 1 to 8 chunks of whole super-tiles (512 queries), each with sums of its own. */
INLINE int64_t mixture_chunk(const MixtureLogProb *p) {
    int64_t super_tiles = ((p->M + 7) / 8 + 511) / 512;
    return super_tiles ? super_tiles * 512 : 512;
}
INLINE int64_t mixture_chunks(const MixtureLogProb *p) { return p->M ? (p->M + mixture_chunk(p) - 1) / mixture_chunk(p) : 1; }
/* Whether backward fills in log2_sum on the way. */
INLINE bool mixture_sums_too(const MixtureLogProb *p) { return p->log_prob && mixture_is_short(p); }
/* Items of mixture_log_prob and mixture_backward_pairs. */
INLINE int64_t mixture_forward_items(const MixtureLogProb *p) { return p->B * (mixture_is_short(p) ? 1 : mixture_tiles(p)); }
INLINE int64_t mixture_backward_items(const MixtureLogProb *p) { return p->B * (mixture_is_short(p) ? 1 : mixture_chunks(p)); }
/* Of a chunk: 1 + D sums per component, D sums for the bandwidths and the sum of P. */
INLINE int64_t mixture_sums(const MixtureLogProb *p) { return (1 + p->G + p->A) * mixture_padded(p->N) + p->G + p->A + 1; }

/* Of a row; a short one leaves those of the bandwidths alone. */
INLINE int64_t mixture_row_sums(const MixtureLogProb *p) {
    return mixture_is_short(p) ? p->G + p->A + 1 : mixture_chunks(p) * mixture_sums(p);
}

/* First row with a bandwidth that is not a positive number, or -1. */
int64_t mixture_bad_bandwidth_f32(const MixtureLogProb *p);
int64_t mixture_bad_bandwidth_f64(const MixtureLogProb *p);

/* Row b before its pairs: into *row and `components`; where the bandwidths are those of the row that *row has been of, `same`.
 */
void mixture_prepare_row_f32(const MixtureLogProb *p, int64_t b, bool same, MixtureRow *row, void *components);
void mixture_prepare_row_f64(const MixtureLogProb *p, int64_t b, bool same, MixtureRow *row, void *components);
/* Forward: prepare (items: rows; not for short rows, which have no scratch), then log_prob (items: rows x tiles, or short
 * rows). */
void mixture_prepare_f32(int64_t begin, int64_t end, void *parameters);
void mixture_prepare_f64(int64_t begin, int64_t end, void *parameters);
void mixture_log_prob_f32(int64_t begin, int64_t end, void *parameters);
void mixture_log_prob_f64(int64_t begin, int64_t end, void *parameters);

/* Backward, after prepare and with log2_sum: pairs (items: rows x chunks), reduce (items: rows), then once share. Short rows:
 * pairs (items: rows), then share; where log_prob is not NULL, log2_sum is filled on the way, with +inf or 0 (IWSG has no
 * forward pass). */
void mixture_backward_pairs_f32(int64_t begin, int64_t end, void *parameters);
void mixture_backward_pairs_f64(int64_t begin, int64_t end, void *parameters);
/* Sums over chunks; leaves the row's bandwidth gradient in its first chunk. */
void mixture_backward_reduce_f32(int64_t begin, int64_t end, void *parameters);
void mixture_backward_reduce_f64(int64_t begin, int64_t end, void *parameters);
/* grad_bandwidths: of each row, or summed over rows when they are shared. One item. */
void mixture_backward_share_f32(int64_t begin, int64_t end, void *parameters);
void mixture_backward_share_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int mixture_log_prob_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int mixture_log_prob_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
