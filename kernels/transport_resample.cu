/* Sinkhorn's steps on the GPU: a block does a row, from its particles to its result, and stops when the row has converged.
 * Contract, definition: transport_resample.h; what a block does: transport_row.cuh.
 *
 * A warp takes each of the 2 N sums of a step; its exponents have the plan's potentials inside, so that sums are near 1 and
 * need no maximum. A sum that is far from 1 is taken again with one. This file includes itself once for float and once for
 * double (for_each_real.h). */
#ifndef REAL
#include "transport_resample.h"

#include "cuda_block.cuh"
#define MDPS_FILE "transport_resample.cu"
#include "for_each_real.h"

int transport_resample_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    const TransportResample *p = (const TransportResample *)parameters;
    return is_double ? launch_forward_f64(*p, stream) : launch_forward_f32(*p, stream);
}
#else
#include "real_math.h"

#include "transport_row.cuh"

/* The natural logarithm of S_item, or of R_(item - N). A warp's; all lanes get it. */
template <int STATIC_K> DEVICE REAL FN(log_sum)(const FN(Row) &row, REAL unit, int64_t item) {
    const bool by_rows = item < row.N;
    const REAL far = IS_DOUBLE ? (REAL)0x1p900 : (REAL)0x1p60f, most = IS_DOUBLE ? 1000 : 100;
    auto exponent = [&](int64_t n) {
        return by_rows ? row.w[n] + FN(exponent)<STATIC_K>(row, unit, item, n) : FN(exponent)<STATIC_K>(row, unit, n, item - row.N);
    };
    REAL sum = 0, top = 0;
    for (int64_t n = lane_of_warp(); n < row.N; n += WARP) {
        REAL a = exponent(n);
        sum += exp2_pair(a < most ? a : most);
    }
    sum = reduce_warp(sum, Add());
    if (!(sum > 1 / far && sum < far)) {
        top = -INFINITY, sum = 0;
        for (int64_t n = lane_of_warp(); n < row.N; n += WARP) top = Larger()(top, exponent(n));
        top = reduce_warp(top, Larger());
        for (int64_t n = lane_of_warp(); n < row.N; n += WARP) sum += FN(exp2_real)(exponent(n) - top);
        sum = reduce_warp(sum, Add());
    }
    return (top + log2(sum)) * (REAL)LN2 - (by_rows ? 0 : log((REAL)row.N));
}

/* All of them, into row.rest; returns the largest size of one. */
template <int STATIC_K> DEVICE REAL FN(log_sums)(const FN(Row) &row, REAL unit) {
    double most = 0;
    for_each_warp(2 * row.N, [&](int64_t item) {
        REAL log_sum = FN(log_sum)<STATIC_K>(row, unit, item);
        if (lane_of_warp() == 0) row.rest[item] = log_sum;
        most = Larger()(most, (double)fabs(log_sum));
    });
    return (REAL)largest_of_block(most); /* its barriers are those that row.rest needs */
}

/* Moves f and g to the fixed point; returns the number of steps. As in transport_resample.c. */
template <int STATIC_K> DEVICE int64_t FN(solve)(const TransportResample &p, const FN(Row) &row) {
    const double first = row.range * row.range;
    double e = first > p.epsilon ? first : p.epsilon;
    int64_t steps = 0;
    for (bool last = false; !last;) {
        REAL most = FN(log_sums)<STATIC_K>(row, (REAL)(LOG2E / e));
        const REAL share = (REAL)(steps++ ? 0.5 * e : e);
        last = steps >= p.max_iterations || (e == p.epsilon && share * most <= p.threshold);
        if (last && e == p.epsilon) break;
        for_each_thread(2 * row.N, [&](int64_t n) { row.f[n] -= share * row.rest[n]; }); /* g follows f */
        __syncthreads();
        e = e * p.scaling * p.scaling;
        e = e > p.epsilon && !last ? e : p.epsilon;
        if (last) FN(log_sums)<STATIC_K>(row, (REAL)(LOG2E / e));
    }
    for_each_thread(row.N, [&](int64_t n) { row.f[n] -= (REAL)p.epsilon * row.rest[n]; });
    __syncthreads();
    return steps;
}

/* Dimensions from d0 on, AT_ONCE at most, of new particle i. A warp's. */
template <int STATIC_K>
DEVICE void FN(transport_particle)(const TransportResample &p, const FN(Row) &row, REAL unit, int64_t i, int d0, REAL *out) {
    const int D = p.G + p.A;
    const double *centre = shared_memory<Common>()->centre;
    REAL total = 0, sum[AT_ONCE] = {}, of_sine[AT_ONCE] = {};
    for (int64_t j = lane_of_warp(); j < row.N; j += WARP) {
        const REAL T = exp2_pair(row.w[j] + FN(exponent)<STATIC_K>(row, unit, i, j));
        total += T;
#pragma unroll
        for (int c = 0; c < AT_ONCE; c++)
            if (d0 + c < D) {
                sum[c] += T * row.x[(d0 + c) * row.N + j];
                if (d0 + c >= p.G) of_sine[c] += T * row.x[(d0 + c + p.A) * row.N + j];
            }
    }
    total = reduce_warp(total, Add());
#pragma unroll
    for (int c = 0; c < AT_ONCE; c++) {
        const int d = d0 + c;
        if (d >= D) continue;
        double mean = row.scale * (reduce_warp(sum[c], Add()) / total) + centre[d],
               sine = reduce_warp(of_sine[c], Add()) / total;
        if (d >= p.G) mean = FN(wrap)(atan2((REAL)(row.scale * sine + centre[d + p.A]), (REAL)mean));
        if (lane_of_warp() == 0) out[d] = (REAL)mean;
    }
}

template <int STATIC_K> DEVICE void FN(store)(const TransportResample &p, const FN(Row) &row, int64_t b) {
    const REAL unit = (REAL)(LOG2E / p.epsilon);
    const int D = p.G + p.A;
    REAL *transported = (REAL *)p.transported + b * p.N * D, *potentials = (REAL *)p.potentials + 2 * b * p.N;
    double error = 0;
    for_each_warp(p.N, [&](int64_t n) {
        for (int d = 0; d < D; d += AT_ONCE) FN(transport_particle)<STATIC_K>(p, row, unit, n, d, transported + n * D);
        REAL sum = 0;
        for (int64_t i = lane_of_warp(); i < p.N; i += WARP) sum += FN(entry)<STATIC_K>(row, unit, i, n);
        sum = reduce_warp(sum, Add());
        if (lane_of_warp() == 0) error += FN(exp2_real)(row.w[n]) * fabs(sum / p.N - 1);
    });
    error = sum_block(error);
    if (threadIdx.x == 0) ((REAL *)p.marginal_error)[b] = (REAL)error;
    for_each_thread(2 * p.N, [&](int64_t n) { potentials[n] = row.f[n]; });
}

template <int STATIC_K> static __global__ void FN(forward)(TransportResample p) {
    const int64_t b = blockIdx.x, D = p.G + p.A;
    FN(Row) row;
    int64_t steps = 0;
    if (FN(load_row)(p, b, false, row)) {
        steps = FN(solve)<STATIC_K>(p, row);
        FN(store)<STATIC_K>(p, row, b);
    } else {
        for_each_thread(p.N * D, [&](int64_t n) { ((REAL *)p.transported)[b * p.N * D + n] = NAN; });
        for_each_thread(2 * p.N, [&](int64_t n) { ((REAL *)p.potentials)[2 * b * p.N + n] = NAN; });
        if (threadIdx.x == 0) ((REAL *)p.marginal_error)[b] = NAN;
    }
    if (threadIdx.x == 0) p.iterations[b] = steps;
}

static int FN(launch_forward)(const TransportResample &p, void *stream) {
    const size_t shared = sizeof(Common) + (p.scratch ? 0 : transport_cuda_numbers(&p, false) * sizeof(REAL));
    if (transport_K(&p) == 4) return launch(FN(forward)<4>, p.B, THREADS, shared, stream, p);
    if (transport_K(&p) == 2) return launch(FN(forward)<2>, p.B, THREADS, shared, stream, p);
    return launch(FN(forward)<0>, p.B, THREADS, shared, stream, p);
}
#endif
