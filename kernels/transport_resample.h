/* Resampling by entropy-regularised optimal transport: B rows of N weighted particles become N particles of equal weight, every
 * one a weighted mean of the old ones (Corenflos, Thornton, Deligiannidis & Doucet 2021, section 3).
 *
 *   particles       (B, N, D)  D = G linear dimensions followed by A angular ones (radians, any range); 1 <= D <= 16
 *   log_weights     (B, N)     need not be normalised; -inf is a dead particle
 *   transported     (B, N, D)  angles in [-pi, pi)
 *   marginal_error  (B)        sum_j |sum_i T_ij / N - w_j|, in [0, 2]: how far the plan's weights are from the particles'
 *   iterations      (B)        int64: updates of the potentials, 1 to max_iterations
 *   potentials      (B, 2, N)  f and g, for backward
 *
 * Definition, row by row. w are the normalised weights, z the K = G + 2 A coordinates of a particle, where an angle counts as
 * its cosine and its sine, so that headings are 2 - 2 cos apart, squared.
 *   scale   s = sqrt(K) max_k std_k(z), the deviation of the unweighted cloud; 1 where all particles are equal
 *   cost    C_ij = |x_i - x_j|^2 / 2 with x = (z - mean) / s
 *   step    S_i = sum_j w_j exp((f_i + g_j - C_ij) / e), R_j = 1/N sum_i exp((f_i + g_j - C_ij) / e); then at once
 *           f_i -= e/2 log S_i, g_j -= e/2 log R_j. From f = g = 0; the first step is whole, not halved.
 *           e is max(epsilon, (max x - min x)^2), over all coordinates together, then scaling^2 smaller a step, to epsilon
 *   end     e = epsilon and no potential would move by more than threshold; or max_iterations. Then f_i -= epsilon log S_i,
 *           so that the rows of T_ij = w_j exp((f_i + g_j - C_ij) / epsilon) sum to 1
 *   result  z'_i = sum_j T_ij z_j; for an angle the direction of its cosine and sine
 *
 * The code that the paper released differs: it makes the columns of T exact, not the rows (so the weights of a new particle sum
 * to 1 up to the threshold only, and results depend on the origin), stops a batch with its first row that has converged, takes
 * s for a constant and clips gradients. Here a row's bits do not depend on other rows.
 *
 * Gradient: of the converged map, s included, at the potentials found; no step is differentiated. With U_ij = grad_i z_j and
 * Q, which is T with columns that sum to 1, lambda and nu solve
 *   lambda_i + sum_j T_ij nu_j = sum_j T_ij U_ij,  nu_j + sum_i Q_ij lambda_i = sum_i Q_ij U_ij,  and then
 *   d loss = sum_ij T_ij ((U_ij - lambda_i) dlog w_j - (U_ij - lambda_i - nu_j) dC_ij / epsilon + grad_i dz_j)
 * by conjugate gradients, at most N + TRANSPORT_MORE_STEPS of them. Solutions differ by a constant, of which the gradient of a
 * converged plan is free: the one is taken whose lambda has the mean of sum_j T_ij U_ij. An angle whose mean cosine and sine
 * vanish up to rounding has no direction: its gradient is 0.
 *
 * All weights -inf: a collapse, w = 1/N, no gradient to log_weights. NaN or infinite particles, NaN or +inf weights make their
 * own row NaN, iterations 0. Items are rows (backward: slots of rows).
 * Cost: an exp2 and 2 K + 6 operations a pair and step (the paper's setting, epsilon 0.5 and scaling 0.9, takes 15 to 25);
 * backward as much as one step, and a few multiply-adds a pair for each conjugate gradient. Memory O(N) a row; backward on the
 * CPU keeps the N x N plans of rows at work, TRANSPORT_BUDGET numbers at most or one row; CUDA computes them anew.
 */
#ifndef MDPS_TRANSPORT_RESAMPLE_H
#define MDPS_TRANSPORT_RESAMPLE_H
#include <stdbool.h>
#include <stdint.h>

#include "clones.h"
#include "cuda_launch.h"

enum {
    TRANSPORT_MAX_K = 32,
    TRANSPORT_TILE = 64,  /* particles that are lanes together */
    TRANSPORT_LANES = 16, /* sums over a tile are kept in as many parts */
    TRANSPORT_MORE_STEPS = 32,
    TRANSPORT_BUDGET = 1 << 24,
    TRANSPORT_SHARED = 46 * 1024 /* CUDA: bytes of a row that its block keeps in shared memory */
};

typedef struct {
    int64_t B, N;
    int G, A;
    double epsilon, scaling, threshold;
    int64_t max_iterations;
    const void *particles, *log_weights;
    void *transported, *marginal_error, *potentials;
    int64_t *iterations;
    const void *grad;                        /* backward: (B, N, D) */
    void *grad_particles, *grad_log_weights; /* backward */
    int64_t slots;                           /* backward: rows slot, slot + slots, ... share scratch memory */
    void
        *scratch; /* CPU: transport_scratch() REAL for each row, backward for each slot; CUDA: transport_cuda_scratch() bytes */
} TransportResample;

INLINE int64_t transport_padded(int64_t N) { return (N + TRANSPORT_TILE - 1) / TRANSPORT_TILE * TRANSPORT_TILE; }
INLINE int64_t transport_K(const TransportResample *p) { return p->G + 2 * p->A; }
INLINE int64_t transport_slots(int64_t B, int64_t N) {
    int64_t slots = TRANSPORT_BUDGET / (N * transport_padded(N) + 1);
    return slots < 1 ? 1 : slots < B ? slots : B;
}
/* Numbers a row needs for each particle: coordinates and their sums, potentials, ...; backward its row of the plan as well. */
INLINE int64_t transport_scratch(const TransportResample *p, bool backward) {
    const int64_t padded = transport_padded(p->N), K = transport_K(p);
    return padded * (backward ? 4 * K + 12 + TRANSPORT_LANES + p->N : 2 * K + 4 + TRANSPORT_LANES);
}
/* CUDA: numbers of a row, and bytes of scratch memory: none if that fits into shared memory. */
INLINE int64_t transport_cuda_numbers(const TransportResample *p, bool backward) {
    return p->N * (backward ? 4 * transport_K(p) + 11 : transport_K(p) + 5);
}
INLINE int64_t transport_cuda_scratch(const TransportResample *p, bool backward, int64_t number_size) {
    const int64_t bytes = transport_cuda_numbers(p, backward) * number_size;
    return bytes > TRANSPORT_SHARED ? p->B * bytes : 0;
}

void transport_resample_f32(int64_t begin, int64_t end, void *parameters);
void transport_resample_f64(int64_t begin, int64_t end, void *parameters);
/* Needs the potentials of the forward pass. Items: slots. */
void transport_resample_backward_f32(int64_t begin, int64_t end, void *parameters);
void transport_resample_backward_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int transport_resample_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int transport_resample_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
