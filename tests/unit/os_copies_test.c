/* Dropping the copied pages of a private view, by each of the ways that finds them: the kernel here knows the
 * best one, so the others are called directly, which takes the source itself. */
#include "base/os.c"

#include <criterion/criterion.h>
#include <stdlib.h>

enum { PAGES = 1500 };

static size_t page, bytes;
static char *shared, *view;

static void setup(void)
{
    int fd = -1;
    void *at = NULL;
    page = os_page_size();
    bytes = PAGES * page;
    cr_assert(os_segment_create("copies", bytes, &fd) == FSDP_OK);
    cr_assert(os_map_shared(fd, 0, bytes, &at) == FSDP_OK);
    shared = at;
    cr_assert(os_map_private(fd, 0, bytes, NULL, &at) == FSDP_OK);
    view = at;
    close(fd);
    memset(shared, 1, bytes);
    os_populate_read(view, bytes);
}

TestSuite(copies, .init = setup, .timeout = 30);

/* Pages of the view that are mapped; those only that are copies. */
static int mapped_pages(int copies)
{
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), n = 0;
    for (size_t i = 0; i < PAGES; i++) {
        uint64_t entry;
        off_t at = (off_t)(((uintptr_t)view / page + i) * sizeof entry);
        cr_assert(pread(fd, &entry, sizeof entry, at) == sizeof entry);
        n += (entry & ENTRY_PRESENT) && !(copies && entry & ENTRY_FILE);
    }
    close(fd);
    return n;
}

static int by_scan(void)
{
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), found = drop_by_scan(fd, view, bytes);
    close(fd);
    return found;
}

static int by_entries(void)
{
    int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC), found = drop_by_entries(fd, view, bytes);
    close(fd);
    return found;
}

static int by_either(void)
{
    os_drop_copies(view, bytes);
    return 1;
}

/* More descriptors than there are: pagemap can't be opened. */
static int by_neither(void)
{
    struct rlimit before, none;
    getrlimit(RLIMIT_NOFILE, &before);
    none = before;
    none.rlim_cur = 0;
    setrlimit(RLIMIT_NOFILE, &none);
    os_drop_copies(view, bytes);
    setrlimit(RLIMIT_NOFILE, &before);
    return 1;
}

static int (*const ways[])(void) = {by_scan, by_entries, by_either, by_neither};

static void edit_and_drop(int (*way)(void), size_t first, size_t step, size_t n)
{
    for (size_t i = 0; i < n; i++) view[(first + i * step) * page + (i * 37) % page] = 2;
    cr_assert(mapped_pages(1) == (int)n);
    cr_assert(memchr(shared, 2, bytes) == NULL, "an edit reached the segment");
    cr_assert(way());
    cr_assert(memcmp(view, shared, bytes) == 0, "an edit is left");
    cr_assert(mapped_pages(1) == 0);
}

Test(copies, are_found_and_dropped_wherever_they_lie)
{
    for (size_t w = 0; w < sizeof ways / sizeof *ways; w++) {
        if (ways[w] == by_scan && !by_scan()) continue; /* an older kernel */
        edit_and_drop(ways[w], 0, 1, 0);
        edit_and_drop(ways[w], 0, 1, 1);
        edit_and_drop(ways[w], PAGES - 1, 1, 1);
        edit_and_drop(ways[w], 511, 1, 2);       /* around a block of entries */
        edit_and_drop(ways[w], 1, 2, PAGES / 2); /* more ranges than one request returns */
        edit_and_drop(ways[w], 0, 1, PAGES);
    }
}

/* What the segment gets afterwards shows through, also on pages that were edited. */
Test(copies, dropped_pages_follow_the_segment)
{
    memset(view, 2, bytes);
    os_drop_copies(view, bytes);
    memset(shared, 3, bytes);
    cr_assert(view[0] == 3 && view[bytes - 1] == 3 && memcmp(view, shared, bytes) == 0);
}

/* Pages that nobody has read are not brought in by looking for copies; those that were read stay mapped. */
Test(copies, other_pages_stay_as_they_are)
{
    view[5 * page] = 2;
    os_drop_copies(view, bytes);
    cr_assert(mapped_pages(0) == PAGES - 1);
    os_discard(view, bytes);
    view[5 * page] = 2;
    os_drop_copies(view, bytes);
    cr_assert(mapped_pages(0) == 0);
}
