/* First weights and sums. Contract: filter_poses.h. */
#ifndef REAL
#include "filter_poses.h"
#include <math.h>
#define MDPS_FILE "filter_poses.c"
#include "for_each_real.h"
#else

void FN(filter_poses_begin)(int64_t begin, int64_t end, void *parameters) {
    const FilterPosesBegin *p = parameters;
    const int64_t first = p->B * p->N;
    const REAL weight = (REAL)-log((double)p->N);
    for (int64_t i = begin; i < end; i++) ((REAL *)p->predicted)[i] = weight;
    for (int64_t i = begin; i < end && i < first; i++) p->ancestors[i] = i % p->N;
}

CLONES void FN(filter_poses_add)(int64_t begin, int64_t end, void *parameters) {
    const FilterPosesAdd *p = parameters;
    const REAL *a = p->a ? p->a : p->b, *b = p->a ? p->b : 0;
    REAL *sum = p->sum;
    if (b) {
        for (int64_t i = begin; i < end; i++) sum[i] = a[i] + b[i];
    } else {
        for (int64_t i = begin; i < end; i++) sum[i] = a ? a[i] : 0;
    }
}
#endif
