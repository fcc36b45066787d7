/* Two loops over bessel.h. Contract: log_i0.h. */
#ifndef REAL
#include "log_i0.h"

#include "bessel.h"
#define MDPS_FILE "log_i0.c"
#include "for_each_real.h"
#else

CLONES void FN(log_i0)(int64_t begin, int64_t end, void *parameters) {
    const LogI0 *p = parameters;
    const REAL *k = p->concentration;
    REAL *out = p->log_i0;
    for (int64_t n = begin; n < end; n++) out[n] = (REAL)log_i0_plain(fabs((double)k[n]));
}

CLONES void FN(log_i0_backward)(int64_t begin, int64_t end, void *parameters) {
    const LogI0 *p = parameters;
    const REAL *k = p->concentration, *grad = p->grad_log_i0;
    REAL *out = p->grad_concentration;
    for (int64_t n = begin; n < end; n++) out[n] = (REAL)(grad[n] * copysign(bessel_ratio(fabs((double)k[n])), (double)k[n]));
}
#endif
