/* A row of transport_resample on the GPU: a block of warps, a warp for each particle's sum over all others (REAL, FN:
 * for_each_real.h; the part below the include guard).
 *
 * The row's numbers lie in shared memory or, if they are too many, in scratch memory, which the cache of the block's
 * multiprocessor holds as long as it can. K is a template argument where it is common, 0 otherwise.
 */
#ifndef MDPS_TRANSPORT_ROW_CUH
#define MDPS_TRANSPORT_ROW_CUH
#include "cuda_block.cuh"
#include "transport_resample.h"
enum { THREADS = 256, WARPS = THREADS / WARP, AT_ONCE = 4 /* coordinates whose sums a warp takes in one pass */ };

/* At the start of shared memory: room for reductions, and what a warp has found of a coordinate. */
typedef struct {
    double reduction[WARP];
    double centre[TRANSPORT_MAX_K], square[TRANSPORT_MAX_K], low[TRANSPORT_MAX_K], high[TRANSPORT_MAX_K];
} Common;

/* Calls warp_item(n) for n < count, each by all lanes of one warp. */
template <typename F> DEVICE void for_each_warp(int64_t count, F warp_item) {
    for (int64_t n = warp_of_block(); n < count; n += WARPS) warp_item(n);
}
/* Calls number(n) for n < count, each by one thread. */
template <typename F> DEVICE void for_each_thread(int64_t count, F number) {
    for (int64_t n = threadIdx.x; n < count; n += THREADS) number(n);
}
DEVICE double sum_block(double value) { return reduce_block(value, 0., Add(), shared_memory<Common>()->reduction); }
DEVICE double largest_of_block(double value) {
    return reduce_block(value, (double)-INFINITY, Larger(), shared_memory<Common>()->reduction);
}
#endif

typedef struct {
    int64_t N;
    int K, widest;
    REAL *x, *w, *f, *g, *rest; /* (K, N), then (N) each; w: weights, backward, or their log2, forward */
    double scale, range;
    bool collapsed;
} FN(Row);

/* Statistics of the coordinates that this warp has. */
DEVICE void FN(measure_coordinate)(const FN(Row) &row, int64_t k) {
    Common *common = shared_memory<Common>();
    const REAL *x = row.x + k * row.N;
    double sum = 0, differ = 0, square = 0, low = INFINITY, high = -INFINITY;
    for (int64_t n = lane_of_warp(); n < row.N; n += WARP) sum += x[n], differ += x[n] != x[0];
    sum = reduce_warp(sum, Add());
    const double centre = reduce_warp(differ, Add()) > 0 ? sum / row.N : (double)x[0];
    for (int64_t n = lane_of_warp(); n < row.N; n += WARP) {
        double away = x[n] - centre;
        square += away * away;
        low = Larger()(-low, -away) * -1;
        high = Larger()(high, away);
    }
    square = reduce_warp(square, Add());
    low = -reduce_warp(-low, Larger()), high = reduce_warp(high, Larger());
    if (lane_of_warp() == 0)
        common->centre[k] = centre, common->square[k] = square, common->low[k] = low, common->high[k] = high;
}

/* Centres and scales; false where a coordinate is not finite. */
DEVICE bool FN(scale_coordinates)(FN(Row) &row) {
    const Common *common = shared_memory<Common>();
    double most = 0, low = INFINITY, high = -INFINITY;
    bool good = true;
    for_each_warp(row.K, [&](int64_t k) { FN(measure_coordinate)(row, k); });
    __syncthreads();
    row.widest = -1;
    for (int k = 0; k < row.K; k++) {
        good = good && fabs(common->centre[k]) < INFINITY;
        low = common->low[k] < low ? common->low[k] : low;
        high = common->high[k] > high ? common->high[k] : high;
        if (common->square[k] > most) most = common->square[k], row.widest = k;
    }
    row.scale = row.widest < 0 ? 1 : sqrt(row.K * most / row.N);
    row.range = (high - low) / row.scale;
    for_each_thread(row.K * row.N, [&](int64_t n) { row.x[n] = (REAL)((row.x[n] - common->centre[n / row.N]) / row.scale); });
    __syncthreads();
    return good;
}

/* log2 of the normalised weights; false for NaN or +inf. */
DEVICE bool FN(load_weights)(const REAL *l, FN(Row) &row) {
    double top = -INFINITY, bad = 0, sum = 0;
    for_each_thread(row.N, [&](int64_t n) { top = Larger()(top, (double)l[n]), bad += !(l[n] < (REAL)INFINITY); });
    top = largest_of_block(top), bad = sum_block(bad);
    row.collapsed = top == -INFINITY;
    for_each_thread(row.N, [&](int64_t n) {
        row.w[n] = row.collapsed ? (REAL)0 : (REAL)((l[n] - top) * LOG2E);
        sum += FN(exp2_real)(row.w[n]);
    });
    const double log_sum = log2(sum_block(sum));
    for_each_thread(row.N, [&](int64_t n) { row.w[n] = (REAL)(row.w[n] - log_sum); });
    return bad == 0;
}

/* Row b; false, for all threads, where it has no plan. f = g = 0. */
DEVICE bool FN(load_row)(const TransportResample &p, int64_t b, bool backward, FN(Row) &row) {
    const int D = p.G + p.A;
    const REAL *particles = (const REAL *)p.particles + b * p.N * D;
    row.N = p.N, row.K = (int)transport_K(&p);
    row.x = p.scratch ? (REAL *)p.scratch + b * transport_cuda_numbers(&p, backward) : (REAL *)(shared_memory<Common>() + 1);
    row.w = row.x + row.K * row.N, row.f = row.w + row.N, row.g = row.f + row.N, row.rest = row.g + row.N;
    for_each_thread(p.N * D, [&](int64_t e) {
        const int64_t n = e / D, d = e % D;
        const REAL value = particles[e];
        row.x[d * p.N + n] = d < p.G ? value : (REAL)cos(value);
        if (d >= p.G) row.x[(d + p.A) * p.N + n] = sin(value);
    });
    for_each_thread(2 * p.N, [&](int64_t n) { row.f[n] = 0; });
    const bool good = FN(load_weights)((const REAL *)p.log_weights + b * p.N, row);
    return FN(scale_coordinates)(row) && good;
}

/* The exponent in base 2 of the entry of row i and column j; unit = log2(e) / e. */
template <int STATIC_K> DEVICE REAL FN(exponent)(const FN(Row) &row, REAL unit, int64_t i, int64_t j) {
    const int K = STATIC_K ? STATIC_K : row.K;
    REAL square = 0;
#pragma unroll
    for (int k = 0; k < K; k++) {
        REAL away = row.x[k * row.N + i] - row.x[k * row.N + j];
        square += away * away;
    }
    return (row.f[i] + row.g[j]) * unit - (REAL)0.5 * unit * square;
}

/* The entry itself, kept below what REAL holds. */
template <int STATIC_K> DEVICE REAL FN(entry)(const FN(Row) &row, REAL unit, int64_t i, int64_t j) {
    const REAL a = FN(exponent)<STATIC_K>(row, unit, i, j), top = IS_DOUBLE ? 1000 : 100;
    return exp2_pair(a < top ? a : top);
}
