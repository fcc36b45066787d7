/* Modes of mixtures on the GPU: a step of mean-shift from each mean, a block each; the densities there by mixture_log_prob;
 * then the search, a block a row. Contract: find_modes.h, the search: find_modes_search.h.
 * The block's threads share the components of a step, straight from the arguments and in double, 128 at a time relative to the
 * largest exponent so far; a warp adds up the dimensions that are its own. What is sequential (where the ascent goes next, the
 * list of modes) one thread does.
 * This file includes itself once for float and once for double (for_each_real.h). */
#ifndef REAL
#include "bessel.h"
#include "find_modes_search.h"

#include "cuda_block.cuh"
enum { THREADS = 128, WARPS = THREADS / WARP };
#define MDPS_FILE "find_modes.cu"
#include "for_each_real.h"

int find_modes_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const FindModes *p = (const FindModes *)parameters;
    return is_double ? launch_search_f64(*p, stream) : launch_search_f32(*p, stream);
}
#else
#include "real_math.h"

/* A row and its search, in shared memory. */
typedef struct {
    ModeRow row;
    Ascent ascent;
    double kernel[THREADS], step[MIXTURE_MAX_D], norm[MIXTURE_MAX_D], shared[WARP];
    int64_t n, places[WARP];
    bool done, accepted;
} FN(Search);

/* What depends on the bandwidths. */
DEVICE void FN(prepare)(const FindModes &p, int64_t b, FN(Search) &s) {
    const MixtureLogProb &m = p.mixture;
    const int d = (int)threadIdx.x;
    if (d == 0) s.row.G = m.G, s.row.A = m.A, s.row.top = 0, s.n = 0;
    __syncthreads();
    if (d < m.G + m.A) {
        const double bandwidth = ((const REAL *)m.bandwidths)[b * m.bandwidth_stride + d], kappa = 1 / (bandwidth * bandwidth);
        const double scale = d < m.G ? sqrt(0.5 * LOG2E) / bandwidth : sqrt(2 * LOG2E * kappa);
        s.norm[d] = d < m.G ? -log(bandwidth) - 0.5 * log(2 * PI) : -log(2 * PI) - log_i0_scaled(kappa);
        if (!(bandwidth > 0 && bandwidth < INFINITY)) s.norm[d] = NAN;
        prepare_mode_dimension(&s.row, d, bandwidth, scale, p.radius[d]);
    }
    __syncthreads();
    if (d == 0) {
        double sum = 0;
        for (int i = 0; i < m.G + m.A; i++) sum += s.norm[i];
        s.row.log_norm = sum;
    }
    __syncthreads();
}

/* log2 of weight times kernel over its value at the mean, of component j. */
DEVICE double FN(exponent)(const MixtureLogProb &m, int64_t b, const ModeRow &row, const double *at, int64_t j) {
    const int D = m.G + m.A;
    const REAL *mean = (const REAL *)m.means + (b * m.N + j) * D;
    double a = ((const REAL *)m.log_weights)[b * m.N + j] * LOG2E;
    for (int d = 0; d < D; d++) {
        double away = (double)mean[d] - at[d];
        if (d >= m.G) {
            const double u = turns_f64(away);
            away = u * sinpi_over_f64(u * u);
        }
        a -= row.square[d] * (away * away);
    }
    return a;
}

/* What component j gives the step in dimension d, but for its weight: its distance, or half the sine and cosine of that. */
DEVICE double2 FN(pull)(const MixtureLogProb &m, int64_t b, double at, int64_t j, int d) {
    const double away = (double)((const REAL *)m.means)[(b * m.N + j) * (m.G + m.A) + d] - at;
    if (d < m.G) return {away, 0};
    const double u = turns_f64(away), half = u * sinpi_over_f64(u * u);
    return {half * cospi_poly_f64(u * u), 0.5 - half * half};
}

/* The log2 density at s.ascent.at and, in s.step, the mean-shift step from there; all threads. */
DEVICE double FN(evaluate)(const MixtureLogProb &m, int64_t b, FN(Search) &s) {
    const double *at = s.ascent.at;
    double top = -INFINITY, sum = 0;
    double2 pulls[MIXTURE_MAX_D / WARPS] = {};
    for (int64_t j0 = 0; j0 < m.N; j0 += THREADS) {
        const int64_t j = j0 + threadIdx.x;
        const double a = j < m.N ? FN(exponent)(m, b, s.row, at, j) : -INFINITY;
        const double most = Larger()(top, reduce_block(a, (double)-INFINITY, Larger(), s.shared));
        const double shrink = top > -INFINITY ? exp2_real_f64(top - most) : 0;
        const double kernel = most > -INFINITY ? exp2_real_f64(a - most) : 0;
        s.kernel[threadIdx.x] = kernel;
        sum = sum * shrink + kernel;
        top = most;
        __syncthreads();
#pragma unroll
        for (int k = 0; k < MIXTURE_MAX_D / WARPS; k++) {
            const int d = warp_of_block() + k * WARPS;
            pulls[k].x *= shrink, pulls[k].y *= shrink;
            for (int i = lane_of_warp(); d < m.G + m.A && i < THREADS && j0 + i < m.N; i += WARP) {
                const double2 pull = FN(pull)(m, b, at[d], j0 + i, d);
                pulls[k].x += s.kernel[i] * pull.x;
                pulls[k].y += s.kernel[i] * pull.y;
            }
        }
    }
    sum = reduce_block(sum, 0., Add(), s.shared);
#pragma unroll
    for (int k = 0; k < MIXTURE_MAX_D / WARPS; k++) {
        const int d = warp_of_block() + k * WARPS;
        if (d >= m.G + m.A) continue;
        const double x = reduce_warp(pulls[k].x, Add()), y = reduce_warp(pulls[k].y, Add());
        if (lane_of_warp() == 0) s.step[d] = d < m.G ? x / sum : atan2(x, y);
    }
    __syncthreads();
    return top + log2(sum);
}

/* The start of one mean, where a step of mean-shift leads from there; that of a dead component stays. */
static __global__ void __launch_bounds__(THREADS, 4) FN(start)(FindModes p) {
    const MixtureLogProb &m = p.mixture;
    FN(Search) &s = *shared_memory<FN(Search)>();
    const int64_t b = blockIdx.x / m.N, D = m.G + m.A;
    const bool dead = ((const REAL *)m.log_weights)[blockIdx.x] == -INFINITY;
    FN(prepare)(p, b, s);
    if (threadIdx.x < D)
        s.ascent.at[threadIdx.x] = ((const REAL *)m.means)[blockIdx.x * D + threadIdx.x], s.step[threadIdx.x] = 0;
    __syncthreads();
    if (!dead) FN(evaluate)(m, b, s);
    if (threadIdx.x < D) ((REAL *)m.x)[blockIdx.x * D + threadIdx.x] = (REAL)(s.ascent.at[threadIdx.x] + s.step[threadIdx.x]);
}

/* Whether all of a row's numbers can be computed with; all threads. */
DEVICE bool FN(is_good)(const MixtureLogProb &m, int64_t b, FN(Search) &s) {
    const int64_t D = m.G + m.A;
    double bad = !(s.row.log_norm == s.row.log_norm);
    for (int64_t j = threadIdx.x; j < m.N; j += THREADS) {
        bad = ((const REAL *)m.log_weights)[b * m.N + j] < INFINITY ? bad : 1;
        for (int64_t i = (b * m.N + j) * D; i < (b * m.N + j + 1) * D; i++)
            bad = fabs(((const REAL *)m.means)[i]) < INFINITY ? bad : 1;
    }
    return reduce_block(bad, 0., Larger(), s.shared) == 0;
}

/* The start that is best, the first among equals; -1 if none is left. */
DEVICE int64_t FN(best_start)(const REAL *density, int64_t N, FN(Search) &s) {
    REAL most = -INFINITY;
    int64_t place = -1;
    for (int64_t j = threadIdx.x; j < N; j += THREADS)
        if (density[j] > most) most = density[j], place = j;
    const double top = reduce_block((double)most, (double)-INFINITY, Larger(), s.shared);
    const int64_t candidate = place >= 0 && most == (REAL)top ? -place : INT64_MIN;
    const int64_t first = reduce_block(candidate, INT64_MIN, Larger(), s.places);
    return top > -INFINITY ? -first : -1;
}

/* From a start to the mode above it, into the list; drops the starts that are close to it. All threads. */
DEVICE void FN(climb)(const MixtureLogProb &m, int64_t b, int64_t start, REAL *density, double *found, FN(Search) &s) {
    const int D = m.G + m.A;
    const REAL *starts = (const REAL *)m.x + b * m.N * D;
    if (threadIdx.x < (unsigned)D) s.ascent.at[threadIdx.x] = starts[start * D + threadIdx.x];
    __syncthreads();
    if (threadIdx.x == 0) begin_ascent(&s.row, &s.ascent);
    __syncthreads();
    do {
        const double value = FN(evaluate)(m, b, s);
        if (threadIdx.x == 0) s.done = move_ascent(&s.row, value, s.step, MODE_STEP, &s.ascent);
        __syncthreads();
    } while (!s.done);
    if (threadIdx.x == 0) {
        s.accepted = insert_mode(&s.row, &s.ascent, found, &s.n);
        density[start] = -INFINITY;
    }
    __syncthreads();
    for (int64_t j = threadIdx.x; s.accepted && j < m.N; j += THREADS) {
        bool close = true;
        for (int d = 0; d < D; d++) close &= is_close(&s.row, d, starts[j * D + d] - s.ascent.at[d]);
        if (close) density[j] = -INFINITY;
    }
    __syncthreads();
}

static __global__ void __launch_bounds__(THREADS, 4) FN(search)(FindModes p) {
    const MixtureLogProb &m = p.mixture;
    FN(Search) &s = *shared_memory<FN(Search)>();
    const int D = m.G + m.A;
    const int64_t b = blockIdx.x, most = find_modes_most(&p);
    REAL *density = (REAL *)m.log_prob + b * m.N, *modes = (REAL *)p.modes + b * p.K * D;
    double *found = p.found + b * most * (D + 1);
    FN(prepare)(p, b, s);
    const bool good = FN(is_good)(m, b, s);
    for (int64_t j = threadIdx.x; j < m.N; j += THREADS)
        if (((const REAL *)m.log_weights)[b * m.N + j] == -INFINITY) density[j] = -INFINITY;
    __syncthreads();
    for (bool more = good; more && s.n < most;) {
        const int64_t start = FN(best_start)(density, m.N, s);
        more = start >= 0;
        if (more) FN(climb)(m, b, start, density, found, s);
    }
    for (int64_t i = threadIdx.x; i < p.K * D; i += THREADS) {
        const int64_t k = i / D, d = i % D;
        const REAL x = s.n > 0 ? (REAL)found[(k < s.n ? k : 0) * (D + 1) + 1 + d] : ((const REAL *)m.means)[b * m.N * D + d];
        modes[i] = !good ? (REAL)NAN : d < m.G ? x : FN(wrap)(x);
    }
    for (int64_t k = threadIdx.x; k < p.K; k += THREADS) {
        const double density_there = k < s.n ? found[k * (D + 1)] * LN2 + s.row.log_norm : -INFINITY;
        ((REAL *)p.log_densities)[b * p.K + k] = good ? (REAL)density_there : (REAL)NAN;
    }
}

static int FN(launch_search)(const FindModes &p, void *stream) {
    const MixtureLogProb &m = p.mixture;
    int status = launch(FN(start), m.B * m.N, THREADS, sizeof(FN(Search)), stream, p);
    if (!status) status = mixture_log_prob_cuda(&m, m.B, IS_DOUBLE, stream);
    return status ? status : launch(FN(search), m.B, THREADS, sizeof(FN(Search)), stream, p);
}
#endif
