/* Uniform, normal and von Mises deviates from Philox words, in tiles, for float or double (REAL, FN: for_each_real.h).
 * No include guard: a file includes it once for each REAL. Include real_math.h first.
 *
 * Uniform: float32 takes the upper 24 bits of a word, four numbers a block; float64 takes 53 bits of two words, two a block.
 *
 * Normal: Box & Muller 1958. (r cos a, r sin a) with r = sqrt(-2 ln u), a = 2 pi v. u has 31 bits (float32: r up to 6.6) or
 * 53 (float64: 8.6) around the middle of each step, so it is never 0; float32 takes two pairs from a block, float64 one.
 *
 * Von Mises with mean 0 and concentration k: rejection from a wrapped Cauchy (Best & Fisher 1979), in a form that cancels
 * nothing. With S = sin^2(theta / 2) the target is exp(k cos theta) = e^k exp(-2 k S). The proposal tan(theta / 2) =
 * t tan(pi v), v uniform in (-1/2, 1/2), has density proportional to 1 / (t^2 + (1 - t^2) S). Let t^2 = K / (k + K) for some
 * K > 0: it becomes 1 / (K + k S), and target / proposal ~ (K + k S) exp(-2 k S) ~ y exp(-y), y = 2 k S + 2 K, whose maximum
 * is at y = 1. So accept with probability y exp(1 - y), exact for every K. Best and Fisher's optimum is K = (1 + 1 / (q + 2 k))
 * / 4 with q = sqrt(1 + 4 k^2): from 1/2 at k = 0 (every proposal is accepted, theta = 2 pi v is uniform) to 1/4 at k =
 * infinity (t^2 ~ 1 / (4 k), acceptance 0.658). Everything is a sum or product of positive terms, hence accurate to rounding
 * for every k. Attempt a of element i is block i of the row with a in counter 1; the rejected ones are gathered and try again.
 * After 64 attempts the last proposal stands (probability below 0.343^64 < 1e-29). float32 takes the first word of each of
 * float64's two pairs, so both types draw the same deviates to rounding.
 */
#ifndef MDPS_DRAW_H
#define MDPS_DRAW_H
enum { DRAW_TILE = 256, MAX_ATTEMPTS = 64, LANES = 16 };
#endif

/* In (0, 1), or (0, 1] where float32 rounds, from the word (and, double, the next one). The signed conversions are those that
 * every x86-64 has. */
INLINE REAL FN(open_unit)(uint32_t high, uint32_t low) {
    if (!IS_DOUBLE) return ((REAL)(int32_t)(high >> 1) + (REAL)0.5) * (REAL)0x1p-31;
    return (REAL)(int32_t)(high >> 1) * (REAL)0x1p-31 + ((REAL)(int32_t)(low >> 10) + (REAL)0.5) * (REAL)0x1p-53;
}
/* In (-1/2, 1/2); float32 may round to an end. */
INLINE REAL FN(centred_unit)(uint32_t high, uint32_t low) {
    if (!IS_DOUBLE) return ((REAL)(int32_t)high + (REAL)0.5) * (REAL)0x1p-32;
    return (REAL)(int32_t)high * (REAL)0x1p-32 + ((REAL)(int32_t)(low >> 11) + (REAL)0.5) * (REAL)0x1p-53;
}
/* In [0, 1), a multiple of 2^-24 or 2^-53. */
INLINE REAL FN(unit)(uint32_t high, uint32_t low) {
    if (!IS_DOUBLE) return (REAL)(int32_t)(high >> 8) * (REAL)0x1p-24;
    return ((REAL)(int32_t)(high ^ 0x80000000u) * (REAL)0x1p-32 + (REAL)0.5) + (REAL)(int32_t)(low >> 11) * (REAL)0x1p-53;
}

/* Numbers [first, first + n) of a row; first and n are multiples of 4. */
INLINE void FN(draw_uniform)(Source s, int64_t first, int64_t n, REAL *out) {
    const int per_block = IS_DOUBLE ? 2 : 4;
    for (int64_t i = 0; i < n / per_block; i++) {
        Words r = words_of_block(s, KIND_UNIFORM, first / per_block + i);
        if (IS_DOUBLE) {
            out[2 * i] = FN(unit)(r.x, r.y);
            out[2 * i + 1] = FN(unit)(r.z, r.w);
        } else {
            out[4 * i] = FN(unit)(r.x, 0);
            out[4 * i + 1] = FN(unit)(r.y, 0);
            out[4 * i + 2] = FN(unit)(r.z, 0);
            out[4 * i + 3] = FN(unit)(r.w, 0);
        }
    }
}

INLINE void FN(box_muller)(REAL u, REAL v, REAL *a, REAL *b) {
    REAL radius = sqrt((REAL)(-2 * LN2) * FN(log2_less)(u, 0)), square = v * v;
    REAL sine = v * FN(sinpi_over)(square), cosine = FN(cospi_poly)(square); /* of half the angle */
    *a = radius * (1 - 2 * sine * sine);
    *b = radius * (2 * sine * cosine);
}

INLINE void FN(draw_normal)(Source s, int64_t first, int64_t n, REAL *out) {
    const int per_block = IS_DOUBLE ? 2 : 4;
    for (int64_t i = 0; i < n / per_block; i++) {
        Words r = words_of_block(s, KIND_NORMAL, first / per_block + i);
        REAL a, b, c, d;
        if (IS_DOUBLE) {
            FN(box_muller)(FN(open_unit)(r.x, r.y), FN(centred_unit)(r.z, r.w), &a, &b);
            out[2 * i] = a;
            out[2 * i + 1] = b;
        } else {
            FN(box_muller)(FN(open_unit)(r.x, 0), FN(centred_unit)(r.y, 0), &a, &b);
            FN(box_muller)(FN(open_unit)(r.z, 0), FN(centred_unit)(r.w, 0), &c, &d);
            out[4 * i] = a;
            out[4 * i + 1] = b;
            out[4 * i + 2] = c;
            out[4 * i + 3] = d;
        }
    }
}

/* Number `number` of a row alone, as a GPU's thread does it: the same deviate. */
INLINE REAL FN(draw_one_normal)(Source s, int64_t number) {
    Words r = words_of_block(s, KIND_NORMAL, number / (IS_DOUBLE ? 2 : 4));
    bool second = !IS_DOUBLE && number & 2; /* of the block's pairs */
    REAL a, b;
    FN(box_muller)(FN(open_unit)(second ? r.z : r.x, r.y), FN(centred_unit)(second ? r.w : IS_DOUBLE ? r.z : r.y, r.w), &a, &b);
    return number & 1 ? b : a;
}

/* What is drawn for a concentration: finite and >= 0. */
INLINE REAL FN(drawn_concentration)(REAL concentration) {
    const REAL most = IS_DOUBLE ? (REAL)1e300 : (REAL)1e36f;
    return concentration > 0 ? concentration < most ? concentration : most : 0;
}

/* The deviate from the last angle: in [-pi, pi); 0 for infinity, NaN for NaN and negative concentrations. */
INLINE REAL FN(von_mises_deviate)(REAL concentration, REAL angle) {
    REAL a = FN(wrap)(angle);
    a = concentration == (REAL)INFINITY ? 0 : a;
    return concentration >= 0 ? a : (REAL)NAN;
}

/* What an attempt needs of a drawn concentration k: K and t above. */
INLINE void FN(von_mises_constants)(REAL k, REAL *K, REAL *t) {
    *K = (1 + 1 / (sqrt(1 + 4 * k * k) + 2 * k)) * (REAL)0.25;
    *t = sqrt(*K / (k + *K));
}

/* One attempt of an element, from its words: the angle, and whether it is accepted. 0 <= k < infinity. */
INLINE bool FN(von_mises_attempt)(Words r, REAL k, REAL K, REAL t, REAL *angle) {
    REAL v = FN(centred_unit)(r.x, r.y), u = FN(open_unit)(r.z, r.w), square = v * v;
    REAL sine = t * v * FN(sinpi_over)(square), cosine = fabs(FN(cospi_poly)(square));
    REAL S = sine * sine / (cosine * cosine + sine * sine), y = 2 * k * S + 2 * K;
    REAL a = fabs(sine), low = a < cosine ? a : cosine, high = a < cosine ? cosine : a, ratio = low / high;
    REAL half = ratio * FN(atan_over)(ratio * ratio);
    half = a < cosine ? half : (REAL)(PI / 2) - half;
    *angle = v < 0 ? -2 * half : 2 * half;
    return u <= y * FN(exp2_real)((1 - y) * (REAL)LOG2E);
}

/* Up to DRAW_TILE elements that are drawn together, of one row or of many, of one stream. */
typedef struct {
    int n;
    uint32_t stream;
    uint64_t key[DRAW_TILE], at[DRAW_TILE]; /* key1 << 32 | key0, row << 32 | element */
    REAL concentration[DRAW_TILE], k[DRAW_TILE], K[DRAW_TILE], t[DRAW_TILE];
} FN(Tile);

/* Adds elements [first, first + n) of a row, n <= DRAW_TILE - tile->n; their concentrations are the caller's. */
INLINE void FN(add_elements)(FN(Tile) *tile, Source s, int64_t first, int n) {
    const uint64_t key = (uint64_t)s.key1 << 32 | s.key0, row = (uint64_t)s.row << 32;
    uint64_t *keys = tile->key + tile->n, *at = tile->at + tile->n;
    for (int i = 0; i < n; i++) keys[i] = key;
    for (int i = 0; i < n; i++) at[i] = row | (uint32_t)(first + i);
    tile->stream = s.stream;
    tile->n += n;
}

/* One attempt of n elements, a multiple of LANES. */
INLINE void
FN(try_von_mises)(const FN(Tile) *tile, const bool one_key, uint32_t attempt, int n, REAL *angle, int32_t *accepted) {
    for (int i = 0; i < n; i++) {
        uint64_t at = tile->at[i], key = tile->key[one_key ? 0 : i];
        Words r = philox((uint32_t)at, (uint32_t)KIND_VON_MISES << 24 | attempt, tile->stream, at >> 32, key, key >> 32);
        accepted[i] = FN(von_mises_attempt)(r, tile->k[i], tile->K[i], tile->t[i], &angle[i]);
    }
}

/* Keeps the elements that `which` lists, in ascending order. */
INLINE void FN(keep_elements)(FN(Tile) *tile, int n, const int32_t *which) {
    for (int i = 0; i < n; i++) {
        int32_t j = which[i];
        tile->key[i] = tile->key[j];
        tile->at[i] = tile->at[j];
        tile->k[i] = tile->k[j];
        tile->K[i] = tile->K[j];
        tile->t[i] = tile->t[j];
    }
}

/* Draws the elements of a tile, and empties it. one_key: all have the same, which saves a tenth. */
INLINE void FN(draw_tile)(FN(Tile) *tile, const bool one_key, REAL *out) {
    REAL angle[DRAW_TILE];
    int32_t accepted[DRAW_TILE], place[DRAW_TILE], which[DRAW_TILE], left = tile->n;
    for (int i = left; i < (left + LANES - 1) / LANES * LANES; i++)
        tile->key[i] = tile->at[i] = 0, tile->k[i] = 0, tile->K[i] = tile->t[i] = 1;
    for (int i = 0; i < left; i++) place[i] = i;
    for (uint32_t attempt = 0; left > 0 && attempt < MAX_ATTEMPTS; attempt++) {
        int rejected = 0;
        FN(try_von_mises)(tile, one_key, attempt, (left + LANES - 1) / LANES * LANES, angle, accepted);
        for (int i = 0; i < left; i++) {
            out[place[i]] = angle[i];
            which[rejected] = i;
            place[rejected] = place[i];
            rejected += !accepted[i];
        }
        FN(keep_elements)(tile, rejected, which);
        left = rejected;
    }
    for (int i = 0; i < tile->n; i++) out[i] = FN(von_mises_deviate)(tile->concentration[i], out[i]);
    tile->n = 0;
}

/* Elements [first, first + n) of a row, n <= DRAW_TILE, in [-pi, pi). Concentration: infinity gives 0, NaN and negative NaN;
 * beyond 1e36 (float) or 1e300 (double), standard deviations below 1e-18 and 1e-150, it counts as that. */
INLINE void FN(draw_von_mises)(Source s, int64_t first, int n, const REAL *concentration, REAL *out) {
    FN(Tile) tile;
    tile.n = 0;
    for (int i = 0; i < n; i++) {
        tile.concentration[i] = concentration[i];
        tile.k[i] = FN(drawn_concentration)(concentration[i]);
        FN(von_mises_constants)(tile.k[i], &tile.K[i], &tile.t[i]);
    }
    FN(add_elements)(&tile, s, first, n);
    FN(draw_tile)(&tile, true, out);
}

/* One element alone, as a GPU's thread does it: the same deviate. */
INLINE REAL FN(draw_one_von_mises)(Source s, uint32_t element, REAL concentration) {
    const REAL k = FN(drawn_concentration)(concentration);
    REAL angle = 0, K, t;
    FN(von_mises_constants)(k, &K, &t);
    for (uint32_t attempt = 0; attempt < MAX_ATTEMPTS; attempt++)
        if (FN(von_mises_attempt)(words_at(s, KIND_VON_MISES, element, attempt), k, K, t, &angle)) break;
    return FN(von_mises_deviate)(concentration, angle);
}
