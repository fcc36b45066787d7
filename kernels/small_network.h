/* A small multilayer perceptron applied to every particle: y[b][n] = network(x[b][n]).
 *
 *   x          (B, N, C)    inputs of the first layer
 *   extra      (B, N, E)    further values of each particle that enter at a later layer (noise, densities); may be absent
 *   condition  (B, K)       values that all particles of a row share (an observation's code); may be absent
 *   weights    (R, P)       R sets of parameters: the rows [r B/R, (r + 1) B/R) use set r; R divides B
 *   y          (B, N, out)
 *
 * Layer l maps the joined columns [output of layer l - 1, or x | extra | condition] to `out` values and applies its
 * activation. Its parameters are the matrix (out, columns) row by row, the bias (out) and, with PReLU, the slope. extra and
 * condition enter at one layer each.
 *
 * The caller sets the sizes, the pointers and of each layer enters_extra, enters_condition, out and activation, calls
 * small_network_layout, which fills in the rest, and gives `scratch`. Then prepare on all sets [0, R), which serves as long as
 * the weights stay, share on all rows [0, B), which does nothing without a condition, forward or backward on all chunks
 * [0, R * chunks) in any split, and after backward finish on all sets. A chunk is a run of particles of one set: it sums the
 * gradients of its own, and finish adds them in order, so that the bits do not depend on the number of threads. There are at
 * most 64 chunks, or one per set. A call works in the tile of its first chunk.
 *
 * Backward computes the activations again: nothing but the inputs is kept. A NaN stays in its particle, and in the gradients of
 * what that particle used. Cost: P multiply-adds a particle forward, 3 P backward; memory for 64 tiles and 64 P sums.
 *
 * CUDA: small_network_layout_cuda, then a launcher, which does all chunks and what prepare, share and finish do. A chunk is a
 * block; there are at most 1024, fewer backward where P is above 4096, or one per set. The condition enters as further columns.
 */
#ifndef MDPS_SMALL_NETWORK_H
#define MDPS_SMALL_NETWORK_H
#include <stdbool.h>
#include <stdint.h>

#include "clones.h"
#include "cuda_launch.h"

enum { NETWORK_NONE, NETWORK_RELU, NETWORK_TANH, NETWORK_SIGMOID, NETWORK_PRELU, NETWORK_ACTIVATIONS };
enum { NETWORK_LAYERS = 16, NETWORK_WIDTH = 256 };
/* What stands before and behind the layers: nothing, or the poses of move_poses.h or weigh_poses.h, which say what x, y and
 * their gradients then are, and set C. */
enum { NETWORK_ALONE, NETWORK_MOVES_POSES, NETWORK_WEIGHS_POSES };

typedef struct {
    bool enters_extra, enters_condition;
    int out, activation;
    /* by small_network_layout: */
    int in, extra, joined, columns; /* columns of the previous output, of extra, of both, and of the matrix */
    int64_t weights, bias, slope;   /* where in a set they begin */
    int row, z_row;                 /* where in a tile the inputs and the values before the activation lie */
} NetworkLayer;

typedef struct {
    int n_layers, C, E, K;
    NetworkLayer layer[NETWORK_LAYERS];
    int form;                    /* NETWORK_ALONE, or what uses the fields of the next two lines */
    const void *scale;           /* move_poses */
    double minimum, least_extra; /* weigh_poses */
    int64_t R, B, N;
    const void *x, *extra, *condition, *weights;
    void *y;
    const void *grad_y;                                        /* backward; NULL: forward alone */
    void *grad_x, *grad_extra, *grad_condition, *grad_weights; /* backward; grad_x, grad_extra may be NULL: not wanted */
    void *scratch;                                             /* scratch_size numbers, aligned to 64 bytes */
    /* by small_network_layout: */
    int64_t P;                      /* parameters of a set */
    int64_t per_set, chunk, chunks; /* particles of a set and of a chunk; chunks of a set */
    int64_t scratch_size, at_share, at_grad_share, at_grad_weights, at_tiles, tile_size; /* scratch and its parts */
    int rows, widest;    /* rows of a tile, and of its widest layer */
    int pose_row;        /* where in a tile three rows for poses lie */
    int conditioned;     /* the layer that condition enters, or -1 */
    int in_shared;       /* CUDA: what is, see below */
    int64_t shared_size; /* CUDA: numbers in shared memory */
} SmallNetwork;

/* CUDA: particles of a tile; warps of a block; a warp's piece of a matrix, which it multiplies with. A row of either has 16
 * bytes more: eight threads that read a vector of 16 bytes from eight rows then meet no bank of shared memory twice. */
enum { NETWORK_TILE = 16, NETWORK_WARPS = 8, NETWORK_PIECE_ROWS = 8, NETWORK_PIECE = 32 };
enum { NETWORK_IN_SCRATCH, NETWORK_TILE_IN_SHARED, NETWORK_ALL_IN_SHARED }; /* all: the weights and their sums too */
INLINE int network_stride(int size_of_real) { return NETWORK_TILE + 16 / size_of_real; }
INLINE int network_piece_stride(int size_of_real) { return NETWORK_PIECE + 16 / size_of_real; }
INLINE int network_pieces(int size_of_real) { return NETWORK_WARPS * NETWORK_PIECE_ROWS * network_piece_stride(size_of_real); }

void small_network_layout(SmallNetwork *p);
void small_network_layout_cuda(SmallNetwork *p, int size_of_real);
void small_network_prepare_f32(int64_t begin, int64_t end, void *parameters);
void small_network_prepare_f64(int64_t begin, int64_t end, void *parameters);
void small_network_share_f32(int64_t begin, int64_t end, void *parameters);
void small_network_share_f64(int64_t begin, int64_t end, void *parameters);
void small_network_forward_f32(int64_t begin, int64_t end, void *parameters);
void small_network_forward_f64(int64_t begin, int64_t end, void *parameters);
void small_network_backward_f32(int64_t begin, int64_t end, void *parameters);
void small_network_backward_f64(int64_t begin, int64_t end, void *parameters);
void small_network_finish_f32(int64_t begin, int64_t end, void *parameters);
void small_network_finish_f64(int64_t begin, int64_t end, void *parameters);
LAUNCHER int small_network_forward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
LAUNCHER int small_network_backward_cuda(const void *parameters, int64_t n, int is_double, void *stream);
#endif
