/* For draws that need no rejection: a thread has four numbers of a row and stores them at once where every row begins at a
 * multiple of four (REAL, FN: for_each_real.h; no include guard). */
#include "real_math.h"

#include "draw.h"

#ifndef MDPS_DRAW_FOURS_CUH
#define MDPS_DRAW_FOURS_CUH
enum { THREADS = 256 };
static int64_t blocks_of_fours(const PhiloxDraw &p) { return (p.B * ((p.n + 3) / 4) + THREADS - 1) / THREADS; }
#endif

typedef struct alignas(16) {
    REAL number[4];
} FN(Four);

/* draw(source, first, n, out) fills in numbers [first, first + n) of a row. */
template <typename Draw> DEVICE void FN(draw_four)(const PhiloxDraw &p, Draw draw) {
    const int64_t fours = (p.n + 3) / 4, i = thread_of_grid(), b = i / fours, first = i % fours * 4;
    if (b >= p.B) return;
    REAL *out = (REAL *)p.out + b * p.n + first;
    FN(Four) four;
    draw(source_of_row(p.seed, b), first, 4, four.number);
    if (p.n % 4 == 0) *(FN(Four) *)out = four;
    else
        for (int j = 0; j < 4; j++)
            if (first + j < p.n) out[j] = four.number[j];
}
