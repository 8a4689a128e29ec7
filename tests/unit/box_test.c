/* Boxes against brute force: every element of small ones counted. */
#include <criterion/criterion.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "state/box.h"

#define SIDE 5

static uint64_t random_state = 7;

static int below(int n)
{
    random_state = random_state * 6364136223846793005u + 1442695040888963407u;
    return (int)((random_state >> 33) % (uint64_t)n);
}

static struct box random_box(int32_t ndim)
{
    struct box box = {.ndim = ndim};
    for (int32_t d = 0; d < ndim; d++) {
        box.at[d] = below(SIDE + 1);
        box.size[d] = below(SIDE + 1 - (int)box.at[d]);
    }
    return box;
}

/* Which elements of SIDE^ndim it has: one bit each. */
static void elements_of(const struct box *box, char *seen)
{
    int total = 1;
    for (int32_t d = 0; d < box->ndim; d++) total *= SIDE;
    for (int k = 0; k < total; k++) {
        int inside = 1, left = k;
        for (int32_t d = box->ndim - 1; d >= 0; left /= SIDE, d--)
            inside &= left % SIDE >= box->at[d] && left % SIDE < box->at[d] + box->size[d];
        seen[k] = (char)(seen[k] + inside);
    }
}

#define MOST (SIDE * SIDE * SIDE)

Test(box, what_boxes_have_and_have_in_common)
{
    for (int turn = 0; turn < 20000; turn++) {
        int32_t ndim = below(4);
        struct box a = random_box(ndim), b = random_box(ndim), common = {0};
        char in_a[MOST] = {0}, in_b[MOST] = {0}, in_common[MOST] = {0};
        elements_of(&a, in_a);
        elements_of(&b, in_b);
        int count = 0, both = 0, outside = 0;
        for (int k = 0; k < MOST; k++) {
            count += in_a[k];
            both += in_a[k] && in_b[k];
            outside += in_b[k] && !in_a[k];
        }
        cr_assert_eq(box_count(&a), count);
        cr_assert_eq(box_contains(&a, &b), !outside);
        int found = box_common(&a, &b, &common);
        cr_assert_eq(found, both > 0);
        if (found) elements_of(&common, in_common);
        for (int k = 0; k < MOST && found; k++) cr_assert_eq(in_common[k], in_a[k] && in_b[k]);
        cr_assert(box_same(&a, &a) && box_same(&a, &b) == (memcmp(&a, &b, sizeof a) == 0));
    }
}

Test(box, of_no_dimension_has_one_element)
{
    struct box a = {0}, b = {0}, common;
    cr_expect_eq(box_count(&a), 1);
    cr_expect(box_contains(&a, &b) && box_common(&a, &b, &common) && box_same(&a, &common) && box_fits(&a, NULL));
}

Test(box, fits_whatever_the_numbers_are)
{
    static const int64_t shape[] = {4, INT64_MAX};
    static const struct {
        int64_t at[2], size[2];
        int fits;
    } cases[] = {
        {{0, 0}, {4, 9}, 1},
        {{4, 0}, {0, INT64_MAX}, 1},
        {{0, 1}, {4, INT64_MAX}, 0},
        {{5, 0}, {0, 1}, 0},
        {{-1, 0}, {2, 1}, 0},
        {{0, INT64_MAX}, {1, INT64_MAX}, 0},
        {{2, 0}, {3, 1}, 0},
        {{0, 0}, {-1, 1}, 0},
        {{INT64_MAX, 0}, {INT64_MAX, 0}, 0},
        {{INT64_MIN, 0}, {4, 1}, 0},
        {{0, INT64_MAX - 1}, {1, 1}, 1},
        {{1, INT64_MIN}, {1, INT64_MIN}, 0},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct box box;
        box_make(&box, 2, cases[i].at, cases[i].size);
        cr_expect_eq(box_fits(&box, shape), cases[i].fits, "case %zu", i);
    }
    struct box huge = {.ndim = 3, .size = {INT64_MAX, INT64_MAX, 0}};
    cr_expect_eq(box_count(&huge), 0);
}

Test(box, narrowing_shows_the_part)
{
    static const int64_t shape[] = {3, 4, 2}, at[] = {1, 0, 1}, size[] = {2, 3, 1}, begin[] = {10, 20, 30},
                         part_at[] = {11, 20, 31};
    int numbers[24];
    for (int k = 0; k < 24; k++) numbers[k] = k;
    struct tensor t;
    struct box whole, part;
    tensor_make(&t, numbers, DTYPE_I32, 3, shape);
    box_make(&whole, 3, begin, shape);
    box_make(&part, 3, part_at, size);
    box_narrow(&t, &whole, &part);
    cr_assert_eq(t.count, 6);
    int k = 0, packed[6];
    tensor_pack(packed, &t);
    for (int i = 0; i < size[0]; i++)
        for (int j = 0; j < size[1]; j++) cr_expect_eq(packed[k++], (at[0] + i) * 8 + (at[1] + j) * 2 + at[2]);
}

Test(box, slices_of_copies_share_it_out)
{
    for (int turn = 0; turn < 5000; turn++) {
        int32_t ndim = below(4), copies = 1 + below(7);
        struct box box = random_box(ndim), slice;
        char whole[MOST] = {0}, slices[MOST] = {0};
        elements_of(&box, whole);
        int64_t count = 0;
        for (int32_t copy = 0; copy < copies; copy++) {
            box_slice(&box, copy, copies, &slice);
            count += box_count(&slice);
            if (slice.ndim == ndim) elements_of(&slice, slices);
        }
        cr_assert_eq(count, box_count(&box));
        for (int k = 0; k < MOST; k++) cr_assert_eq(slices[k], whole[k], "%d copies", copies);
    }
}

Test(box, cover_finds_gaps_and_overlaps)
{
    int seen_kind[3] = {0};
    for (int turn = 0; turn < 30000; turn++) {
        int32_t ndim = 1 + below(3);
        int n = 0, goal = 1 + below(6), total = 1;
        static const int64_t shape[] = {SIDE, SIDE, SIDE};
        struct box boxes[8];
        const struct box *list[8];
        box_make(&boxes[n++], ndim, NULL, shape);
        while (n < goal) { /* cut one in two; now and then move a side, or lose one */
            int which = below(n), d = below(ndim);
            struct box *low = &boxes[which], *high = &boxes[n++];
            int64_t at = below((int)low->size[d] + 1);
            *high = *low;
            low->size[d] = at;
            high->at[d] += at;
            high->size[d] -= at;
        }
        if (!below(3)) {
            struct box *box = &boxes[below(n)];
            int d = below(ndim);
            if (box->size[d] && below(2)) {
                box->size[d]--;
            } else if (box->at[d]) {
                box->at[d]--;
                box->size[d]++;
            }
        }
        for (int32_t d = 0; d < ndim; d++) total *= SIDE;
        char seen[MOST] = {0};
        int twice = 0, never = 0;
        for (int i = 0; i < n; i++) {
            list[i] = &boxes[(i * 5 + turn) % n]; /* in no order; all of them where 5 and n have no divisor */
            if (n == 5) list[i] = &boxes[n - 1 - i];
            elements_of(&boxes[i], seen);
        }
        for (int k = 0; k < total; k++) {
            twice += seen[k] > 1;
            never += !seen[k];
        }
        int64_t a = -1, b = -1;
        enum box_cover want = twice ? BOX_OVERLAP : never ? BOX_GAP : BOX_WHOLE;
        enum box_cover got = box_cover(list, n, ndim, shape, &a, &b);
        cr_assert_eq(got, want, "%d boxes, %d dimensions: %d, not %d", n, ndim, (int)got, (int)want);
        struct box common;
        if (got == BOX_OVERLAP) cr_assert(a != b && box_common(list[a], list[b], &common), "the two do overlap");
        seen_kind[got]++;
    }
    cr_expect(seen_kind[0] > 1000 && seen_kind[1] > 1000 && seen_kind[2] > 1000, "%d, %d, %d", seen_kind[0],
              seen_kind[1], seen_kind[2]);
}

Test(box, cover_of_many_slices_is_quick)
{
    enum { N = 200000 };
    struct box *boxes = calloc(N, sizeof *boxes);
    const struct box **list = calloc(N, sizeof *list);
    int64_t shape[] = {N, 3}, a, b;
    for (int i = 0; i < N; i++) {
        boxes[i] = (struct box){.ndim = 2, .at = {N - 1 - i, 0}, .size = {1, 3}};
        list[i] = &boxes[i];
    }
    cr_expect_eq(box_cover(list, N, 2, shape, &a, &b), BOX_WHOLE);
    boxes[5].at[0]--;
    cr_expect_eq(box_cover(list, N, 2, shape, &a, &b), BOX_OVERLAP);
    free(boxes);
    free(list);
}
