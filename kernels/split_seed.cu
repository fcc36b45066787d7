/* A thread a seed. Contract: split_seed.h. */
#include "split_seed.h"

#include "cuda_block.cuh"
enum { THREADS = 256 };

static __global__ void split(SplitSeed p) {
    const int64_t i = thread_of_grid(), b = i / p.n;
    if (b >= p.B) return;
    Words r = words_of_block(source_of_row(p.seed, b), KIND_SPLIT, i - b * p.n);
    p.out[i] = (int64_t)((uint64_t)r.y << 32 | r.x);
}

int split_seed_cuda(const void *parameters, int64_t, int, void *stream) {
    const SplitSeed *p = (const SplitSeed *)parameters;
    return launch(split, (p->B * p->n + THREADS - 1) / THREADS, THREADS, 0, stream, *p);
}
