/* Reference counts: one way to share an object.
 *
 * An object embeds `struct ref` first, made with ref_init (count 1). ref_put returns 1 to the caller that dropped the
 * last reference; that caller alone destroys the object. The magic number tells a released or foreign handle from a
 * live one as far as that can be told: release overwrites it before the memory is freed. */
#ifndef FSDP_BASE_REF_H
#define FSDP_BASE_REF_H

#include "base/os.h"

#include <stdatomic.h>
#include <stdint.h>

struct ref {
    uint32_t magic;
    atomic_int count;
    uint32_t process; /* that made it: a forked child has the memory, but not the object */
};

#define REF_STORE 0x53544f52u
#define REF_GROUP 0x47524f55u
#define REF_WORK 0x574f524bu
#define REF_MODEL 0x4d4f4445u
#define REF_UNIT 0x554e4954u
#define REF_SCALER 0x5343414cu
#define REF_MESH 0x4d455348u
#define REF_STATE_DICT 0x44494354u
#define REF_CHECKPOINT 0x43484543u
#define REF_SAVE 0x53415645u

static inline void ref_init(struct ref *ref, uint32_t magic)
{
    ref->magic = magic;
    atomic_init(&ref->count, 1);
    ref->process = os_process();
}

static inline int ref_is(const struct ref *ref, uint32_t magic)
{
    return ref && ref->magic == magic;
}

static inline int ref_forked(const struct ref *ref)
{
    return ref->process != os_process();
}

static inline void ref_get(struct ref *ref)
{
    atomic_fetch_add_explicit(&ref->count, 1, memory_order_relaxed);
}

/* For lists that don't hold their members: a reference unless the last one has gone. */
static inline int ref_try_get(struct ref *ref)
{
    int count = atomic_load_explicit(&ref->count, memory_order_relaxed);
    while (count > 0 && !atomic_compare_exchange_weak_explicit(&ref->count, &count, count + 1, memory_order_acquire,
                                                               memory_order_relaxed)) {
    }
    return count > 0;
}

static inline int ref_put(struct ref *ref)
{
    if (atomic_fetch_sub_explicit(&ref->count, 1, memory_order_acq_rel) != 1) return 0;
    ref->magic = 0;
    return 1;
}

#endif
