/* Resampling a row by blocks, for resample.cu and mixture_resample.cu.
 *
 * The integers of resample_math.h, added up in any order: a row's weights become an array of non-decreasing numbers, `values`,
 * and draw i has the first component whose value exceeds the draw's point. For the ordered schemes the values are the ends e_j
 * of resample.c and the point is i itself, so each component has one Philox block and no draw has any. For multinomial draws
 * they are the cumulative weights; residual counts such draws (integer atomics) beside the certain copies, and its values are
 * the cumulative counts. A collapsed row has the ends of uniform ancestors, e_j = ceil((j + 1) M / N).
 *
 * A row of up to RESAMPLE_BLOCK particles and draws, or of any number if the scheme is residual, has one block; other rows go
 * through three launches of a block a part, and a fourth that draws (resample.h).
 * Cost: three reads of the log-weights, which the cache holds, and log2 N steps a draw.
 * Outside of the include guard is what depends on REAL (for_each_real.h). */
#ifndef MDPS_RESAMPLE_BLOCK_CUH
#define MDPS_RESAMPLE_BLOCK_CUH
#include "cuda_block.cuh"
#include "resample.h"
enum { THREADS = 256, OWN = 4, DRAWS = 1024 };
enum { REDUCTION_BYTES = WARP * 8 };

/* Parameters of the kernels: so that no thread has to look for the scale. */
template <typename P> struct Scaled {
    P p;
    double scale;
};

/* Which particles of which row this block has. */
struct Part {
    int64_t b, begin, end;
};
DEVICE Part part_of_block(const Resample &p) {
    int64_t parts = resample_parts(p.N), b = blockIdx.x / parts, part = blockIdx.x % parts;
    return {b, part * p.N / parts, (part + 1) * p.N / parts};
}

/* The scratch memory. */
DEVICE int64_t *row_values(const Resample &p, int64_t b) { return (int64_t *)p.scratch + b * p.N; }
DEVICE int64_t *row_totals(const Resample &p, int64_t b) { return row_values(p, p.B) + b * resample_parts(p.N); }

/* values[n] = sum + weight(begin) + ... + weight(n) for the block's n; returns the last. Barriers only before it writes. */
template <typename F> DEVICE int64_t cumulate(int64_t begin, int64_t end, int64_t sum, int64_t *values, F weight) {
    for (int64_t first = begin; first < end; first += OWN * THREADS) {
        const int64_t n = first + OWN * threadIdx.x;
        int64_t own[OWN], of_thread = 0, total;
#pragma unroll
        for (int i = 0; i < OWN; i++) own[i] = of_thread += n + i < end ? weight(n + i) : 0;
        const int64_t before = sum + scan_block(of_thread, &total, shared_memory<int64_t>());
#pragma unroll
        for (int i = 0; i < OWN; i++)
            if (n + i < end) values[n + i] = before + own[i];
        sum += total;
    }
    return sum;
}

/* The first of n values that exceeds the point, or the last. */
DEVICE int32_t first_above(const int64_t *values, int64_t n, int64_t point) {
    int32_t low = 0, high = (int32_t)(n - 1);
    while (low < high) {
        int32_t middle = low + (high - low) / 2;
        if (values[middle] > point) high = middle;
        else low = middle + 1;
    }
    return low;
}

DEVICE int64_t multinomial_point(Source s, int64_t i, int64_t total) {
    Words r = words_of_block(s, KIND_RESAMPLE, i / 2);
    int64_t point = (int64_t)((i & 1 ? unit53(r.z, r.w) : unit53(r.x, r.y)) * (double)total);
    return point < total ? point : total - 1;
}

/* Cumulative weights of components [begin, end) into ends. */
DEVICE void make_ends(const Resample &p, Source s, bool good, int64_t begin, int64_t end, int64_t total, int64_t *values) {
    const double M = (double)p.M, points = M / (double)total;
    const int32_t shared_word = p.scheme == SYSTEMATIC ? signed_word(s, 0) : 0;
    for (int64_t n = begin + threadIdx.x; n < end; n += THREADS) {
        End e = end_of(values[n], total, M, points);
        int32_t word = p.scheme == SYSTEMATIC ? shared_word : signed_word(s, e.k);
        values[n] = good ? e.k + (word < e.cut) : ((n + 1) * p.M + p.N - 1) / p.N;
    }
}

/* Calls take(i, ancestor) for the draws [begin, end). */
template <typename F>
DEVICE void take_draws(const Resample &p, Source s, const int64_t *values, int64_t begin, int64_t end, F take) {
    const bool multinomial = p.scheme == MULTINOMIAL;
    const int64_t total = values[p.N - 1];
    for (int64_t i = begin + threadIdx.x; i < end; i += THREADS)
        take(i, first_above(values, p.N, multinomial ? multinomial_point(s, i, total) : i));
}
#endif

DEVICE REAL *FN(row_tops)(const Resample &p, int64_t b) { return (REAL *)row_totals(p, p.B) + b * resample_parts(p.N); }

/* A row's weights: 1 where it has collapsed. */
typedef struct {
    const REAL *log_weights;
    REAL top;
    double scale;
} FN(Weights);
DEVICE bool FN(is_good)(REAL top) { return top > (REAL)-INFINITY && top < (REAL)INFINITY; }
DEVICE int64_t FN(weight)(const FN(Weights) &w, int64_t n) {
    return FN(is_good)(w.top) ? FN(integer_weight)(w.log_weights[n], w.top, w.scale) : 1;
}

/* The largest log-weight; infinity also for a NaN. */
DEVICE REAL FN(find_top)(const REAL *l, int64_t begin, int64_t end) {
    REAL top = -INFINITY;
    for (int64_t n = begin + threadIdx.x; n < end; n += THREADS)
        top = Larger()(top, l[n] < (REAL)INFINITY ? l[n] : (REAL)INFINITY);
    return reduce_block(top, (REAL)-INFINITY, Larger(), shared_memory<REAL>());
}

/* Counts and their sums, of a row that has not collapsed. */
DEVICE void FN(make_residual)(const Resample &p, Source s, const FN(Weights) &w, int64_t *values, int32_t *count) {
    const double M = (double)p.M, total = (double)values[p.N - 1];
    int64_t copies = 0;
    __syncthreads();
    const int64_t rest = cumulate(0, p.N, 0, values, [&](int64_t n) {
        Share share = share_of(FN(weight)(w, n), M, total, w.scale);
        count[n] = share.copies;
        copies += share.copies;
        return share.rest;
    });
    const int64_t left = p.M - reduce_block(copies, (int64_t)0, Add(), shared_memory<int64_t>());
    if (rest > 0)
        for (int64_t i = threadIdx.x; i < left; i += THREADS)
            atomicAdd(&count[first_above(values, p.N, multinomial_point(s, i, rest))], 1);
    __syncthreads();
    cumulate(0, p.N, 0, values, [&](int64_t n) { return (int64_t)count[n]; });
}

/* All values of row b, by one block; returns where they are, and the row's top. */
DEVICE int64_t *FN(prepare_row)(const Resample &p, int64_t b, Source s, double scale, REAL *top) {
    const bool kept = p.N <= RESAMPLE_KEPT;
    int64_t *values = kept ? shared_memory<int64_t>() + WARP : row_values(p, b);
    int32_t *count = kept ? (int32_t *)(values + p.N) : (int32_t *)row_values(p, p.B) + b * p.N;
    const REAL *l = (const REAL *)p.log_weights + b * p.N;
    const FN(Weights) w = {l, *top = FN(find_top)(l, 0, p.N), scale};
    const bool good = FN(is_good)(w.top);
    const int64_t total = cumulate(0, p.N, 0, values, [&](int64_t n) { return FN(weight)(w, n); });
    __syncthreads();
    if (p.scheme == RESIDUAL && good) FN(make_residual)(p, s, w, values, count);
    else if (p.scheme != MULTINOMIAL) make_ends(p, s, good, 0, p.N, total, values);
    __syncthreads();
    return values;
}

/* Of the row, from those of its parts. */
DEVICE REAL FN(merge_tops)(const Resample &p, int64_t b) { return FN(find_top)(FN(row_tops)(p, b), 0, resample_parts(p.N)); }

static __global__ void FN(find_tops)(Scaled<Resample> q) {
    const Part here = part_of_block(q.p);
    REAL top = FN(find_top)((const REAL *)q.p.log_weights + here.b * q.p.N, here.begin, here.end);
    if (threadIdx.x == 0) FN(row_tops)(q.p, 0)[blockIdx.x] = top;
}

static __global__ void FN(add_weights)(Scaled<Resample> q) {
    const Part here = part_of_block(q.p);
    const FN(Weights) w = {(const REAL *)q.p.log_weights + here.b * q.p.N, FN(merge_tops)(q.p, here.b), q.scale};
    int64_t sum = 0;
    for (int64_t n = here.begin + threadIdx.x; n < here.end; n += THREADS) sum += FN(weight)(w, n);
    sum = reduce_block(sum, (int64_t)0, Add(), shared_memory<int64_t>());
    if (threadIdx.x == 0) row_totals(q.p, 0)[blockIdx.x] = sum;
}

static __global__ void FN(make_values)(Scaled<Resample> q) {
    const Part here = part_of_block(q.p);
    const FN(Weights) w = {(const REAL *)q.p.log_weights + here.b * q.p.N, FN(merge_tops)(q.p, here.b), q.scale};
    const int64_t parts = resample_parts(q.p.N), part = blockIdx.x - here.b * parts;
    const int64_t own = (int64_t)threadIdx.x < parts ? row_totals(q.p, here.b)[threadIdx.x] : 0;
    const int64_t total = reduce_block(own, (int64_t)0, Add(), shared_memory<int64_t>());
    const int64_t before = reduce_block((int64_t)threadIdx.x < part ? own : 0, (int64_t)0, Add(), shared_memory<int64_t>());
    int64_t *values = row_values(q.p, here.b);
    cumulate(here.begin, here.end, before, values, [&](int64_t n) { return FN(weight)(w, n); });
    if (q.p.scheme == MULTINOMIAL) return;
    __syncthreads();
    make_ends(q.p, source_of_row(q.p.seed, here.b), FN(is_good)(w.top), here.begin, here.end, total, values);
}

/* Puts all on the stream: `whole` makes and takes a row's draws, `draws` takes DRAWS draws of a row in parts. */
template <typename P>
static int FN(launch_rows)(const Resample &p, const P &parameters, void (*whole)(Scaled<P>), void (*draws)(Scaled<P>),
                       void *stream) {
    const double scale = fixed_point(p.N);
    const Scaled<P> all = {parameters, scale};
    if (p.M == 0) return 0;
    if (!resample_in_parts(&p)) {
        size_t values = p.N <= RESAMPLE_KEPT ? (size_t)p.N * (p.scheme == RESIDUAL ? 12 : 8) : 0;
        return launch(whole, p.B, THREADS, REDUCTION_BYTES + values, stream, all);
    }
    const Scaled<Resample> row = {p, scale};
    const int64_t blocks = p.B * resample_parts(p.N);
    int status = launch(FN(find_tops), blocks, THREADS, REDUCTION_BYTES, stream, row);
    if (!status) status = launch(FN(add_weights), blocks, THREADS, REDUCTION_BYTES, stream, row);
    if (!status) status = launch(FN(make_values), blocks, THREADS, REDUCTION_BYTES, stream, row);
    return status ? status : launch(draws, p.B * ((p.M + DRAWS - 1) / DRAWS), THREADS, REDUCTION_BYTES, stream, all);
}
