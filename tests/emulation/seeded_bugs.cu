/* A block's scan with one bug at a time, chosen by BUG_...: tests/test_emulation.py asks which of them each way of running it
 * finds. Without a bug it prints "right" and all of them are silent. */
#include "cuda_block.cuh"

#include <stdio.h>

enum { THREADS = 128, N = 1000, EACH = (N + THREADS - 1) / THREADS };

typedef struct {
    const int32_t *values;
    int32_t *before; /* (N) the sum of the values in front of each */
    int32_t *largest, *total;
} Scan;

static __global__ void scan(Scan p) {
    int32_t *values = shared_memory<int32_t>(), *room = values + N, total;
    for (int i = threadIdx.x; i < N; i += THREADS) values[i] = p.values[i];
#if defined(BUG_NO_BARRIER)
#elif defined(BUG_BARRIER_OF_WARP)
    __syncwarp();
#else
    __syncthreads();
#endif
    int begin = threadIdx.x * EACH, end = begin + EACH < N ? begin + EACH : N;
    int32_t sum = 0, largest = INT32_MIN;
    for (int i = begin; i < end; i++) sum += values[i], largest = Larger()(largest, values[i]);
    int32_t before = scan_block(sum, &total, room);
    for (int i = begin; i < end; i++) {
        p.before[i] = before;
        before += values[i];
    }
#ifdef BUG_DIVERGENT_BARRIER
    if (threadIdx.x < 40) __syncthreads();
    else
#endif
        __syncthreads();
#ifdef BUG_OVERRUN
    if (threadIdx.x == 0) values[N + WARP] = 0;
#endif
#ifdef BUG_SAME_VALUE
    if (lane_of_warp() == 0) values[0] = 0;
#endif
#ifdef BUG_ENDED_LANE
    if (threadIdx.x == 5) return;
#endif
#ifdef BUG_ABSENT_LANES
    if (lane_of_warp() < 16) largest = reduce_warp(largest, Larger());
#endif
#ifdef BUG_DIVERGENT_SHUFFLE
    if (lane_of_warp() < 16) largest += __shfl_sync(FULL_WARP, 0, 0);
    else largest += __shfl_sync(FULL_WARP, 0, 1);
#endif
#ifdef BUG_OTHER_LANE
    if (lane_of_warp() < 16) largest += __shfl_sync(0xffffu, 0, 16);
#endif
    largest = reduce_warp(largest, Larger());
#ifdef BUG_LOCKSTEP
    values[threadIdx.x] = largest;
    largest = Larger()(largest, values[threadIdx.x ^ 1]);
#endif
    if (lane_of_warp() == 0) room[warp_of_block()] = largest;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int w = 1; w < THREADS / WARP; w++) room[0] = Larger()(room[0], room[w]);
    *p.largest = room[0];
    *p.total = total;
}

int main() {
    int32_t values[N], before[N], largest = 0, total = 0, sum = 0, most = INT32_MIN, wrong = 0;
    for (int i = 0; i < N; i++) values[i] = i * 7919 % 1009 - 300;
    int status = launch(scan, 1, THREADS, (N + WARP) * sizeof(int32_t), NULL, Scan{values, before, &largest, &total});
    for (int i = 0; i < N; i++) {
        wrong += before[i] != sum;
        sum += values[i];
        most = values[i] > most ? values[i] : most;
    }
    wrong += largest != most || total != sum;
    puts(status || wrong ? "wrong" : "right");
    return status || wrong;
}
