/* The mathematics of mixture rows on the GPU, shared by the forward and the backward pass (REAL, FN: for_each_real.h).
 *
 * Exponents, bias and the test of a sum are those of mixture_row.h. What differs from the CPU:
 *   - A query is computed exactly (in double, pair by pair, by a warp) by its own coordinate, not by its row's range: only
 *     components near a query matter, so it is the query's distance from the centre that loses digits. Few queries are no
 * reason.
 *   - Where every angular kernel is broad (kappa <= BROAD), the exponent is kappa (cos - 1) by c c' + s s' rather than by the
 *     half angle, an instruction less; what that cancels is below 4e-6. Forward alone.
 *   - Bandwidths that are not positive and finite make their row NaN: nothing waits for the GPU to refuse them.
 * No include guard: a file includes it once for each REAL.
 */
#include "mixture_cuda.h"
#include "real_math.h"

#ifndef MDPS_MIXTURE_BLOCK_CUH
#define MDPS_MIXTURE_BLOCK_CUH
#include "cuda_block.cuh"

#ifndef MDPS_UNROLL
#define MDPS_UNROLL                                                                                          \
    8 /* components a turn of the loops over pairs; tests/test_cuda_build.py counts instructions with others \
       */
#endif
#define BROAD 16.0
#define ANY (-1) /* G and A of the kernels for all other dimensions */

/* Numbers that describe a state: G coordinates, then A cosines and A sines. */
template <int G, int A> struct Features {
    static constexpr int n = G == ANY ? 2 * MIXTURE_MAX_D : G + 2 * A;
};

/* Components or queries a turn of the loops over pairs. */
template <int G> struct Turn {
    static constexpr int n = G == ANY ? 4 : MDPS_UNROLL;
};

/* Four numbers from shared memory at once. */
DEVICE void load_four(const float *from, float *to) {
    float4 v = *(const float4 *)from;
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}
DEVICE void load_four(const double *from, double *to) {
    double2 v = *(const double2 *)from, w = *(const double2 *)(from + 2);
    to[0] = v.x, to[1] = v.y, to[2] = w.x, to[3] = w.y;
}
#endif

/* A row in shared memory: what depends on its bandwidths, and the extremes of its components: the largest log-weight, whether
 * some number is not finite, and of each linear dimension the least coordinate, negated, and the largest. */
typedef struct {
    double scale[MIXTURE_MAX_D], centre[MIXTURE_MAX_D], log_norm[MIXTURE_MAX_D];
    REAL extreme[2 + 2 * MIXTURE_MAX_D];
} FN(Row);

/* Extreme number v of the components [begin, end) of row b, by a warp. */
DEVICE REAL FN(extreme)(const MixtureLogProb &p, int64_t b, int64_t begin, int64_t end, int v) {
    const int D = p.G + p.A;
    const REAL *weights = (const REAL *)p.log_weights + b * p.N, *means = (const REAL *)p.means + b * p.N * D;
    REAL most = -INFINITY;
#pragma unroll 4
    for (int64_t j = begin + lane_of_warp(); j < end; j += WARP) {
        REAL here = weights[j];
        if (v == 1) {
            bool bad = !(here < INFINITY);
            for (int d = 0; d < D; d++) bad |= !(fabs(means[j * D + d]) < INFINITY);
            here = bad;
        } else if (v > 1) here = (v & 1 ? 1 : -1) * means[j * D + v / 2 - 1];
        most = Larger()(most, here);
    }
    return reduce_warp(most, Larger());
}

/* The extremes of a part of a row, of more than MIXTURE_PART components. */
static __global__ void FN(measure)(MixturePlan plan) {
    const MixtureLogProb &p = plan.p;
    const int64_t b = blockIdx.x / plan.parts, part = blockIdx.x % plan.parts, values = 2 + 2 * p.G;
    REAL *out = (REAL *)plan.extremes + blockIdx.x * values;
    for (int v = warp_of_block(); v < values; v += MIXTURE_THREADS / WARP) {
        REAL most = FN(extreme)(p, b, part * p.N / plan.parts, (part + 1) * p.N / plan.parts, v);
        if (lane_of_warp() == 0) out[v] = most;
    }
}

/* Dimension d of the row, from its extremes. */
DEVICE void FN(prepare_dimension)(const MixtureLogProb &p, int64_t b, int d, FN(Row) &row) {
    const double beta = ((const REAL *)p.bandwidths)[b * p.bandwidth_stride + d], kappa = 1 / (beta * beta);
    const bool is_linear = d < p.G;
    row.scale[d] = is_linear ? sqrt(0.5 * LOG2E) / beta : sqrt(2 * LOG2E * kappa);
    row.log_norm[d] = is_linear ? -log(beta) - 0.5 * log(2 * PI) : -log(2 * PI) - log_i0_scaled(kappa);
    if (!(beta > 0 && beta < INFINITY)) row.log_norm[d] = row.scale[d] = NAN; /* the values; and the gradients */
    row.centre[d] = 0;
    if (is_linear && p.N) row.centre[d] = 0.5 * ((double)row.extreme[3 + 2 * d] - (double)row.extreme[2 + 2 * d]);
}

/* The block's row; all threads. */
DEVICE void FN(prepare_row)(const MixturePlan &plan, int64_t b, FN(Row) &row) {
    const MixtureLogProb &p = plan.p;
    const int values = 2 + 2 * p.G;
    for (int v = warp_of_block(); v < values; v += MIXTURE_THREADS / WARP) {
        REAL most = -INFINITY;
        if (plan.parts > 1) {
            const REAL *parts = (const REAL *)plan.extremes + b * plan.parts * values;
            for (int64_t i = lane_of_warp(); i < plan.parts; i += WARP) most = Larger()(most, parts[i * values + v]);
            most = reduce_warp(most, Larger());
        } else most = FN(extreme)(p, b, 0, p.N, v);
        if (lane_of_warp() == 0) row.extreme[v] = most;
    }
    __syncthreads();
    if (threadIdx.x < (unsigned)(p.G + p.A)) FN(prepare_dimension)(p, b, (int)threadIdx.x, row);
    __syncthreads();
}

DEVICE double FN(log_norm_of)(const MixtureLogProb &p, const FN(Row) &row) {
    double sum = 0;
    for (int d = 0; d < p.G + p.A; d++) sum += row.log_norm[d];
    return sum;
}

/* Whether the tile loops can have the row at all, and whether its angular kernels are all broad. */
DEVICE bool FN(is_regular)(const MixtureLogProb &p, const FN(Row) &row) {
    bool regular = !(row.extreme[1] > 0);
    for (int d = p.G; d < p.G + p.A; d++) regular &= row.scale[d] <= (IS_DOUBLE ? 0x1p40 : 1024);
    return regular;
}
DEVICE bool FN(is_broad)(const MixtureLogProb &p, const FN(Row) &row) {
    bool broad = true;
    for (int d = p.G; d < p.G + p.A; d++) broad &= row.scale[d] * row.scale[d] <= 2 * LOG2E * BROAD;
    return broad;
}

/* The features of a state, unscaled angles: of the half angle, or of the whole. Returns whether the state is near enough. */
template <int G, int A, bool HALF>
DEVICE bool FN(load_features)(const MixtureLogProb &p, const FN(Row) &row, const REAL *state, REAL *f) {
    const int n_linear = G == ANY ? p.G : G, n_angular = A == ANY ? p.A : A;
    bool near = true;
#pragma unroll
    for (int g = 0; g < n_linear; g++) {
        f[g] = (state[g] - (REAL)row.centre[g]) * (REAL)row.scale[g];
        near &= fabs(f[g]) <= (REAL)(IS_DOUBLE ? 0x1p40 : 1024);
    }
#pragma unroll
    for (int k = 0; k < n_angular; k++) {
        REAL u = FN(turns)(state[n_linear + k]), c = FN(cospi_poly)(u * u), s = u * FN(sinpi_over)(u * u);
        near &= fabs(state[n_linear + k]) < INFINITY;
        f[n_linear + k] = HALF ? c : 1 - 2 * s * s;
        f[n_linear + n_angular + k] = HALF ? s : 2 * s * c;
    }
    return near;
}

/* Component j as c_j and features, the angular ones scaled; beyond `end` it is dead. */
template <int G, int A, bool HALF>
DEVICE void
FN(load_component)(const MixtureLogProb &p, const FN(Row) &row, int64_t b, int64_t j, int64_t end, REAL bias, REAL *v) {
    const int n_linear = G == ANY ? p.G : G, n_angular = A == ANY ? p.A : A, D = n_linear + n_angular;
    const REAL top = row.extreme[0];
    v[0] = -INFINITY;
#pragma unroll
    for (int f = 0; f < n_linear + 2 * n_angular; f++) v[1 + f] = 0;
    if (j >= end) return;
    const REAL weight = ((const REAL *)p.log_weights)[b * p.N + j];
    FN(load_features)<G, A, HALF>(p, row, (const REAL *)p.means + (b * p.N + j) * D, v + 1);
    if (weight > -INFINITY) v[0] = (weight - top) * (REAL)LOG2E + bias;
#pragma unroll
    for (int k = 0; k < n_angular; k++) {
        REAL r = (REAL)row.scale[n_linear + k], kappa = r * r * (REAL)0.5;
        v[1 + n_linear + k] *= HALF ? r : kappa;
        v[1 + n_linear + n_angular + k] *= HALF ? r : kappa;
        v[0] -= HALF ? 0 : kappa;
    }
}
