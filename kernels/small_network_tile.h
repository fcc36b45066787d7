/* Arithmetic on a tile; included for each type and target by small_network_passes.h, see small_network.c.
 *
 * A tile holds TILE particles, one per lane. A value that all of them have is a row of the tile, TILE numbers, and the rows
 * stay in the L1 cache. `nv` is the number of vectors of a row that are in use, a multiple of 4.
 */
#define VEC ON(Vec)
#define MASK ON(Mask)
typedef REAL VEC __attribute__((vector_size(BYTES)));
typedef __typeof__((VEC){0} < (VEC){0}) MASK;
#undef LANES
#define LANES ((int)(BYTES / sizeof(REAL)))
#undef UNROLL
#define UNROLL _Pragma("GCC unroll 8")

/* z[m] = start[m] + sum_k w[k ld + m] a[k] for m < M, k < K; what is NULL does not take part. */
typedef struct {
    int M, K;
    int64_t ld;
    const REAL *w, *a;
    const REAL *bias;  /* start[m] as a number */
    const REAL *share; /* start[m] as a row of the tile */
    const REAL *gate;  /* z[m] becomes 0 where row m of gate is <= 0: ReLU's derivative */
    bool rectify;      /* ReLU, which NaN passes */
    REAL *z;
} ON(Product);

/* MB outputs x NV vectors of particles from row m, lane j on, accumulated in registers. */
INLINE void ON(block)(const int MB, const int NV, const ON(Product) * q, int m, int j) {
    VEC s[8][4], v[4];
    const REAL *w = q->w + m, *a = q->a + j;
    const int64_t ld = q->ld, at = (int64_t)m * TILE + j;
    const int K = q->K;
    if (q->share) {
        UNROLL for (int i = 0; i < MB; i++) UNROLL for (int h = 0; h < NV; h++) s[i][h] =
            *(const VEC *)(q->share + at + i * TILE + h * LANES);
    } else {
        UNROLL for (int i = 0; i < MB; i++) UNROLL for (int h = 0; h < NV; h++) s[i][h] =
            (q->bias ? q->bias[m + i] : 0) - (VEC){0};
    }
    for (int k = 0; k < K; k++) {
        UNROLL for (int h = 0; h < NV; h++) v[h] = *(const VEC *)(a + k * TILE + h * LANES);
        UNROLL for (int i = 0; i < MB; i++) UNROLL for (int h = 0; h < NV; h++) s[i][h] += w[k * ld + i] * v[h];
    }
    if (q->rectify) {
        UNROLL for (int i = 0; i < MB; i++) UNROLL for (int h = 0; h < NV; h++) s[i][h] = (VEC)((MASK)s[i][h] & ~(s[i][h] < 0));
    } else if (q->gate) {
        UNROLL for (int i = 0; i < MB; i++) UNROLL for (int h = 0; h < NV; h++) s[i][h] =
            (VEC)((MASK)s[i][h] & ~(*(const VEC *)(q->gate + at + i * TILE + h * LANES) <= 0));
    }
    UNROLL for (int i = 0; i < MB; i++) UNROLL for (int h = 0; h < NV; h++) * (VEC *)(q->z + at + i * TILE + h * LANES) =
        s[i][h];
}

INLINE int ON(blocks)(const int MB, const int NV, int nv, const ON(Product) * q, int m) {
    for (; m + MB <= q->M; m += MB)
        for (int j = 0; j < nv * LANES; j += NV * LANES) ON(block)(MB, NV, q, m, j);
    return m;
}

/* 16 accumulators with the 32 registers of AVX-512, 8 with 16 registers: two units of latency 4 need 8. */
static void ON(product)(int nv, const ON(Product) * from) {
    const ON(Product) q = *from;
    int m = ON(blocks)(8, BYTES == 64 ? 2 : 1, nv, &q, 0);
    m = ON(blocks)(4, BYTES == 64 ? 4 : 2, nv, &q, m);
    m = ON(blocks)(2, 4, nv, &q, m);
    ON(blocks)(1, 4, nv, &q, m);
}

/* g[m][k] += d[m] a[k]: one vector for each weight, folded into a number at the end of a chunk. */
INLINE void ON(outer_block)(const int MB, const int KB, int nv, const REAL *d, const REAL *a, VEC *g, int64_t ld) {
    VEC s[4][4], v[4];
    UNROLL for (int m = 0; m < MB; m++) UNROLL for (int k = 0; k < KB; k++) s[m][k] = (VEC){0};
    for (int j = 0; j < nv * LANES; j += LANES) {
        UNROLL for (int k = 0; k < KB; k++) v[k] = *(const VEC *)(a + k * TILE + j);
        UNROLL for (int m = 0; m < MB; m++) {
            VEC u = *(const VEC *)(d + m * TILE + j);
            UNROLL for (int k = 0; k < KB; k++) s[m][k] += u * v[k];
        }
    }
    UNROLL for (int m = 0; m < MB; m++) UNROLL for (int k = 0; k < KB; k++) g[m * ld + k] += s[m][k];
}

INLINE void ON(outer_rows)(const int MB, int nv, int K, const REAL *d, const REAL *a, VEC *g, int64_t ld) {
    int k = 0;
    if (BYTES == 64)
        for (; k + 4 <= K; k += 4) ON(outer_block)(MB, 4, nv, d, a + k * TILE, g + k, ld);
    for (; k + 2 <= K; k += 2) ON(outer_block)(MB, 2, nv, d, a + k * TILE, g + k, ld);
    for (; k < K; k++) ON(outer_block)(MB, 1, nv, d, a + k * TILE, g + k, ld);
}

static void ON(outer)(int nv, int M, int K, const REAL *d, const REAL *a, VEC *g, int64_t ld, VEC *bias) {
    int m = 0;
    for (; m + 4 <= M; m += 4) ON(outer_rows)(4, nv, K, d + m * TILE, a, g + m * ld, ld);
    for (; m < M; m++) ON(outer_rows)(1, nv, K, d + m * TILE, a, g + m * ld, ld);
    for (m = 0; m < M; m++) {
        VEC s = {0};
        for (int j = 0; j < nv * LANES; j += LANES) s += *(const VEC *)(d + m * TILE + j);
        bias[m] += s;
    }
}

/* The sum of a vector's lanes, in pairs. */
INLINE REAL ON(fold)(const VEC *v) {
    REAL s[LANES];
    memcpy(s, v, sizeof s);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) s[i] += s[i + half];
    return s[0];
}

/* n rows of the caller (n, C) to C rows of the tile, and back. A constant C lets gcc shuffle where it would gather. */
INLINE void ON(load_columns)(const int C, const int n, const REAL *restrict x, REAL *restrict a) {
    for (int i = 0; i < n; i++)
        for (int c = 0; c < C; c++) a[c * TILE + i] = x[i * C + c];
}
INLINE void ON(store_columns)(const int C, const int n, const REAL *restrict a, REAL *restrict x) {
    for (int i = 0; i < n; i++)
        for (int c = 0; c < C; c++) x[i * C + c] = a[c * TILE + i];
}
#undef BY_COLUMNS
#define BY_COLUMNS(move, C, n, from, to) \
    switch (n == TILE ? C : 0) {         \
    case 1:                              \
        move(1, TILE, from, to);         \
        break;                           \
    case 2:                              \
        move(2, TILE, from, to);         \
        break;                           \
    case 3:                              \
        move(3, TILE, from, to);         \
        break;                           \
    case 4:                              \
        move(4, TILE, from, to);         \
        break;                           \
    case 8:                              \
        move(8, TILE, from, to);         \
        break;                           \
    default:                             \
        move(C, n, from, to);            \
    }
static void ON(store)(int C, int n, const REAL *a, REAL *x) { BY_COLUMNS(ON(store_columns), C, n, a, x) }

/* Idle lanes, from n to the last in use, repeat the last particle: their delta is 0, and 0 times an infinity of theirs that no
 * particle has would reach the gradients of the weights. Deltas are loaded with repeat = 0. */
static void ON(load)(int C, int n, int nv, REAL repeat, const REAL *x, REAL *a) {
    BY_COLUMNS(ON(load_columns), C, n, x, a)
    for (int c = 0; c < C; c++)
        for (int i = n; i < nv * LANES; i++) a[c * TILE + i] = repeat ? a[c * TILE + n - 1] : 0;
}

/* What `product` has not done: a = activation(z). */
static void ON(activate)(int kind, int nv, int M, const REAL *z, REAL *a, REAL slope) {
    for (int m = 0; m < M; m++, z += TILE, a += TILE)
        if (kind == NETWORK_TANH)
            for (int i = 0; i < nv * LANES; i++) a[i] = FN(tanh_real)(z[i]);
        else if (kind == NETWORK_SIGMOID)
            for (int i = 0; i < nv * LANES; i++) a[i] = FN(sigmoid_real)(z[i]);
        else
            for (int i = 0; i < nv * LANES; i++) a[i] = z[i] < 0 ? slope * z[i] : z[i];
}

/* d, the gradient of a, becomes that of z. PReLU needs z: its slope may be negative, and a does not tell the sign of z. */
static void ON(deactivate)(int kind, int nv, int M, const REAL *z, const REAL *a, REAL *d, REAL slope, VEC *grad_slope) {
    for (int m = 0; m < M; m++, z += TILE, a += TILE, d += TILE)
        if (kind == NETWORK_TANH)
            for (int i = 0; i < nv * LANES; i++) d[i] *= 1 - a[i] * a[i];
        else if (kind == NETWORK_SIGMOID)
            for (int i = 0; i < nv * LANES; i++) d[i] *= a[i] * (1 - a[i]);
        else if (kind == NETWORK_RELU)
            for (int i = 0; i < nv * LANES; i++) d[i] = a[i] <= 0 ? 0 : d[i];
        else
            for (int i = 0; i < nv * LANES; i += LANES) {
                VEC u = *(VEC *)(d + i), v = *(const VEC *)(z + i);
                MASK negative = v < 0;
                *grad_slope += (VEC)((MASK)(u * v) & negative);
                *(VEC *)(d + i) = (VEC)(((MASK)(u * slope) & negative) | ((MASK)u & ~negative));
            }
}
