/* Queries that are computed exactly: in double, pair by pair, straight from the arguments (REAL, FN: for_each_real.h; no
 * include guard). For those that no heavy component is near, that lie far from the centre of their row, or whose row holds what
 * is not finite or kernels too narrow for REAL. */
#include "mixture_block.cuh"

/* log2 of weight times kernel over its value at the mean, in double, straight from the arguments. */
DEVICE double FN(exact_exponent)(const MixtureLogProb &p, const FN(Row) & row, int64_t b, const REAL *x, int64_t j) {
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
DEVICE double FN(exact_total)(const MixtureLogProb &p, const FN(Row) & row, int64_t b, const REAL *x) {
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
    FN(exact_slope)(const MixtureLogProb &p, const FN(Row) & row, int64_t b, const REAL *x, int64_t j, int d, double P) {
    const double r = row.scale[d], away = (double)x[d] - (double)((const REAL *)p.means)[(b * p.N + j) * (p.G + p.A) + d];
    if (d < p.G) return {P * 2 / LOG2E * (away * r) * (away * r), P * 2 / LOG2E * away * r * r};
    const double u = turns_f64(away), s = u * sinpi_over_f64(u * u);
    return {P * 2 * s * s, P * r * r / LOG2E * s * cospi_poly_f64(u * u)};
}

/* What the exact queries among [first, last) give number d of component j: 0 is its weight, then its mean. */
DEVICE double FN(from_exact_queries)(const MixturePlan &plan, const FN(Row) & row, int64_t b, int64_t first, int64_t last,
                                     int64_t j, int d) {
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
