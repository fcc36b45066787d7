/* Arithmetic on a tile on the GPU; included for each type by small_network.cu.
 *
 * A tile holds NETWORK_TILE particles; a value that all of them have is a row. Half a warp has a particle in each lane, so that
 * a warp computes two outputs, or two groups of MB, at a time. It fetches its rows of a matrix while it multiplies with those
 * that it fetched before: they lie in its own piece of shared memory, whence the half warp reads four weights at once.
 */
#define STRIDE network_stride(sizeof(REAL))
#define PIECE_STRIDE network_piece_stride(sizeof(REAL))
#define VECTOR ((int)(16 / sizeof(REAL)))

typedef struct alignas(16) {
    REAL v[16 / sizeof(REAL)];
} FN(Vector);

/* What a block works on: the particles [row, row + n) of all B N; its chunk ends at `stop` and is of one set. */
typedef struct {
    int64_t row, stop;
    int n;
    bool is_first;                      /* tile of the chunk: what is summed over them begins */
    REAL *pieces, *rows, *delta, *next; /* rows of the tile; gradients of a layer's outputs and of its inputs */
    const REAL *weights;                /* of the set */
    REAL *sums;                         /* gradients of the weights, of the chunk */
} FN(Tile);

/* z[m] = bias[m] + sum_k w(m, k) a[k] for begin <= m < end, k < K; w(m, k) is w[m ld + k], transposed w[k ld + m]. */
typedef struct {
    int begin, end, K, ld;
    const REAL *w, *bias; /* bias may be NULL */
    const REAL *a;
} FN(Product);

DEVICE FN(Vector) FN(vector_at)(const REAL *x) { return *(const FN(Vector) *)x; }

/* R rows from m on, NETWORK_PIECE columns from k on, a number of each to a lane; 0 beyond the matrix. */
template <int R, bool TRANSPOSED> DEVICE void FN(fetch)(const FN(Product) &q, int m, int k, REAL *v) {
    const int lane = lane_of_warp();
    const int row = m + (TRANSPOSED ? lane % R : 0), column = k + (TRANSPOSED ? lane / R : lane);
    const int step = TRANSPOSED ? WARP / R * q.ld : q.ld; /* the next number is in the next row, or WARP / R columns on */
    const REAL *from = q.w + (TRANSPOSED ? column * q.ld + row : row * q.ld + column);
#pragma unroll
    for (int i = 0; i < R; i++, from += step) {
        const bool exists = TRANSPOSED ? row < q.end && column + i * (WARP / R) < q.K : row + i < q.end && column < q.K;
        v[i] = exists ? *from : 0;
    }
}

template <int R, bool TRANSPOSED> DEVICE void FN(put)(REAL *piece, const REAL *v) {
    const int lane = lane_of_warp();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < R; i++) {
        int row = TRANSPOSED ? lane % R : i, column = TRANSPOSED ? lane / R + i * (WARP / R) : lane;
        piece[row * PIECE_STRIDE + column] = v[i];
    }
    __syncwarp();
}

/* s[i] += sum_k w[i][k] a[k]: of VECTOR columns, and of a piece's K. */
template <int MB> DEVICE void FN(multiply_vector)(const REAL *w, const REAL *a, REAL *s) {
    FN(Vector) u[MB];
#pragma unroll
    for (int i = 0; i < MB; i++) u[i] = FN(vector_at)(w + i * PIECE_STRIDE);
#pragma unroll
    for (int k = 0; k < VECTOR; k++) {
        const REAL x = a[k * STRIDE];
#pragma unroll
        for (int i = 0; i < MB; i++) s[i] += u[i].v[k] * x;
    }
}
template <int MB> DEVICE void FN(multiply)(int K, const REAL *w, const REAL *a, REAL *s) {
    int k = 0;
    if (K >= NETWORK_PIECE) { /* a constant spares a tenth of the instructions */
#pragma unroll 2
        for (; k < NETWORK_PIECE; k += VECTOR) FN(multiply_vector)<MB>(w + k, a + k * STRIDE, s);
        return;
    }
#pragma unroll 1
    for (; k + VECTOR <= K; k += VECTOR) FN(multiply_vector)<MB>(w + k, a + k * STRIDE, s);
#pragma unroll 1
    for (; k < K; k++)
#pragma unroll
        for (int i = 0; i < MB; i++) s[i] += w[i * PIECE_STRIDE + k] * a[k * STRIDE];
}

/* Calls store(m, z[m] of the lane's particle). Warps without an output pass by: no barrier of the block in here. */
template <int MB, bool TRANSPOSED, typename Store> DEVICE void FN(product_by)(const FN(Tile) &t, const FN(Product) &q, Store store) {
    const int R = 2 * MB, half = lane_of_warp() / NETWORK_TILE;
    REAL *piece = t.pieces + warp_of_block() * NETWORK_PIECE_ROWS * PIECE_STRIDE;
    const REAL *w = piece + half * MB * PIECE_STRIDE, *a = q.a + lane_of_warp() % NETWORK_TILE;
    for (int m = q.begin + warp_of_block() * R; m < q.end; m += NETWORK_WARPS * R) {
        const int own = m + half * MB;
        REAL s[MB], v[R];
        FN(fetch)<R, TRANSPOSED>(q, m, 0, v);
#pragma unroll
        for (int i = 0; i < MB; i++) s[i] = q.bias ? q.bias[at_most(own + i, q.end - 1)] : 0;
        for (int k = 0; k < q.K; k += NETWORK_PIECE) {
            FN(put)<R, TRANSPOSED>(piece, v);
            if (k + NETWORK_PIECE < q.K) FN(fetch)<R, TRANSPOSED>(q, m, k + NETWORK_PIECE, v);
            FN(multiply)<MB>(q.K - k, w, a + k * STRIDE, s);
        }
#pragma unroll
        for (int i = 0; i < MB; i++)
            if (own + i < q.end) store(own + i, s[i]);
    }
}

/* Few outputs: more warps that have one. */
template <bool TRANSPOSED, typename Store> DEVICE void FN(product)(const FN(Tile) &t, const FN(Product) &q, Store store) {
    const int M = q.end - q.begin;
    if (M <= 4 * NETWORK_WARPS) FN(product_by)<1, TRANSPOSED>(t, q, store);
    else FN(product_by)<4, TRANSPOSED>(t, q, store);
}

/* g[m][k] += d[m] a[k], summed over the particles; a thread has blocks of B x B weights, the same ones in every tile. */
template <int B> DEVICE void FN(outer_by)(bool is_first, int M, int K, const REAL *d, const REAL *a, REAL *g) {
    const int nm = (M + B - 1) / B, nk = (K + B - 1) / B;
    for (int j = threadIdx.x; j < nm * nk; j += THREADS) {
        const int m = j / nk, k = j % nk;
        REAL s[B][B] = {};
#pragma unroll 1
        for (int particle = 0; particle < NETWORK_TILE; particle += VECTOR) {
            FN(Vector) u[B], v[B];
#pragma unroll
            for (int i = 0; i < B; i++) {
                u[i] = FN(vector_at)(d + at_most(m + i * nm, M - 1) * STRIDE + particle);
                v[i] = FN(vector_at)(a + at_most(k + i * nk, K - 1) * STRIDE + particle);
            }
#pragma unroll
            for (int c = 0; c < VECTOR; c++)
#pragma unroll
                for (int i = 0; i < B * B; i++) s[i / B][i % B] += u[i / B].v[c] * v[i % B].v[c];
        }
#pragma unroll
        for (int i = 0; i < B * B; i++) {
            const int to = (m + i / B * nm) * K + k + i % B * nk;
            if (m + i / B * nm < M && k + i % B * nk < K) g[to] = is_first ? s[i / B][i % B] : g[to] + s[i / B][i % B];
        }
    }
}

/* The bias is for the threads that come last to the weights. */
DEVICE void FN(outer)(bool is_first, int M, int K, const REAL *d, const REAL *a, REAL *g, REAL *bias) {
    if (M * K <= 4 * THREADS) FN(outer_by)<1>(is_first, M, K, d, a, g);
    else FN(outer_by)<4>(is_first, M, K, d, a, g);
    const int m = THREADS - 1 - threadIdx.x;
    if (m >= M) return;
    REAL s = 0;
#pragma unroll
    for (int particle = 0; particle < NETWORK_TILE; particle++) s += d[m * STRIDE + particle];
    bias[m] = is_first ? s : bias[m] + s;
}

/* n rows of the caller (n, C) to C rows of the tile, and back. Idle lanes repeat the last particle: small_network_tile.h. The
 * threads from `thread` on begin, so that warps wait for different arrays at the same time. */
DEVICE void FN(load)(const FN(Tile) &t, int thread, int C, const void *from, REAL *a) {
    const REAL *x = (const REAL *)from + t.row * C;
    for (int i = (THREADS + threadIdx.x - thread % THREADS) % THREADS; i < NETWORK_TILE * C; i += THREADS) {
        const int particle = i / C, c = i % C;
        a[c * STRIDE + particle] = x[at_most(particle, t.n - 1) * C + c];
    }
}
DEVICE void FN(store)(const FN(Tile) &t, int C, const REAL *a, void *to) {
    REAL *x = (REAL *)to + t.row * C;
    for (int i = threadIdx.x; i < t.n * C; i += THREADS) x[i] = a[i % C * STRIDE + i / C];
}

/* a = activation(z) where the product has not done it, and d, the gradient of a, becomes that of z. PReLU needs z: its slope
 * may be negative; what the thread adds to its gradient is returned. */
DEVICE void FN(activate)(int kind, int M, REAL slope, const REAL *z, REAL *a) {
#pragma unroll 1
    for (int i = threadIdx.x; i < NETWORK_TILE * M; i += THREADS) {
        const int at = i / NETWORK_TILE * STRIDE + i % NETWORK_TILE;
        const REAL x = z[at];
        if (kind == NETWORK_TANH) a[at] = FN(tanh_real)(x);
        else if (kind == NETWORK_SIGMOID) a[at] = FN(sigmoid_real)(x);
        else a[at] = x < 0 ? slope * x : x;
    }
}
DEVICE REAL FN(deactivate)(int kind, int M, REAL slope, const REAL *z, const REAL *a, REAL *d) {
    REAL grad_slope = 0;
#pragma unroll 1
    for (int i = threadIdx.x; i < NETWORK_TILE * M; i += THREADS) {
        const int at = i / NETWORK_TILE * STRIDE + i % NETWORK_TILE;
        const REAL x = z[at], y = a[at], u = d[at];
        if (kind == NETWORK_TANH) d[at] = u * (1 - y * y);
        else if (kind == NETWORK_SIGMOID) d[at] = u * (y * (1 - y));
        else if (kind == NETWORK_RELU) d[at] = y <= 0 ? 0 : u;
        else if (x < 0) {
            grad_slope += u * x;
            d[at] = u * slope;
        }
    }
    return grad_slope;
}
