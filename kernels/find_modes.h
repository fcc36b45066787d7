/* The K highest modes of Gaussian x von Mises mixtures (mixture_log_prob.h), B mixtures of N components.
 *
 *   means, log_weights, bandwidths   as in mixture_log_prob.h; N >= 1
 *   radius         (D)        >= 0, may be infinite
 *   modes          (B, K, D)  angles in [-pi, pi), by falling density
 *   log_densities  (B, K)     log of the mixture's density there; -inf marks a mode that there is not
 *
 * A mode is where mean-shift (x <- the kernel-weighted mean of the components, circular in the angles) comes to rest: where
 * a step is below MODE_STEP bandwidths. Starts are the components' means, each after one step, in the order of the density
 * there, equal ones by their number. One that differs from a mode found before by less than the radius in every dimension is
 * passed over. A mode that is as close as that to a higher one is dropped, and drops the lower ones that it is close to. The
 * search ends with K modes, or when no start is left. Radii below 1/100 of a bandwidth (of a radian, if that is less) count
 * as such: what is closer cannot be told apart.
 *
 * Where fewer than K modes are found the rest repeat the highest, with log_densities -inf; where every component is dead
 * (-inf) all are the first component's mean. A mean that is not finite, or a log-weight that is NaN or +inf, makes its row NaN.
 *
 * Cost: N^2 kernels for the starts, in double, as many for the densities there, and N a step of an ascent, about 10 of them:
 * K ascents, and one for every start that leads to a mode found before. CPU items: chunks of rows (find_modes_chunks).
 * CUDA: all rows.
 */
#ifndef MDPS_FIND_MODES_H
#define MDPS_FIND_MODES_H
#include <stdint.h>

#include "mixture_log_prob.h"

#define MODE_STEP (IS_DOUBLE ? 1e-10 : 1e-6)
enum { MODE_CHUNKS = 64 };

typedef struct {
    MixtureLogProb mixture; /* M = N; x (the starts), log_prob, log2_sum and scratch are CUDA's scratch memory */
    int64_t K;
    double radius[MIXTURE_MAX_D];
    void *modes, *log_densities;
    double *found; /* CUDA: scratch (B, find_modes_most, D + 1) */
    void *scratch; /* CPU: find_modes_bytes for each chunk */
} FindModes;

INLINE int64_t find_modes_most(const FindModes *p) { return p->K < p->mixture.N ? p->K : p->mixture.N; }

/* The CPU's rows are done in chunks, one after the other with the same memory: so many bytes, a multiple of 64. */
INLINE int64_t find_modes_chunks(const FindModes *p) { return p->mixture.B < MODE_CHUNKS ? p->mixture.B : MODE_CHUNKS; }
INLINE int64_t find_modes_bytes(const FindModes *p, int64_t real) {
    const int64_t features = mixture_features(&p->mixture), D = p->mixture.G + p->mixture.A;
    const int64_t bytes =
        mixture_padded(p->mixture.N) * (8 * (2 + features) + real * (3 + features + D)) + 8 * find_modes_most(p) * (D + 1);
    return (bytes + 63) / 64 * 64;
}

void find_modes_f32(int64_t begin, int64_t end, void *parameters);
void find_modes_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int find_modes_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
