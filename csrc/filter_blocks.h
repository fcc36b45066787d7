/* How filter_poses shares its rows out: a thread takes a block of them through all steps and meets no other thread on its way.
 * Blocks depend on the sizes alone, so that the bits do not depend on the threads. */
#ifndef MDPS_FILTER_BLOCKS_H
#define MDPS_FILTER_BLOCKS_H
#include "filter_models.h"

/* Each is within a set of either network; their sizes differ by a row at most. On a GPU all rows are one. */
typedef struct {
    int64_t n, of_set, rows_of_set; /* blocks, blocks of a set that both networks have, its rows */
} FilterBlocks;
FilterBlocks filter_blocks(Call *call, const FilterModels *all);

/* What a block does, with models and a Call of its own. */
typedef void BlockWork(Call *call, FilterModels *m, int64_t block, void *parameters);
void each_block(Call *call, const FilterBlocks *b, const FilterModels *all, BlockWork *work, void *parameters);

/* Zeros for a gradient that blocks share, (n, numbers): of all its numbers on a GPU, else of those of a set. */
Tensor new_sums(Call *call, const FilterBlocks *b, const Tensor *gradient);
/* gradient = the sums of its blocks, in order. */
void add_sums(Call *call, const FilterBlocks *b, const Tensor *sums, Tensor gradient);
#endif
