/* Queries that are computed exactly: in double, pair by pair, straight from the arguments (REAL, FN: for_each_real.h; no
 * include guard). For those that no heavy component is near, that lie far from the centre of their row, or whose row holds what
 * is not finite or kernels too narrow for REAL. */
#include "mixture_block.cuh"

/* log2 of weight times kernel over its value at the mean, in double, straight from the arguments. */
DEVICE double FN(exact_exponent)(const MixtureLogProb &p, const FN(Row) &row, int64_t b, const REAL *x, int64_t j) {
    const int D = p.G + p.A;
    const REAL *mean = (const REAL *)p.means + (b * p.N + j) * D;
    double a = ((const REAL *)p.log_weights)[b * p.N + j] * LOG2E;
    for (int d = 0; d < D; d++) {
        double away = (double)x[d] - (double)mean[d];
        if (d >= p.G) {
            double u = turns_f64(away);
            away = u * sinpi_over_f64(u * u);
        }
        away *= row.scale[d];
        a -= away * away;
    }
    return a;
}

/* log2 of a query's sum, by a warp; lanes have components, each relative to its own largest exponent until the end. */
DEVICE double FN(exact_total)(const MixtureLogProb &p, const FN(Row) &row, int64_t b, const REAL *x) {
    double top = -INFINITY, sum = 0, probe = 0;
    for (int64_t j = lane_of_warp(); j < p.N; j += WARP) {
        double a = FN(exact_exponent)(p, row, b, x, j), most = Larger()(top, a);
        if (!(a < INFINITY)) probe = NAN;
        if (most > -INFINITY) sum = sum * exp2_real_f64(top - most) + exp2_real_f64(a - most);
        top = most;
    }
    double most = reduce_warp(top, Larger());
    if (most > -INFINITY) sum *= exp2_real_f64(top - most);
    sum = reduce_warp(sum, Add()) + reduce_warp(probe, Add());
    return most + log2(sum);
}

/* What one pair gives dimension d, with its weight P: to the bandwidth, and to mean and (negative) query. */
typedef struct {
    double square, slope;
} FN(Slope);

DEVICE FN(Slope)
    FN(exact_slope)(const MixtureLogProb &p, const FN(Row) &row, int64_t b, const REAL *x, int64_t j, int d, double P) {
    const double r = row.scale[d], away = (double)x[d] - (double)((const REAL *)p.means)[(b * p.N + j) * (p.G + p.A) + d];
    if (d < p.G) return {P * 2 / LOG2E * (away * r) * (away * r), P * 2 / LOG2E * away * r * r};
    const double u = turns_f64(away), s = u * sinpi_over_f64(u * u);
    return {P * 2 * s * s, P * r * r / LOG2E * s * cospi_poly_f64(u * u)};
}

/* What the exact queries among [first, last) give number d of component j: 0 is its weight, then its mean. */
DEVICE double
FN(from_exact_queries)(const MixturePlan &plan, const FN(Row) &row, int64_t b, int64_t first, int64_t last, int64_t j,
                                 int d) {
    const MixtureLogProb &p = plan.p;
    double sum = 0;
    for (int64_t tile = first / MIXTURE_THREADS; tile * MIXTURE_THREADS < last; tile++) {
        if (plan.flagged[b * plan.flags + tile] == 0) continue;
        const int64_t stop = (tile + 1) * MIXTURE_THREADS < last ? (tile + 1) * MIXTURE_THREADS : last;
        for (int64_t i = b * p.M + tile * MIXTURE_THREADS; i < b * p.M + stop; i++) {
            const double total = ((const REAL *)p.log2_sum)[i] == INFINITY ? plan.totals[i] : -INFINITY;
            if (total == -INFINITY) continue;
            const REAL *x = (const REAL *)p.x + i * (p.G + p.A);
            const double P = ((const REAL *)p.grad)[i] * exp2_real_f64(FN(exact_exponent)(p, row, b, x, j) - total);
            sum += d == 0 ? P : FN(exact_slope)(p, row, b, x, j, d - 1, P).slope;
        }
    }
    return sum;
}

typedef double FN(ExactSums)[MIXTURE_THREADS / WARP][MIXTURE_MAX_D + 1];

/* The exact queries of a tile of 128: their totals and gradients, and their part in the bandwidths' sums. A warp has its own.
 */
DEVICE void FN(exact_tile)(const MixturePlan &plan, int64_t b, int64_t tile, FN(Row) &row,
                           FN(ExactSums) &sums, bool is_prepared) {
    const MixtureLogProb &p = plan.p;
    const int D = p.G + p.A;
    const int64_t i = tile * MIXTURE_THREADS + threadIdx.x;
    double *out = plan.bandwidth_sums + (b * plan.slots + tile) * (D + 1);
    const bool marked = i < p.M && ((const REAL *)p.log2_sum)[b * p.M + i] == INFINITY;
    const int count = __syncthreads_count(marked);
    if (threadIdx.x == 0) plan.flagged[b * plan.flags + tile] = count;
    if (count == 0) {
        if (threadIdx.x <= (unsigned)D) out[threadIdx.x] = 0;
        return;
    }
    if (!is_prepared) FN(prepare_row)(plan, b, row);
    double *sum = sums[warp_of_block()];
    if (lane_of_warp() <= D) sum[lane_of_warp()] = 0;
    __syncwarp();
    for (unsigned left = __ballot_sync(FULL_WARP, marked); left; left &= left - 1) {
        const int64_t k = __shfl_sync(FULL_WARP, b * p.M + i, __ffs((int)left) - 1);
        const REAL *x = (const REAL *)p.x + k * D;
        const double total = FN(exact_total)(p, row, b, x), grad = ((const REAL *)p.grad)[k];
        for (int d = 0; d < D; d++) {
            double squares = 0, to_x = 0;
            for (int64_t j = lane_of_warp(); total != -INFINITY && j < p.N; j += WARP) {
                FN(Slope) t = FN(exact_slope)(p, row, b, x, j, d, grad * exp2_real_f64(FN(exact_exponent)(p, row, b, x, j) - total));
                squares += t.square;
                to_x += t.slope;
            }
            squares = reduce_warp(squares, Add());
            to_x = reduce_warp(to_x, Add());
            if (lane_of_warp() > 0) continue;
            sum[d] += squares;
            if (p.grad_x) ((REAL *)p.grad_x)[k * D + d] = (REAL)-to_x;
        }
        if (lane_of_warp() > 0) continue;
        plan.totals[k] = total;
        sum[D] += total == -INFINITY ? 0 : total == total ? grad : total;
    }
    __syncthreads();
    if (threadIdx.x > (unsigned)D) return;
    double all = 0;
    for (int w = 0; w < MIXTURE_THREADS / WARP; w++) all += sums[w][threadIdx.x];
    out[threadIdx.x] = all;
}
