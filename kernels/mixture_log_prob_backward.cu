/* Gradients of mixture log-densities on the GPU. Contract and formulas: mixture_log_prob.h, mathematics: mixture_block.cuh.
 *
 * Two passes over the pairs, both in one launch: in one the queries are stationary and gather their own gradients, in the other
 * the components. A fused pass would need the sums of one side added up across threads for each pair; two passes need no
 * atomics, and the order of every sum is fixed. Sums of 128 pairs are added to a second accumulator. The bandwidths' gradients
 * cost nothing a pair: sum_ij P d^2 = sum_i x_i (sum_j P d) - sum_j mu_j (sum_i P d), and likewise for angles.
 *
 * Launches: 1. (rows of over 512 components) their extremes. 2. Queries that forward computed exactly: the sum again, their
 * own gradient, and how many there are. 3. The two passes; components add what the exact queries give them, pair by pair in
 * double.
 * 4. Splits are added up, and the blocks' parts of the bandwidth gradients. Rows of up to 128 queries and components are done
 * by one block each in place of 2 and 3; that of IWSG does the forward pass first. Cost: for (x, y, heading) in float32, four
 * items a thread: 30 instructions a pair for both passes (tests/test_cuda_build.py).
 */
#ifndef REAL
#include "bessel.h"
#include "mixture_cuda.h"
enum { REDUCE_THREADS = 256 };
#define MDPS_FILE "mixture_log_prob_backward.cu"
#include "for_each_real.h"

int mixture_log_prob_backward_cuda(const void *parameters, int64_t, int is_double, void *stream) {
    MixturePlan plan;
    mixture_plan(&plan, (const MixtureLogProb *)parameters, is_double, 1);
    return is_double ? launch_backward_f64(plan, stream) : launch_backward_f32(plan, stream);
}
#else
#include "mixture_pass.cuh"

typedef struct {
    FN(Row) row;
    FN(ExactSums) sums;
} FN(ExactShared);

static __global__ void __launch_bounds__(MIXTURE_THREADS, 4) FN(exact)(MixturePlan plan) {
    FN(ExactShared) &s = *shared_memory<FN(ExactShared)>();
    FN(exact_tile)(plan, blockIdx.x / plan.flags, blockIdx.x % plan.flags, s.row, s.sums, false);
}

/* The blocks of the first pass, then those of the second. */
template <int G, int A, int R> static __global__ void __launch_bounds__(MIXTURE_THREADS, 3) FN(pairs)(MixturePlan plan) {
    const int64_t first = plan.p.B * plan.queries.tiles * plan.queries.splits;
    const bool is_first = blockIdx.x < first;
    const MixtureCut &cut = is_first ? plan.queries : plan.components;
    const int64_t block = is_first ? blockIdx.x : blockIdx.x - first, item = block / cut.tiles, b = item % plan.p.B;
    FN(Passing)<G, A> &s = *shared_memory<FN(Passing)<G, A>>();
    FN(prepare_row)(plan, b, s.row);
    if (is_first) FN(pass_of_queries)<G, A, R>(plan, b, block % cut.tiles, item / plan.p.B, s);
    else FN(pass_of_components)<G, A, R>(plan, b, block % cut.tiles, item / plan.p.B, s);
}

/* Everything of a small row by one block, for IWSG the forward pass as well. */
template <int G, int A> static __global__ void __launch_bounds__(MIXTURE_THREADS, 3) FN(small_rows)(MixturePlan plan) {
    const MixtureLogProb &p = plan.p;
    const int64_t b = blockIdx.x, i = threadIdx.x;
    FN(Passing)<G, A> &s = *shared_memory<FN(Passing)<G, A>>();
    FN(prepare_row)(plan, b, s.row);
    if (p.log_prob) {
        REAL q[1][Features<G, A>::n], sum[1] = {};
        const REAL *x = (const REAL *)p.x + (b * p.M + (i < p.M ? i : 0)) * (p.G + p.A);
        const bool regular = FN(is_regular)(p, s.row), near = FN(load_features)<G, A, true>(p, s.row, x, q[0]);
        if (regular) FN(sum_pairs)<G, A, 1, true>(p, s.row, s.value, b, 0, p.N, q, sum);
        FN(settle_query)(p, s.row, b, i, sum[0], regular && near);
    }
    FN(exact_tile)(plan, b, 0, s.row, s.exact, true);
    __syncthreads();
    FN(pass_of_queries)<G, A, 1>(plan, b, 0, 0, s);
    __syncthreads();
    FN(pass_of_components)<G, A, 1>(plan, b, 0, 0, s);
}

/* Gradient of the bandwidths of rows [first, last) from their blocks' sums: one pass, each thread with one dimension. */
DEVICE void FN(share)(const MixturePlan &plan, int64_t first, int64_t last) {
    const MixtureLogProb &p = plan.p;
    const int D = p.G + p.A, each = D + 1, used = REDUCE_THREADS / each * each, e = threadIdx.x;
    double *part = shared_memory<double>(), *sums = part + REDUCE_THREADS, sum = 0;
    for (int64_t i = first * plan.slots * each + e; e < used && i < last * plan.slots * each; i += used)
        sum += plan.bandwidth_sums[i];
    part[e] = sum;
    __syncthreads();
    if (e <= D) {
        sum = 0;
        for (int i = e; i < used; i += each) sum += part[i];
        sums[e] = sum;
    }
    __syncthreads();
    if (e >= D) return;
    const int64_t at = first * p.bandwidth_stride + e;
    const double beta = ((const REAL *)p.bandwidths)[at], total = sums[D];
    double grad = (sum - total) / beta;
    if (e >= p.G) grad = 2 / (beta * beta * beta) * (sum - one_minus_bessel_ratio(1 / (beta * beta)) * total);
    ((REAL *)p.grad_bandwidths)[at] = (REAL)grad;
}

/* One block for the bandwidths of each row, or for all when they are shared; then the others add up splits. */
static __global__ void __launch_bounds__(REDUCE_THREADS, 4) FN(reduce)(MixturePlan plan) {
    const MixtureLogProb &p = plan.p;
    const int64_t shares = p.bandwidth_stride ? p.B : 1, D = p.G + p.A;
    if (blockIdx.x < shares) {
        FN(share)(plan, p.bandwidth_stride ? blockIdx.x : 0, p.bandwidth_stride ? blockIdx.x + 1 : p.B);
        return;
    }
    const int64_t e = (blockIdx.x - shares) * blockDim.x + threadIdx.x, of_queries = p.B * p.M * D;
    if (plan.queries.splits > 1 && p.grad_x && e < of_queries &&
        ((const REAL *)p.log2_sum)[e / D] != INFINITY) /* the exact ones are done */
        ((REAL *)p.grad_x)[e] = FN(add_splits)((const REAL *)plan.query_sums, e, of_queries, plan.queries.splits);
    const int64_t of_components = p.B * p.N * (1 + D);
    if (plan.components.splits > 1 && e < of_components)
        *FN(component_gradient)(p, e) =
            FN(add_splits)((const REAL *)plan.component_sums, e, of_components, plan.components.splits);
}

template <int G, int A, int R> static int FN(launch_pairs)(const MixturePlan &plan, void *stream) {
    const MixtureCut &q = plan.queries, &c = plan.components;
    const int64_t blocks = plan.p.B * (q.tiles * q.splits + c.tiles * c.splits);
    return launch(FN(pairs)<G, A, R>, blocks, MIXTURE_THREADS, sizeof(FN(Passing)<G, A>), stream, plan);
}

template <int G, int A> static int FN(launch_small)(const MixturePlan &plan, void *stream) {
    return launch(FN(small_rows)<G, A>, plan.p.B, MIXTURE_THREADS, sizeof(FN(Passing)<G, A>), stream, plan);
}

template <int G, int A> static int FN(launch_special)(const MixturePlan &plan, void *stream) {
    if (mixture_is_small(&plan.p)) return FN(launch_small)<G, A>(plan, stream);
    if (plan.queries.per_thread == 1) return FN(launch_pairs)<G, A, 1>(plan, stream);
    return FN(launch_pairs)<G, A, IS_DOUBLE ? 2 : 4>(plan, stream);
}

static int FN(launch_backward)(const MixturePlan &plan, void *stream) {
    const MixtureLogProb &p = plan.p;
    const int64_t most =
        plan.components.splits > 1 && p.N * (1 + p.G + p.A) > p.M * (p.G + p.A) ? p.N * (1 + p.G + p.A) : p.M * (p.G + p.A);
    const bool is_split = plan.queries.splits > 1 || plan.components.splits > 1;
    /* Float alone: the two calls below name kernels of double that are there anyway. */
    const bool is_plane = !IS_DOUBLE && p.G == 2 && p.A == 0, is_space = !IS_DOUBLE && p.G == 3 && p.A == 0;
    int status = 0;
    if (plan.parts > 1) status = launch(FN(measure), p.B * plan.parts, MIXTURE_THREADS, 0, stream, plan);
    if (!status && !mixture_is_small(&p))
        status = launch(FN(exact), p.B * plan.flags, MIXTURE_THREADS, sizeof(FN(ExactShared)), stream, plan);
    if (status) return status;
    if (p.G == 2 && p.A == 1) status = FN(launch_special)<2, 1>(plan, stream);
    else if (is_plane) status = FN(launch_special)<2, IS_DOUBLE>(plan, stream);
    else if (is_space) status = FN(launch_special)<IS_DOUBLE ? 2 : 3, IS_DOUBLE>(plan, stream);
    else if (mixture_is_small(&p)) status = FN(launch_small)<ANY, ANY>(plan, stream);
    else status = FN(launch_pairs)<ANY, ANY, 1>(plan, stream);
    if (status) return status;
    const int64_t blocks = (p.bandwidth_stride ? p.B : 1) + (is_split ? mixture_blocks_for(p.B * most, REDUCE_THREADS) : 0);
    return launch(FN(reduce), blocks, REDUCE_THREADS, (REDUCE_THREADS + MIXTURE_MAX_D + 1) * sizeof(double), stream, plan);
}
#endif
