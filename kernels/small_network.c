/* Where everything lies, and the choice of the instruction set. Contract: small_network.h.
 *
 * The arithmetic is written with GNU vectors (small_network_tile.h, small_network_passes.h): lanes are particles, and a block
 * of 8 outputs x 32 particles stays in registers. Loops that gcc vectorises send the block through memory before and
 * after the loop over inputs: 86 GFLOP/s against 136 at 8 inputs, 155 against 168 at 64 (AVX-512, ceiling 165 to 185).
 *
 * GNU vectors exclude CLONES: they are lowered before gcc clones a function, and a vector wider than the target's becomes
 * scalar code, 60 times slower. So the two files are included once for each target, with the width of a vector (BYTES) that it
 * has, between pragmas that set the target; ON(name) is name_f32_v4 and the like, and the functions at the end choose.
 */
#include "small_network.h"

#define MDPS_FILE "pose_math.h"
#include "for_each_real.h"
#undef MDPS_FILE

enum { TILE = 128, LEAST_CHUNK = 2048, MOST_CHUNKS = 64 };
/* CUDA: chunks of all sets, which have a block each, fewer where tiles or sums would take too much scratch memory; bytes of
 * shared memory that every GPU from compute capability 8.0 on has; parameters that are copied there. */
enum { MOST_BLOCKS = 1024, MOST_TILES = 256, MOST_SUMS = 1 << 22, LEAST_BLOCKS = 64 };
enum { MOST_SHARED = 96 * 1024, MOST_SHARED_WEIGHTS = 4096 };

static int64_t aligned(int64_t numbers) { return (numbers + 15) / 16 * 16; }

/* condition_enters: as rows of the tile, on the GPU. */
static void place_layers(SmallNetwork *p, bool condition_enters) {
    int row = 0, in = p->C;
    p->conditioned = -1;
    p->widest = p->C;
    p->P = 0;
    for (int l = 0; l < p->n_layers; l++) {
        NetworkLayer *a = &p->layer[l];
        a->in = in;
        a->extra = a->enters_extra ? p->E : 0;
        a->joined = in + a->extra;
        a->columns = a->joined + (a->enters_condition ? p->K : 0);
        if (a->enters_condition) p->conditioned = l;
        a->weights = p->P;
        a->bias = a->weights + (int64_t)a->out * a->columns;
        a->slope = a->bias + a->out;
        p->P = a->slope + (a->activation == NETWORK_PRELU);
        int entering = condition_enters ? a->columns : a->joined;
        a->row = row;
        row += entering;
        a->z_row = row; /* in place, but PReLU's derivative needs z: see below */
        if (entering > p->widest) p->widest = entering;
        if (a->out > p->widest) p->widest = a->out;
        in = a->out;
    }
    row += in;
    p->pose_row = row;
    if (p->form != NETWORK_ALONE) row += 3;
    for (int l = 0; l < p->n_layers; l++)
        if (p->layer[l].activation == NETWORK_PRELU) {
            p->layer[l].z_row = row;
            row += p->layer[l].out;
        }
    p->rows = row;
}

/* scratch: [matrices, transposed (R, P) | condition's share of its layer (B, out) | its gradient (B + all chunks, out), a row
 * that two chunks share having a place in each | gradients of the weights (all chunks, P) | one tile per chunk]. */
void small_network_layout(SmallNetwork *p) {
    place_layers(p, false);
    p->per_set = p->B / p->R * p->N;
    int64_t most = p->R < MOST_CHUNKS ? MOST_CHUNKS / p->R : 1;
    p->chunk = (p->per_set + most - 1) / most;
    p->chunk = p->chunk > LEAST_CHUNK ? (p->chunk + TILE - 1) / TILE * TILE : LEAST_CHUNK;
    p->chunks = (p->per_set + p->chunk - 1) / p->chunk;
    int64_t all = p->R * p->chunks, out = p->conditioned < 0 ? 0 : p->layer[p->conditioned].out;
    bool backward = p->grad_y != NULL;
    p->at_share = aligned(p->R * p->P);
    p->at_grad_share = p->at_share + aligned(p->B * out);
    p->at_grad_weights = p->at_grad_share + (backward ? aligned((p->B + all) * out) : 0);
    p->at_tiles = p->at_grad_weights + (backward ? aligned(all * p->P) : 0);
    p->tile_size = (p->rows + 3 * p->widest + 1) * TILE + (backward ? 16 * p->P : 0); /* 16: most lanes of a vector */
    p->scratch_size = p->at_tiles + all * p->tile_size;
}

/* scratch: [sums of the condition's deltas (B + all chunks, out) | gradients of the weights (all chunks, P) | tiles, where they
 * do not fit into shared memory]; shared: [pieces of matrices, one per warp | tile, two rows of deltas | weights | sums]. */
void small_network_layout_cuda(SmallNetwork *p, int size_of_real) {
    place_layers(p, true);
    const bool backward = p->grad_y != NULL;
    const int64_t most_shared = MOST_SHARED / size_of_real;
    p->tile_size = (p->rows + (backward ? 2 * p->widest : 0)) * network_stride(size_of_real);
    p->shared_size = network_pieces(size_of_real) + p->tile_size;
    p->in_shared = p->shared_size <= most_shared ? NETWORK_TILE_IN_SHARED : NETWORK_IN_SCRATCH;
    if (!p->in_shared) p->shared_size -= p->tile_size;
    else if (p->P <= MOST_SHARED_WEIGHTS && p->shared_size + (backward ? 2 : 1) * p->P <= most_shared) {
        p->in_shared = NETWORK_ALL_IN_SHARED;
        p->shared_size += (backward ? 2 : 1) * p->P;
    }
    int64_t most = p->in_shared ? MOST_BLOCKS : MOST_TILES;
    if (backward && most > MOST_SUMS / p->P) most = MOST_SUMS / p->P < LEAST_BLOCKS ? LEAST_BLOCKS : MOST_SUMS / p->P;
    most = p->R < most ? most / p->R : 1;
    p->per_set = p->B / p->R * p->N;
    int64_t tiles = (p->per_set + NETWORK_TILE - 1) / NETWORK_TILE;
    p->chunk = NETWORK_TILE * (tiles > most ? (tiles + most - 1) / most : 1);
    p->chunks = (p->per_set + p->chunk - 1) / p->chunk;
    int64_t all = p->R * p->chunks, out = p->conditioned < 0 ? 0 : p->layer[p->conditioned].out;
    p->at_grad_share = 0;
    p->at_grad_weights = backward ? aligned((p->B + all) * out) : 0;
    p->at_tiles = p->at_grad_weights + (backward ? aligned(all * p->P) : 0);
    p->scratch_size = p->at_tiles + (p->in_shared ? 0 : all * p->tile_size);
}

#define ON(name) ON_(FN(name), TARGET)
#define ON_(name, target) ON__(name, target)
#define ON__(name, target) name##_##target
#define MDPS_FILE "small_network_passes.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(MDPS_NO_CLONES)
#define HAS_TARGETS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4,prefer-vector-width=512")
#define TARGET v4
#define BYTES 64
#include "for_each_real.h"
#undef TARGET
#undef BYTES
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define TARGET v3
#define BYTES 32
#include "for_each_real.h"
#undef TARGET
#undef BYTES
#pragma GCC pop_options
#endif
#define TARGET baseline
#define BYTES 16
#include "for_each_real.h"

#ifdef HAS_TARGETS
#define CHOOSE(pass, real)                                                                        \
    void small_network_##pass##_##real(int64_t begin, int64_t end, void *parameters) {            \
        if (__builtin_cpu_supports("x86-64-v4")) pass##_##real##_v4(begin, end, parameters);      \
        else if (__builtin_cpu_supports("x86-64-v3")) pass##_##real##_v3(begin, end, parameters); \
        else pass##_##real##_baseline(begin, end, parameters);                                    \
    }
#else
#define CHOOSE(pass, real)                                                             \
    void small_network_##pass##_##real(int64_t begin, int64_t end, void *parameters) { \
        pass##_##real##_baseline(begin, end, parameters);                              \
    }
#endif
CHOOSE(prepare, f32)
CHOOSE(prepare, f64)
CHOOSE(share, f32)
CHOOSE(share, f64)
CHOOSE(forward, f32)
CHOOSE(forward, f64)
CHOOSE(backward, f32)
CHOOSE(backward, f64)
CHOOSE(finish, f32)
CHOOSE(finish, f64)
