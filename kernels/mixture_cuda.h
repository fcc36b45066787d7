/* How the GPU cuts mixture_log_prob into blocks, and where in scratch memory what lies; the same on every card, so that the
 * bits are. For mixture_log_prob.cu, mixture_log_prob_backward.cu, and the shim, which allocates what the functions here
 * return.
 *
 * A block has MIXTURE_THREADS threads. "Stationary" queries (or components) stay in registers, per_thread of them a thread, a
 * tile a block; the others pass by through shared memory. Where rows x tiles are too few to fill a card, those that pass are
 * split among blocks, whose sums a last launch adds in order. Rows of more than MIXTURE_PART components are measured (largest
 * weight, range of the coordinates) in parts by a first launch; otherwise every block measures its row itself.
 */
#ifndef MDPS_MIXTURE_CUDA_H
#define MDPS_MIXTURE_CUDA_H
#include <stddef.h>

#include "clones.h"
#include "mixture_log_prob.h"

enum { MIXTURE_THREADS = 128, MIXTURE_PART = 512, MIXTURE_PROCESSORS = 132 /* of an H100 */ };

typedef struct {
    int64_t per_thread, tiles;    /* of what is stationary */
    int64_t splits, split_length; /* of what passes by */
} MixtureCut;

typedef struct {
    MixtureLogProb p;
    int64_t parts;                  /* of a row; 1: it is not measured by a launch of its own */
    MixtureCut queries, components; /* by what is stationary; components: backward alone */
    int64_t flags, slots;           /* of a row: tiles of MIXTURE_THREADS queries; blocks with sums for the bandwidths */
    void *extremes;                 /* (B, parts, 2 + 2 G) REAL, if parts > 1 */
    void *query_sums;               /* forward: (splits, B, M), backward: (splits, B, M, D) REAL, if splits > 1 */
    void *component_sums;           /* (splits, B, N, 1 + D) REAL, if splits > 1 */
    double *totals;                 /* (B, M): log2 of the sum of each query that is computed exactly */
    int32_t *flagged;               /* (B, flags): how many these are */
    double *bandwidth_sums;         /* (B, slots, D + 1) */
} MixturePlan;

INLINE int64_t mixture_blocks_for(int64_t n, int64_t each) { return (n + each - 1) / each; }

/* A row that one block does whole, backward. */
INLINE bool mixture_is_small(const MixtureLogProb *p) {
    return p->M > 0 && p->M <= MIXTURE_THREADS && p->N > 0 && p->N <= MIXTURE_THREADS;
}

/* `many` stationary items a thread where few of them are idle then and enough blocks are left, otherwise one. As many splits as
 * give the multiprocessors of a card the least to do, by the blocks that the busiest one has; two of them it can take at once.
 */
INLINE MixtureCut mixture_cut(int64_t B, int64_t stationary, int64_t passing, int64_t many) {
    const int64_t pieces = mixture_blocks_for(passing, MIXTURE_THREADS),
                  least = mixture_blocks_for(stationary, MIXTURE_THREADS);
    const int64_t tiles_of_many = mixture_blocks_for(stationary, many * MIXTURE_THREADS);
    const bool is_full = 10 * tiles_of_many * many <= 11 * least && B * tiles_of_many * pieces >= 2 * MIXTURE_PROCESSORS;
    MixtureCut cut;
    cut.per_thread = is_full ? many : 1;
    cut.tiles = is_full ? tiles_of_many : least;
    const int64_t rows = B * cut.tiles, enough = rows ? mixture_blocks_for(2 * MIXTURE_PROCESSORS, rows) : 1;
    int64_t best = INT64_MAX, splits = 1;
    for (int64_t s = 1; s <= pieces && s <= (enough > 16 ? enough : 16); s++) {
        int64_t busiest = mixture_blocks_for(rows * s, MIXTURE_PROCESSORS);
        int64_t work = (busiest > 2 ? busiest : 2) * mixture_blocks_for(pieces, s);
        if (work < best) best = work, splits = s;
    }
    cut.split_length = mixture_blocks_for(pieces, splits) * MIXTURE_THREADS;
    cut.splits = pieces > 0 ? mixture_blocks_for(passing, cut.split_length) : 1;
    return cut;
}

/* Scratch of 8 bytes' multiples from *at on; NULL where nothing is needed. */
INLINE void *mixture_place(char **at, int64_t bytes) {
    void *place = bytes ? *at : NULL;
    *at += (bytes + 63) / 64 * 64;
    return place;
}

/* Fills in the plan of the forward or backward pass, with p->scratch as its memory; returns the bytes that it takes. */
INLINE int64_t mixture_plan(MixturePlan *plan, const MixtureLogProb *p, int is_double, int backward) {
    const int64_t real = is_double ? 8 : 4, D = p->G + p->A;
    const bool is_pose = p->G == 2 && p->A == 1; /* these have kernels of their own, with registers for several items */
    const bool is_special = is_pose || (!is_double && p->A == 0 && (p->G == 2 || p->G == 3));
    const int64_t many = !is_special ? 1 : is_double ? 2 : 4;
    char *start = (char *)p->scratch, *at = start;
    plan->p = *p;
    plan->parts = mixture_blocks_for(p->N, MIXTURE_PART) < 64 ? mixture_blocks_for(p->N, MIXTURE_PART) : 64;
    plan->queries = mixture_cut(p->B, p->M, p->N, many);
    plan->components = mixture_cut(p->B, p->N, p->M, many);
    if (backward && plan->queries.per_thread != plan->components.per_thread) { /* one kernel has both */
        plan->queries = mixture_cut(p->B, p->M, p->N, 1);
        plan->components = mixture_cut(p->B, p->N, p->M, 1);
    }
    plan->flags = mixture_blocks_for(p->M, MIXTURE_THREADS);
    plan->slots = plan->flags + plan->queries.tiles * plan->queries.splits + plan->components.tiles * plan->components.splits;
    plan->extremes = mixture_place(&at, plan->parts > 1 ? p->B * plan->parts * (2 + 2 * p->G) * real : 0);
    plan->query_sums =
        mixture_place(&at, plan->queries.splits > 1 ? plan->queries.splits * p->B * p->M * (backward ? D : 1) * real : 0);
    if (!backward) return at - start;
    plan->component_sums =
        mixture_place(&at, plan->components.splits > 1 ? plan->components.splits * p->B * p->N * (1 + D) * real : 0);
    plan->totals = (double *)mixture_place(&at, p->B * p->M * 8);
    plan->flagged = (int32_t *)mixture_place(&at, p->B * plan->flags * 4);
    plan->bandwidth_sums = (double *)mixture_place(&at, p->B * plan->slots * (D + 1) * 8);
    return at - start;
}
#endif
