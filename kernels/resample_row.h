/* What resampling a row does after its weights have become cumulative integers; the same for float and double.
 * Used by resample.c, which says how it works. */
#ifndef MDPS_RESAMPLE_ROW_H
#define MDPS_RESAMPLE_ROW_H
#include "resample.h"

enum { TILE = 512, SPAN = 2048, KEPT = 16384 /* 128 KB of stack */ };

typedef struct {
    int64_t N, M, *cumulative;
    int32_t *mark, *count;
} Row;

/* Draws [begin, end) are of component j. Eight stores at once cost as much as one, and those beyond the end are overwritten by
 * the components that follow, so only a component of many draws, or one at the end of the row, goes another way. */
INLINE void put(int64_t *ancestors, int64_t begin, int64_t end, int64_t M, int64_t j) {
    while (begin + 8 <= M) {
        for (int i = 0; i < 8; i++) ancestors[begin + i] = j;
        begin += 8;
        if (begin >= end) return;
    }
    for (; begin < end; begin++) ancestors[begin] = j;
}

/* The ends of a tile's components: k points below for certain, and one more if the word at `at` is below `cut`. */
typedef struct {
    int32_t k[TILE], cut[TILE], at[TILE], words[SPAN + 32];
} Ends;

/* Compiled by itself: inlined, it lacks registers and takes twice the time. */
CLONES int64_t resample_put_tile(const Ends *e, int64_t first, int64_t n, int64_t begin, int64_t M, int64_t *ancestors) {
    for (int64_t i = 0; i < n; i++) {
        int64_t end = e->k[i] + (e->words[e->at[i]] < e->cut[i]);
        put(ancestors, begin, end, M, first + i);
        begin = end;
    }
    return begin;
}

/* Stratified or systematic points: M of them on weights that add up to `total`. */
typedef struct {
    int64_t M, total;
    bool stratified;
} Points;

/* Draws of the components [first, first + n), which end at c_j; the draws before `begin` are done. Returns the next one. */
INLINE int64_t take_tile(const Points *p, Source s, int64_t first, int n, const int64_t *c, int64_t begin, int64_t *ancestors) {
    const double M = (double)p->M, points = M / (double)p->total;
    Ends e;
    for (int i = 0; i < n; i++) {
        End end = end_of(c[i], p->total, M, points);
        e.k[i] = end.k;
        e.cut[i] = end.cut;
    }
    const int32_t low = p->stratified ? e.k[0] & -4 : 0, blocks = p->stratified ? (e.k[n - 1] - low) / 4 + 1 : 1;
    const int32_t sign = INT32_MIN;
    if (blocks <= SPAN / 4) {
        int drawn = (blocks + 7) / 8 * 8;
        draw_words(s, KIND_RESAMPLE, low / 4, drawn, (uint32_t *)e.words);
        for (int i = 0; i < 4 * drawn; i++) e.words[i] ^= sign;
        for (int i = 0; i < n; i++) e.at[i] = p->stratified ? e.k[i] - low : 0;
    } else /* many points for each component: draw only the words that an end cuts */
        for (int i = 0; i < n; i++) {
            e.words[i] = signed_word(s, e.k[i]);
            e.at[i] = i;
        }
    return resample_put_tile(&e, first, n, begin, p->M, ancestors);
}

/* Bucket of a point or of a component's end. Non-decreasing in c, which is all that the guide table needs. */
INLINE int32_t bucket(int64_t c, double buckets, int32_t last) {
    double b = (double)c * buckets;
    return b < last ? (int32_t)b : last;
}

/* mark[b] becomes the number of components whose end lies in a bucket before b: none of them holds a point of bucket b. */
INLINE void make_guide(const Row *row, double buckets) {
    const int32_t last = (int32_t)(row->N - 1);
    memset(row->mark, 0, (size_t)(row->N + 1) * 4);
    for (int64_t j = 0; j < row->N; j++) row->mark[bucket(row->cumulative[j], buckets, last) + 1] = (int32_t)(j + 1);
    for (int64_t b = 1; b <= row->N; b++) row->mark[b] = row->mark[b] ? row->mark[b] : row->mark[b - 1];
}

/* M independent draws from the cumulative weights, into ancestors or, if that is NULL, counted. */
INLINE void multinomial(const Row *row, Source s, int64_t M, int64_t *ancestors) {
    const int64_t total = row->cumulative[row->N - 1];
    const double size = (double)total, buckets = (double)row->N / size;
    make_guide(row, buckets);
    for (int64_t first = 0; first < M; first += TILE) {
        int n = M - first < TILE ? (int)(M - first) : TILE, full = (n + 31) / 32 * 32;
        int64_t point[TILE];
        int32_t start[TILE];
        for (int i = 0; i < full / 2; i++) {
            Words r = words_of_block(s, KIND_RESAMPLE, first / 2 + i);
            point[2 * i] = (int64_t)(unit53(r.x, r.y) * size);
            point[2 * i + 1] = (int64_t)(unit53(r.z, r.w) * size);
        }
        for (int i = 0; i < full; i++) {
            point[i] = point[i] < total ? point[i] : total - 1;
            start[i] = bucket(point[i], buckets, (int32_t)(row->N - 1));
        }
        for (int i = 0; i < n; i++) {
            int64_t j = row->mark[start[i]];
            while (row->cumulative[j] <= point[i]) j++;
            if (ancestors) ancestors[first + i] = j;
            else row->count[j]++;
        }
    }
}

INLINE void residual(const Row *row, Source s, int64_t *ancestors) {
    const double total = (double)row->cumulative[row->N - 1], M = (double)row->M, scale = fixed_point(row->N);
    int64_t before = 0, sum = 0, left = row->M;
    for (int64_t first = 0; first < row->N; first += TILE) {
        int n = row->N - first < TILE ? (int)(row->N - first) : TILE;
        int64_t *c = row->cumulative + first, w[TILE];
        int32_t *count = row->count + first;
        w[0] = c[0] - before;
        for (int i = 1; i < n; i++) w[i] = c[i] - c[i - 1];
        before = c[n - 1];
        for (int i = 0; i < n; i++) {
            Share share = share_of(w[i], M, total, scale);
            count[i] = share.copies;
            w[i] = share.rest;
        }
        for (int i = 0; i < n; i++) left -= count[i], c[i] = sum += w[i];
    }
    if (left > 0 && sum > 0) multinomial(row, s, left, NULL);
    for (int64_t j = 0, begin = 0; j < row->N; begin += row->count[j++])
        put(ancestors, begin, begin + row->count[j], row->M, j);
}

INLINE Row row_in(const Resample *p, char *scratch) {
    Row row = {.N = p->N, .M = p->M, .cumulative = (int64_t *)scratch};
    row.mark = (int32_t *)(scratch += RESAMPLE_ROUND(8 * p->N));
    row.count = (int32_t *)(scratch + RESAMPLE_ROUND(4 * (p->N + 1)));
    return row;
}
#endif
