/* The kernels of a form of the network, FORM, included for each type by small_network.cu, move_poses.cu and weigh_poses.cu: a
 * block takes tiles of 16 particles through all layers, in shared memory. Contract: small_network.h. One launch forward, two
 * backward: the second one adds the chunks' sums in order.
 *
 * A set of at most 4096 parameters lies in shared memory too, and so do the chunk's sums of its gradients; wider matrices come
 * from the L1 cache piece by piece while the warp multiplies (small_network_tile.cuh).
 */
#ifndef MDPS_SMALL_NETWORK_PASSES_CUH
#define MDPS_SMALL_NETWORK_PASSES_CUH
#include "cuda_block.cuh"
enum { THREADS = WARP * NETWORK_WARPS };
DEVICE int at_most(int i, int last) { return i < last ? i : last; }
#endif
#include "pose_math.h"
#include "small_network_tile.cuh"
#include "small_network_poses.cuh"

DEVICE REAL *FN(sums_of_chunk)(const SmallNetwork &p) { return (REAL *)p.scratch + p.at_grad_weights + blockIdx.x * p.P; }

template <int PLACE> DEVICE FN(Tile) FN(begin_chunk)(const SmallNetwork &p) {
    FN(Tile) t;
    REAL *shared = shared_memory<REAL>(), *rows = shared + network_pieces(sizeof(REAL));
    const unsigned chunks = (unsigned)p.chunks, set = blockIdx.x / chunks;
    const int64_t end = (set + 1) * p.per_set;
    t.row = set * p.per_set + blockIdx.x % chunks * p.chunk;
    t.stop = t.row + p.chunk < end ? t.row + p.chunk : end;
    t.is_first = true;
    t.pieces = shared;
    t.rows = PLACE == NETWORK_IN_SCRATCH ? (REAL *)p.scratch + p.at_tiles + blockIdx.x * p.tile_size : rows;
    t.delta = t.rows + p.rows * STRIDE;
    t.next = t.delta + p.widest * STRIDE;
    const REAL *weights = (const REAL *)p.weights + set * p.P;
    REAL *copy = rows + p.tile_size;
    if (PLACE == NETWORK_ALL_IN_SHARED)
#pragma unroll 4
        for (int i = threadIdx.x; i < (int)p.P; i += THREADS) copy[i] = weights[i];
    t.weights = PLACE == NETWORK_ALL_IN_SHARED ? copy : weights;
    t.sums = PLACE == NETWORK_ALL_IN_SHARED ? copy + p.P : FN(sums_of_chunk)(p);
    return t;
}

DEVICE bool FN(begin_tile)(FN(Tile) &t) {
    t.n = t.stop - t.row < NETWORK_TILE ? (int)(t.stop - t.row) : NETWORK_TILE;
    return t.n > 0;
}
DEVICE void FN(end_tile)(FN(Tile) &t) {
    t.row += t.n;
    t.is_first = false;
}

/* Of each particle's batch row; as FN(load). */
DEVICE void FN(load_condition)(const SmallNetwork &p, const FN(Tile) &t, int thread, REAL *a) {
    const int64_t first = t.row / p.N, at = t.row % p.N;
    for (int i = (THREADS + threadIdx.x - thread % THREADS) % THREADS; i < NETWORK_TILE * p.K; i += THREADS) {
        const int particle = i / p.K, k = i % p.K;
        int64_t b = first, n = at + at_most(particle, t.n - 1);
        for (; n >= p.N; n -= p.N) b++;
        a[k * STRIDE + particle] = ((const REAL *)p.condition)[b * p.K + k];
    }
}

DEVICE void FN(load_inputs)(const SmallNetwork &p, const FN(Tile) &t) {
    if (FORM == NETWORK_ALONE) FN(load)(t, 0, p.C, p.x, t.rows);
    else FN(load_poses)(p, t);
    for (int l = 0; l < p.n_layers; l++) {
        const NetworkLayer &a = p.layer[l];
        REAL *in = t.rows + a.row * STRIDE;
        if (a.enters_extra) {
            FN(load)(t, NETWORK_TILE * p.C, p.E, p.extra, in + a.in * STRIDE);
            if (FORM == NETWORK_WEIGHS_POSES) FN(raise_extra)(p, NETWORK_TILE * p.C, in + a.in * STRIDE);
        }
        if (a.enters_condition) FN(load_condition)(p, t, NETWORK_TILE * (p.C + p.E), in + a.joined * STRIDE);
    }
}

DEVICE REAL FN(slope_of)(const FN(Tile) &t, const NetworkLayer &a) { return a.activation == NETWORK_PRELU ? t.weights[a.slope] : 0; }

DEVICE const REAL *FN(outputs)(const SmallNetwork &p, const FN(Tile) &t) {
    const NetworkLayer &last = p.layer[p.n_layers - 1];
    return t.rows + (last.row + last.columns) * STRIDE;
}

/* A barrier before and after each layer. */
DEVICE void FN(forward_tile)(const SmallNetwork &p, const FN(Tile) &t) {
    FN(load_inputs)(p, t);
    __syncthreads();
    for (int l = 0; l < p.n_layers; l++) {
        const NetworkLayer &a = p.layer[l];
        const bool rectify = a.activation == NETWORK_RELU;
        REAL *in = t.rows + a.row * STRIDE, *z = t.rows + a.z_row * STRIDE, *own = z + lane_of_warp() % NETWORK_TILE;
        const FN(Product) q = {0, a.out, a.columns, a.columns, t.weights + a.weights, t.weights + a.bias, in};
        FN(product)<false>(t, q, [=](int m, REAL s) { own[m * STRIDE] = rectify && s < 0 ? 0 : s; });
        __syncthreads();
        if (a.activation <= NETWORK_RELU) continue;
        FN(activate)(a.activation, a.out, FN(slope_of)(t, a), z, in + a.columns * STRIDE);
        __syncthreads();
    }
}

/* Three blocks leave 80 registers a thread: too few for the arctangent's doubles. */
template <int PLACE>
static __global__ void __launch_bounds__(THREADS, PLACE && !(IS_DOUBLE && FORM == NETWORK_MOVES_POSES) ? 3 : 2)
    FN(forward)(SmallNetwork p) {
    FN(Tile) t = FN(begin_chunk)<PLACE>(p);
    for (; FN(begin_tile)(t); FN(end_tile)(t)) {
        FN(forward_tile)(p, t);
        if (FORM == NETWORK_ALONE) FN(store)(t, p.layer[p.n_layers - 1].out, FN(outputs)(p, t), p.y);
        else FN(store_results)(p, t, FN(outputs)(p, t));
    }
}

/* Gradient of y, 0 in idle lanes. */
DEVICE void FN(load_delta)(const SmallNetwork &p, const FN(Tile) &t) {
    const int M = p.layer[p.n_layers - 1].out;
    const REAL *grad = (const REAL *)p.grad_y + t.row * M;
    for (int i = threadIdx.x; i < NETWORK_TILE * M; i += THREADS) t.delta[i % M * STRIDE + i / M] = i < t.n * M ? grad[i] : 0;
}

/* delta, the gradient of a layer's output, becomes that of its values before the activation. */
DEVICE void FN(pass_activation)(const FN(Tile) &t, const NetworkLayer &a) {
    const REAL *z = t.rows + a.z_row * STRIDE, *y = t.rows + (a.row + a.columns) * STRIDE;
    REAL sum = FN(deactivate)(a.activation, a.out, FN(slope_of)(t, a), z, y, t.delta);
    if (a.activation == NETWORK_PRELU) {
        sum = reduce_block(sum, (REAL)0, Add(), t.pieces);
        if (threadIdx.x == 0) t.sums[a.slope] = t.is_first ? sum : t.sums[a.slope] + sum;
    }
    __syncthreads();
}

/* Adds the deltas of each batch row's particles, one output a thread. A place is new where the chunk or the row begins. */
DEVICE void FN(gather)(const SmallNetwork &p, const FN(Tile) &t, int M) {
    const int m = threadIdx.x;
    if (m >= M) return;
    int64_t b = t.row / p.N, n = t.row % p.N;
    REAL *to = (REAL *)p.scratch + p.at_grad_share + (b + blockIdx.x) * M + m, sum = 0;
    bool is_new = t.is_first || n == 0;
    for (int i = 0; i < t.n; i++) {
        sum += t.delta[m * STRIDE + i];
        if (++n < p.N && i + 1 < t.n) continue;
        *to = is_new ? sum : *to + sum;
        to += M, n = 0, sum = 0, is_new = true;
    }
}

/* From the last layer to the first. */
DEVICE void FN(backward_tile)(const SmallNetwork &p, FN(Tile) &t) {
    if (FORM == NETWORK_ALONE) FN(load_delta)(p, t);
    else FN(load_gradients)(p, t, FN(outputs)(p, t));
    __syncthreads();
    bool gated = false; /* the product has applied ReLU's derivative already */
    for (int l = p.n_layers - 1; l >= 0; l--) {
        const NetworkLayer &a = p.layer[l];
        const REAL *in = t.rows + a.row * STRIDE;
        if (a.activation != NETWORK_NONE && !gated) FN(pass_activation)(t, a);
        FN(outer)(t.is_first, a.out, a.columns, t.delta, in, t.sums + a.weights, t.sums + a.bias);
        if (a.enters_condition) FN(gather)(p, t, a.out);
        const bool wants_extra = a.enters_extra && p.grad_extra;
        gated = l > 0 && p.layer[l - 1].activation == NETWORK_RELU;
        const int gates = gated ? a.in : 0, extra = a.in, lane = lane_of_warp() % NETWORK_TILE;
        const int begin = l > 0 || p.grad_x ? 0 : a.in, end = wants_extra ? a.joined : a.in;
        const FN(Product) q = {begin, end, a.out, a.columns, t.weights + a.weights, NULL, t.delta};
        REAL *next = t.next;
        FN(product)<true>(t, q, [=, &p](int m, REAL s) {
            const int at = m * STRIDE + lane;
            const bool raised = FORM == NETWORK_WEIGHS_POSES && m >= extra && in[at] <= (REAL)p.least_extra;
            next[at] = raised || (m < gates && in[at] <= 0) ? 0 : s;
        });
        __syncthreads();
        if (wants_extra) FN(store)(t, p.E, t.next + a.in * STRIDE, p.grad_extra);
        REAL *swap = t.delta;
        t.delta = t.next;
        t.next = swap;
    }
    if (!p.grad_x) return;
    if (FORM == NETWORK_ALONE) FN(store)(t, p.C, t.delta, p.grad_x);
    else FN(store_pose_gradient)(p, t);
}

template <int PLACE> static __global__ void __launch_bounds__(THREADS, PLACE ? 2 : 1) FN(backward)(SmallNetwork p) {
    FN(Tile) t = FN(begin_chunk)<PLACE>(p);
    for (; FN(begin_tile)(t); FN(end_tile)(t)) {
        FN(forward_tile)(p, t);
        FN(backward_tile)(p, t);
    }
    if (PLACE == NETWORK_ALL_IN_SHARED)
        for (int i = threadIdx.x; i < (int)p.P; i += THREADS) FN(sums_of_chunk)(p)[i] = t.sums[i];
}

/* WARP parameters of a set: each warp adds every eighth chunk. */
DEVICE void FN(finish_weights)(const SmallNetwork &p, int64_t set, int64_t i) {
    REAL sum = 0, *shared = shared_memory<REAL>();
    const REAL *sums = (const REAL *)p.scratch + p.at_grad_weights + set * p.chunks * p.P;
    if (i < p.P)
#pragma unroll 4
        for (int64_t c = warp_of_block(); c < p.chunks; c += NETWORK_WARPS) sum += sums[c * p.P + i];
    shared[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= WARP || i >= p.P) return;
    for (int w = 1; w < NETWORK_WARPS; w++) sum += shared[w * WARP + threadIdx.x];
    ((REAL *)p.grad_weights)[set * p.P + i] = sum;
}

/* A batch row's: the matrix, transposed, times the sum of the particles' deltas. */
DEVICE void FN(finish_condition)(const SmallNetwork &p, int64_t b) {
    const NetworkLayer &a = p.layer[p.conditioned];
    const int64_t set = b / (p.B / p.R), begin = b * p.N - set * p.per_set; /* the row's particles within the set */
    const int64_t first = begin / p.chunk, last = p.N ? (begin + p.N - 1) / p.chunk : -1;
    const REAL *by_row = (const REAL *)p.scratch + p.at_grad_share + (b + set * p.chunks) * a.out;
    const REAL *w = (const REAL *)p.weights + set * p.P + a.weights + a.joined;
    REAL *delta = shared_memory<REAL>();
    for (int m = threadIdx.x; m < a.out; m += THREADS) {
        REAL sum = 0;
#pragma unroll 4
        for (int64_t c = first; c <= last; c++) sum += by_row[c * a.out + m];
        delta[m] = sum;
    }
    __syncthreads();
    for (int k = threadIdx.x; k < p.K; k += THREADS) {
        REAL sum = 0;
        for (int m = 0; m < a.out; m++) sum += delta[m] * w[m * a.columns + k];
        ((REAL *)p.grad_condition)[b * p.K + k] = sum;
    }
}

static __global__ void __launch_bounds__(THREADS) FN(finish)(SmallNetwork p) {
    const unsigned per_set = (unsigned)(p.P + WARP - 1) / WARP, set = blockIdx.x / per_set;
    if (set < p.R) FN(finish_weights)(p, set, blockIdx.x % per_set * WARP + lane_of_warp());
    else FN(finish_condition)(p, blockIdx.x - p.R * per_set);
}

static int FN(launch_forward)(const SmallNetwork &p, void *stream) {
    auto kernel = p.in_shared == NETWORK_ALL_IN_SHARED    ? FN(forward)<NETWORK_ALL_IN_SHARED>
                  : p.in_shared == NETWORK_TILE_IN_SHARED ? FN(forward)<NETWORK_TILE_IN_SHARED>
                                                          : FN(forward)<NETWORK_IN_SCRATCH>;
    return launch(kernel, p.R * p.chunks, THREADS, p.shared_size * sizeof(REAL), stream, p);
}

static int FN(launch_backward)(const SmallNetwork &p, void *stream) {
    auto kernel = p.in_shared == NETWORK_ALL_IN_SHARED    ? FN(backward)<NETWORK_ALL_IN_SHARED>
                  : p.in_shared == NETWORK_TILE_IN_SHARED ? FN(backward)<NETWORK_TILE_IN_SHARED>
                                                          : FN(backward)<NETWORK_IN_SCRATCH>;
    int status = launch(kernel, p.R * p.chunks, THREADS, p.shared_size * sizeof(REAL), stream, p);
    const int64_t blocks = p.R * ((p.P + WARP - 1) / WARP) + (p.conditioned < 0 ? 0 : p.B);
    return status ? status : launch(FN(finish), blocks, THREADS, THREADS * sizeof(REAL), stream, p);
}
