/* The value of an IWSG log-weight is known. Contract: iwsg_log_weights.h. */
#ifndef REAL
#include "iwsg_log_weights.h"
#include <string.h>
#define MDPS_FILE "iwsg_log_weights.c"
#include "for_each_real.h"
#else

void FN(iwsg_log_weights)(int64_t begin, int64_t end, void *parameters) {
    const IwsgLogWeights *p = parameters;
    memset((REAL *)p->log_weights + begin, 0, sizeof(REAL) * (size_t)(end - begin));
}
#endif
