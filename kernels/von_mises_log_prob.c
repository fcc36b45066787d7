/* Equal concentrations that follow each other, as broadcasting makes them, share one Bessel evaluation; the loop over their
 * angles vectorises. Contract: von_mises_log_prob.h. */
#ifndef REAL
#include "von_mises_log_prob.h"

#include "bessel.h"
#define MDPS_FILE "von_mises_log_prob.c"
#include "for_each_real.h"
#else
#include "real_math.h"

/* The end of the run of equal concentrations that starts at n. */
INLINE int64_t FN(run_end)(const REAL *concentration, int64_t n, int64_t end) {
    int64_t last = n + 1;
    while (last < end && concentration[last] == concentration[n]) last++;
    return last;
}

CLONES void FN(von_mises_log_prob)(int64_t begin, int64_t end, void *parameters) {
    const VonMisesLogProb *p = parameters;
    const REAL *x = p->x, *mean = p->mean, *concentration = p->concentration;
    REAL *log_prob = p->log_prob;
    for (int64_t n = begin, last; n < end; n = last) {
        last = FN(run_end)(concentration, n, end);
        const double k = concentration[n] >= 0 ? (double)concentration[n] : NAN;
        const double peak = -log_i0_scaled(k) - 1.8378770664093455; /* log(2 pi) */
        for (int64_t i = n; i < last; i++) {
            double u = turns_f64((double)x[i] - (double)mean[i]), s = u * sinpi_over_f64(u * u);
            log_prob[i] = (REAL)(peak - 2 * k * s * s);
        }
    }
}

CLONES void FN(von_mises_log_prob_backward)(int64_t begin, int64_t end, void *parameters) {
    const VonMisesLogProb *p = parameters;
    const REAL *x = p->x, *mean = p->mean, *concentration = p->concentration, *grad = p->grad_log_prob;
    REAL *grad_x = p->grad_x, *grad_mean = p->grad_mean, *grad_concentration = p->grad_concentration;
    for (int64_t n = begin, last; n < end; n = last) {
        last = FN(run_end)(concentration, n, end);
        const double k = concentration[n] >= 0 ? (double)concentration[n] : NAN;
        const double spread = one_minus_bessel_ratio(k);
        for (int64_t i = n; i < last; i++) {
            double u = turns_f64((double)x[i] - (double)mean[i]), s = u * sinpi_over_f64(u * u), c = cospi_poly_f64(u * u);
            double g = 2 * k * s * c * (double)grad[i];
            grad_x[i] = (REAL)-g;
            grad_mean[i] = (REAL)g;
            grad_concentration[i] = (REAL)((spread - 2 * s * s) * (double)grad[i]);
        }
    }
}
#endif
