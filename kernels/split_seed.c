/* Contract: split_seed.h. */
#include "split_seed.h"

CLONES void split_seed(int64_t begin, int64_t end, void *parameters) {
    const SplitSeed *p = parameters;
    for (int64_t b = begin; b < end; b++) {
        Source s = source_of_row(p->seed, b);
        int64_t *out = p->out + b * p->n;
        for (int64_t i = 0; i < p->n; i++) {
            Words r = words_of_block(s, KIND_SPLIT, i);
            out[i] = (int64_t)((uint64_t)r.y << 32 | r.x);
        }
    }
}
