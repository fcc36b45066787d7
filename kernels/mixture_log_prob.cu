/* Log-density of mixtures on the GPU, forward. Contract: mixture_log_prob.h, mathematics: mixture_block.cuh, cuts:
 * mixture_cuda.h.
 *
 * A thread keeps the features of one to four queries in registers; components pass by in shared memory, 128 at a time, loaded
 * four at once. The exponent is shifted by the largest weight alone, as on the CPU: no running maximum. Sums of 128 components
 * are added to the query's sum, so that its rounding does not grow with N. Queries whose sum is too small to be trusted are
 * computed again, exactly, by the warp that has them.
 *
 * Cost: one launch; two more for rows of over 512 components and for small batches. For (x, y, heading) in float32, four
 * queries a thread: 9.3 instructions a pair, 8.3 where the heading's kernel is broad, one of them an exponential
 * (tests/test_cuda_build.py).
 */
#ifndef REAL
#include "bessel.h"
#include "mixture_cuda.h"
#define MDPS_FILE "mixture_log_prob.cu"
#include "for_each_real.h"

int mixture_log_prob_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    MixturePlan plan;
    mixture_plan(&plan, (const MixtureLogProb *)parameters, is_double, 0);
    return is_double ? launch_forward_f64(plan, stream) : launch_forward_f32(plan, stream);
}
#else
#include "mixture_sum.cuh"

/* Computes the marked ones among R queries of every thread exactly, a warp its own. */
template <int R> DEVICE void FN(exact_queries)(const MixtureLogProb &p, const FN(Row) &row, int64_t b, int64_t i0) {
#pragma unroll 1
    for (int64_t i = i0; i < i0 + R * MIXTURE_THREADS; i += MIXTURE_THREADS) {
        bool marked = i < p.M && ((const REAL *)p.log2_sum)[b * p.M + i] == INFINITY;
        for (unsigned left = __ballot_sync(FULL_WARP, marked); left; left &= left - 1) {
            const int from = __ffs((int)left) - 1;
            const int64_t k = __shfl_sync(FULL_WARP, b * p.M + i, from);
            double total = FN(exact_total)(p, row, b, (const REAL *)p.x + k * (p.G + p.A));
            if (lane_of_warp() == from) ((REAL *)p.log_prob)[k] = (REAL)(total * LN2 + FN(log_norm_of)(p, row));
        }
    }
}

template <int G, int A> struct FN(Shared) {
    FN(Row) row;
    alignas(16) REAL component[1 + Features<G, A>::n][MIXTURE_THREADS];
};

template <int G, int A, int R> static __global__ void __launch_bounds__(MIXTURE_THREADS, 4) FN(forward)(MixturePlan plan) {
    const MixtureLogProb &p = plan.p;
    FN(Shared)<G, A> &s = *shared_memory< FN(Shared)<G, A>>();
    const int64_t tile = blockIdx.x % plan.queries.tiles, item = blockIdx.x / plan.queries.tiles;
    const int64_t b = item % p.B, split = item / p.B, i0 = tile * R * MIXTURE_THREADS + threadIdx.x;
    const int64_t first = split * plan.queries.split_length, end = first + plan.queries.split_length;
    FN(prepare_row)(plan, b, s.row);
    REAL q[R][Features<G, A>::n], sum[R] = {};
    bool regular[R];
    const bool row_is_regular = FN(is_regular)(p, s.row), broad = A == 0 || FN(is_broad)(p, s.row);
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = i0 + r * MIXTURE_THREADS, at = (b * p.M + (i < p.M ? i : p.M - 1)) * (p.G + p.A);
        regular[r] = row_is_regular;
        if (broad) regular[r] &= FN(load_features)<G, A, false>(p, s.row, (const REAL *)p.x + at, q[r]);
        else regular[r] &= FN(load_features)<G, A, true>(p, s.row, (const REAL *)p.x + at, q[r]);
    }
    if (row_is_regular) {
        if (broad) FN(sum_pairs)<G, A, R, false>(p, s.row, s.component, b, first, end < p.N ? end : p.N, q, sum);
        else FN(sum_pairs)<G, A, R, true>(p, s.row, s.component, b, first, end < p.N ? end : p.N, q, sum);
    }
#pragma unroll
    for (int r = 0; r < R; r++) {
        const int64_t i = i0 + r * MIXTURE_THREADS;
        if (plan.queries.splits == 1) FN(settle_query)(p, s.row, b, i, sum[r], regular[r]);
        else if (i < p.M) ((REAL *)plan.query_sums)[(split * p.B + b) * p.M + i] = regular[r] ? sum[r] : -1;
    }
    if (plan.queries.splits == 1) FN(exact_queries)<R>(p, s.row, b, i0);
}

/* Adds the splits of each query. */
static __global__ void __launch_bounds__(MIXTURE_THREADS, 4) FN(finish)(MixturePlan plan) {
    const MixtureLogProb &p = plan.p;
    FN(Row) &row = *shared_memory<FN(Row)>();
    const int64_t b = blockIdx.x / plan.flags, i = blockIdx.x % plan.flags * MIXTURE_THREADS + threadIdx.x;
    FN(prepare_row)(plan, b, row);
    REAL sum = 0;
    bool regular = true;
    for (int64_t split = 0; i < p.M && split < plan.queries.splits; split++) {
        REAL part = ((const REAL *)plan.query_sums)[(split * p.B + b) * p.M + i];
        regular &= part >= 0;
        sum += part;
    }
    FN(settle_query)(p, row, b, i, sum, regular);
    FN(exact_queries)<1>(p, row, b, i);
}

template <int G, int A, int R> static int FN(launch_sums)(const MixturePlan &plan, void *stream) {
    const int64_t blocks = plan.p.B * plan.queries.tiles * plan.queries.splits;
    return launch(FN(forward)<G, A, R>, blocks, MIXTURE_THREADS, sizeof(FN(Shared)<G, A>), stream, plan);
}

template <int G, int A> static int FN(launch_special)(const MixturePlan &plan, void *stream) {
    if (plan.queries.per_thread == 1) return FN(launch_sums)<G, A, 1>(plan, stream);
    return FN(launch_sums)<G, A, IS_DOUBLE ? 2 : 4>(plan, stream);
}

static int FN(launch_forward)(const MixturePlan &plan, void *stream) {
    const MixtureLogProb &p = plan.p;
    /* Float alone: the two calls below name kernels of double that are there anyway. */
    const bool is_plane = !IS_DOUBLE && p.G == 2 && p.A == 0, is_space = !IS_DOUBLE && p.G == 3 && p.A == 0;
    int status = 0;
    if (plan.parts > 1) status = launch(FN(measure), p.B * plan.parts, MIXTURE_THREADS, 0, stream, plan);
    if (status) return status;
    if (p.G == 2 && p.A == 1) status = FN(launch_special)<2, 1>(plan, stream);
    else if (is_plane) status = FN(launch_special)<2, IS_DOUBLE>(plan, stream);
    else if (is_space) status = FN(launch_special)<IS_DOUBLE ? 2 : 3, IS_DOUBLE>(plan, stream);
    else status = FN(launch_sums)<ANY, ANY, 1>(plan, stream);
    if (status || plan.queries.splits == 1) return status;
    return launch(FN(finish), p.B * plan.flags, MIXTURE_THREADS, sizeof(FN(Row)), stream, plan);
}
#endif
