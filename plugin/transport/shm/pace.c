/* Pace: whether staging is written through the cache or past it.
 *
 * Staging is written by one rank and read by its peers a moment later. Where their processors share a cache, the
 * fastest way is through it. Where they don't, each cached store waits for a line that the peer has read last, and
 * stores past the cache are faster. A virtual machine may be moved from one case to the other while it runs, so it is
 * found out by trying: now and then two large operations in a row do a window of rounds in each way, by this rank's
 * clock, and the faster one is kept for their kind; of the two times for a way the lower counts, since what disturbs
 * only adds. Each rank decides for what it writes; the peers read the same bytes either way.
 */
#include "transport/shm/shm.h"

#define WINDOW 16u    /* rounds in each way */
#define SETTLE 3u     /* of them not timed: chunks of the other way are still under way */
#define TRY_EVERY 12u /* large operations */

void shm_pace_begin(struct pacer *pacer, struct pace *pace, uint32_t rounds, int large)
{
    *pacer = (struct pacer){.pace = pace, .past = large && pace->ns[1] < pace->ns[0]};
    if (!large || rounds < 3 * WINDOW) return;
    uint32_t turn = pace->operations++ % TRY_EVERY;
    pacer->trying = turn < 2 ? (int32_t)turn + 1 : 0;
}

void shm_pace_round(struct pacer *pacer, uint32_t round)
{
    if (!pacer->trying || round > 2 * WINDOW) return;
    struct pace *pace = pacer->pace;
    if (round % WINDOW == SETTLE) pacer->since = os_now_ns();
    if (round % WINDOW != 0) return;
    if (round > 0) {
        int64_t took = os_now_ns() - pacer->since, *ns = &pace->ns[round / WINDOW - 1];
        if (pacer->trying == 1 || took < *ns) *ns = took;
    }
    pacer->past = round == WINDOW || (round > WINDOW && pace->ns[1] < pace->ns[0]);
}
