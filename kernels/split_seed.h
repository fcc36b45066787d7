/* New, independent seeds from one: seed i of a row is the first 64 bits of block i of kind KIND_SPLIT (philox.h), so that it
 * does not depend on n. Source: the splitting of counter-based generators of Claessen & Palka 2013, as in JAX.
 *
 *   seed  () or (B)  int64, with a stream number
 *   out   (B, n)     int64
 *
 * Items are rows. Cost: a block a seed.
 */
#ifndef MDPS_SPLIT_SEED_H
#define MDPS_SPLIT_SEED_H
#include "cuda_launch.h"
#include "philox.h"

typedef struct {
    int64_t B, n;
    Seed seed;
    int64_t *out;
} SplitSeed;

void split_seed(int64_t begin, int64_t end, void *parameters);
LAUNCHER int split_seed_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
