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

#define MDPS_FILE "activations.h"
#include "for_each_real.h"
#undef MDPS_FILE

enum { TILE = 128, LEAST_CHUNK = 2048, MOST_CHUNKS = 64 };

static int64_t aligned(int64_t numbers) { return (numbers + 15) / 16 * 16; }

static void place_layers(SmallNetwork *p) {
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
        a->row = row;
        row += a->joined;
        a->z_row = row; /* in place, but PReLU's derivative needs z: see below */
        if (a->joined > p->widest) p->widest = a->joined;
        if (a->out > p->widest) p->widest = a->out;
        in = a->out;
    }
    row += in;
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
    place_layers(p);
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
CHOOSE(forward, f32)
CHOOSE(forward, f64)
CHOOSE(backward, f32)
CHOOSE(backward, f64)
CHOOSE(finish, f32)
CHOOSE(finish, f64)
