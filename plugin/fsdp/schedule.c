/* The hooks, the order in which they come, and prefetch by it. See fsdp.h.
 *
 * An iteration is a sequence of events: the pre_forward and pre_backward calls from one finish_backward to the next. It
 * is written down, and the next iteration is expected to be the same; prefetch unshards the unit of the event to come.
 * Modules that are called twice, several micro-batches and forward run again inside backward are nothing special: they
 * are in the sequence. An iteration that takes another turn is left alone from there on, told of once, and is what the
 * one after it is held against.
 *
 * Forward passes without backward (evaluation) have no end that one could see: when the first unit's forward comes
 * again before any backward, it may be a new pass, or the same module again. So it is written down as both: as a pass
 * that is expected to be like the one before, and as a part of the iteration. An iteration may also repeat the one
 * before several times (micro-batches), or lack passes that came before its last one.
 *
 * All ranks prefetch alike, since all of this follows from the calls.
 */
#include "fsdp/fsdp.h"

#include "base/log.h"
#include "base/mem.h"

#include <stdio.h>
#include <string.h>

/* ---- the order */

static int same(const struct event *a, const struct event *b)
{
    return a->unit == b->unit && a->phase == b->phase;
}

static fsdp_status make_room(struct event **events, int32_t *room, int32_t n)
{
    if (n <= *room) return FSDP_OK;
    int32_t more = *room ? 2 * *room : 64;
    if (more < n) more = n;
    struct event *moved = mem_array((size_t)more, sizeof *moved);
    if (!moved) return mem_none("the order of units", (size_t)more * sizeof *moved);
    if (*room) memcpy(moved, *events, (size_t)*room * sizeof *moved);
    mem_free(*events);
    *events = moved;
    *room = more;
    return FSDP_OK;
}

static int equal(const struct event *a, const struct event *b, int32_t n)
{
    int32_t i = 0;
    while (i < n && same(&a[i], &b[i])) i++;
    return i == n;
}

static int only_forward(const struct schedule *s)
{
    for (int32_t i = 0; i < s->n_now; i++)
        if (s->now[i].phase != FSDP_FORWARD) return 0;
    return 1;
}

/* The first unit has as many backwards as forwards before them: probably no pass was for evaluation. */
static int known_is_balanced(const struct schedule *s)
{
    int32_t forwards = 0, backwards = 0, begun = 0;
    for (int32_t i = 0; i < s->n_known; i++) {
        int backward = s->known[i].phase == FSDP_BACKWARD, first = s->known[i].unit == s->known[0].unit;
        begun |= backward;
        backwards += first && backward;
        forwards += first && !begun;
    }
    return forwards == backwards;
}

/* What the pass was, the next one is expected to be. */
static fsdp_status guess(struct schedule *s)
{
    int32_t n = s->n_now - s->pass;
    TRY(make_room(&s->known, &s->room_known, n));
    memcpy(s->known, s->now + s->pass, (size_t)n * sizeof *s->known);
    s->n_known = n;
    s->known_pass = 0;
    s->learnt = 2;
    return FSDP_OK;
}

/* Of passes that are alike one is kept, and never more than one before that under way: there may be any number. */
static void pass_end(struct schedule *s)
{
    int32_t n = s->n_now - s->pass;
    if (n != s->pass || !equal(s->now, s->now + s->pass, n)) {
        memmove(s->now, s->now + s->pass, (size_t)n * sizeof *s->now);
        s->pass = n;
    }
    s->n_now = s->pass;
}

static int is_next(const struct schedule *s, const struct event *event)
{
    return s->learnt && s->at >= 0 && s->at < s->n_known && same(&s->known[s->at], event);
}

/* The last pass of the iteration before and all after it once more, or without what came before it. */
static int is_shifted(struct schedule *s, const struct event *event)
{
    if (s->learnt != 1 || s->at < 0) return 0;
    int32_t n = s->n_now - s->pass, at = s->known_pass + n;
    if (s->at == s->n_known && event->phase == FSDP_FORWARD && same(&s->known[s->known_pass], event))
        s->at = s->known_pass;
    else if (s->known_pass && at < s->n_known && same(&s->known[at], event) &&
             equal(s->known + s->known_pass, s->now + s->pass, n))
        s->at = at;
    else
        return 0;
    return 1;
}

static const char *name_of(fsdp_model *model, int64_t number, char name[CALL_LABEL])
{
    fsdp_unit *unit = units_find(model, number);
    memcpy(name, unit ? unit->name : "one that has gone", unit ? CALL_LABEL : sizeof "one that has gone");
    unit_release(unit);
    return name;
}

static void left(fsdp_model *model, const fsdp_unit *unit, fsdp_phase phase)
{
    struct schedule *s = &model->schedule;
    int32_t at = s->at;
    s->at = -1;
    if (s->learnt == 2) { /* only a guess */
        s->learnt = 0;
        s->guessed_wrong = 1;
        return;
    }
    if (s->told || model->group->rank != 0 || (s->known_pass && !known_is_balanced(s))) return;
    s->told = 1;
    char name[CALL_LABEL], before[CALL_LABEL + 40];
    static const char *const phases[] = {"forward", "backward"};
    if (at < s->n_known)
        snprintf(before, sizeof before, "had %s of '%s'", phases[s->known[at].phase],
                 name_of(model, s->known[at].unit, name));
    else
        snprintf(before, sizeof before, "was over");
    int fetches = model->forward_prefetch || model->backward_prefetch; /* else it makes no difference */
    LOG(fetches ? FSDP_LOG_WARN : FSDP_LOG_INFO,
        "model '%s': %s of unit '%s' came where the iteration before %s: units are not prefetched until the new order "
        "is "
        "learnt (told once)",
        model->name, phases[phase], unit->name, before);
}

/* What was fetched ahead in a pass that is over was fetched in vain, and its values are that pass's. */
static fsdp_status reshard_ahead(fsdp_model *model)
{
    struct units units;
    TRY(units_hold(model, &units));
    fsdp_status status = FSDP_OK;
    for (int32_t i = 0; i < units.n && status == FSDP_OK; i++)
        if (units.at[i]->ahead) status = unit_reshard(units.at[i], RESHARD_RELEASE);
    units_drop(&units);
    return status;
}

/* A loop of forward passes that never begins with the same unit has no end: it is not followed. */
#define EVENTS_MOST (1 << 16)

static fsdp_status note(fsdp_unit *unit, fsdp_phase phase)
{
    fsdp_model *model = unit->model;
    struct schedule *s = &model->schedule;
    struct event event = {.unit = unit->number, .phase = phase};
    if (s->n_now >= EVENTS_MOST) {
        s->n_now = s->pass = s->learnt = 0;
        s->at = -1;
    }
    int expected = is_next(s, &event);
    if (!expected && phase == FSDP_FORWARD && s->n_now > s->pass && same(&s->now[s->pass], &event) && only_forward(s)) {
        TRY(reshard_ahead(model));
        if (!s->learnt && !s->guessed_wrong && s->n_now - s->pass > 1) TRY(guess(s));
        pass_end(s);
        s->at = 0;
        expected = is_next(s, &event);
    }
    if (!expected) expected = is_shifted(s, &event);
    TRY(make_room(&s->now, &s->room_now, s->n_now + 1));
    s->now[s->n_now++] = event;
    if (expected)
        s->at++;
    else if (s->learnt && s->at >= 0)
        left(model, unit, phase);
    return FSDP_OK;
}

/* The call that was just noted failed, and may be made again. */
static void unnote(struct schedule *s)
{
    s->n_now--;
    if (s->at > 0) s->at--;
}

void schedule_end(fsdp_model *model)
{
    struct schedule *s = &model->schedule;
    if (!s->n_now) return;
    int again = s->learnt == 1 && s->n_now == s->n_known && s->at == s->n_known;
    int32_t pass = s->pass ? s->pass : again ? s->known_pass : 0;
    struct event *now = s->now;
    int32_t room = s->room_now;
    s->now = s->known;
    s->room_now = s->room_known;
    s->known = now;
    s->room_known = room;
    s->n_known = s->n_now;
    s->known_pass = pass;
    s->n_now = s->pass = s->at = 0;
    s->learnt = 1;
}

void schedule_forget(fsdp_model *model)
{
    struct schedule *s = &model->schedule;
    s->n_known = s->n_now = s->pass = s->known_pass = s->at = s->learnt = s->guessed_wrong = 0;
}

void schedule_free(fsdp_model *model)
{
    mem_free(model->schedule.known);
    mem_free(model->schedule.now);
}

/* ---- prefetch */

static int32_t units_in_flight(const fsdp_model *model)
{
    int32_t n = 0;
    for (const struct slot *slot = model->slots; slot; slot = slot->next) n += slot->holder != 0;
    return n;
}

static fsdp_status fetch(fsdp_model *model, int64_t number, int reuse)
{
    fsdp_status status = FSDP_OK;
    fsdp_unit *unit = units_find(model, number);
    if (!unit) return FSDP_OK;
    if (unit->state == FSDP_UNIT_SHARDED && units_in_flight(model) < model->prefetch_limit)
        status = unit_unshard_ahead(unit, reuse);
    unit_release(unit);
    return status;
}

static fsdp_status prefetch(fsdp_unit *unit, fsdp_phase phase, int32_t depth)
{
    fsdp_model *model = unit->model;
    const struct schedule *s = &model->schedule;
    const struct prefetch *list = &unit->prefetch[phase];
    for (int32_t i = 0; i < list->n; i++) TRY(fetch(model, list->units[i], phase == FSDP_BACKWARD));
    if (list->n || !s->learnt || s->at < 0) return FSDP_OK;
    for (int32_t k = s->at; k < s->n_known && depth > 0; k++) {
        if (phase == FSDP_FORWARD && s->known[k].phase != FSDP_FORWARD) break;
        if (phase == FSDP_BACKWARD && same(&s->known[k], &s->known[0])) break; /* the next micro-batch */
        if (s->known[k].unit == unit->number) continue;
        TRY(fetch(model, s->known[k].unit, s->known[k].phase == FSDP_BACKWARD));
        depth--;
    }
    return FSDP_OK;
}

fsdp_status unit_set_prefetch(fsdp_unit *unit, fsdp_phase phase, fsdp_unit *const *units, int32_t n)
{
    CHECK_ARG(phase == FSDP_FORWARD || phase == FSDP_BACKWARD, "phase is %d: FSDP_FORWARD (0) or FSDP_BACKWARD (1)",
              phase);
    for (int32_t i = 0; i < n; i++)
        CHECK_ARG(units[i]->model == unit->model, "units[%d] '%s' is of another model ('%s') than unit '%s' ('%s')", i,
                  units[i]->name, units[i]->model->name, unit->name, unit->model->name);
    int64_t *numbers = n ? mem_array((size_t)n, sizeof *numbers) : NULL;
    if (n && !numbers) return mem_none("a prefetch list", (size_t)n * sizeof *numbers);
    for (int32_t i = 0; i < n; i++) numbers[i] = units[i]->number;
    mem_free(unit->prefetch[phase].units);
    unit->prefetch[phase] = (struct prefetch){.n = n, .units = numbers};
    return FSDP_OK;
}

/* ---- hooks */

/* Make the unit full and begin what comes next. A call that fails can be made again: then it is as if for the first
 * time, so that this rank goes on to prefetch what the others do. */
static fsdp_status enter(fsdp_unit *unit, fsdp_phase phase, int reuse, int32_t depth)
{
    TRY(model_usable(unit->model));
    TRY(note(unit, phase));
    fsdp_status status = unit_unshard(unit, reuse, NULL);
    if (status == FSDP_OK) status = prefetch(unit, phase, depth);
    if (status != FSDP_OK) unnote(&unit->model->schedule);
    return status;
}

fsdp_status unit_pre_forward(fsdp_unit *unit)
{
    return enter(unit, FSDP_FORWARD, unit->in_backward, unit->model->forward_prefetch);
}

fsdp_status unit_post_forward(fsdp_unit *unit)
{
    TRY(model_usable(unit->model));
    if (unit->in_backward || unit->reshard_after_forward == FSDP_RESHARD_NEVER) return FSDP_OK;
    return unit_reshard(unit, RESHARD_AFTER_FORWARD);
}

fsdp_status unit_pre_backward(fsdp_unit *unit)
{
    TRY(enter(unit, FSDP_BACKWARD, 1, unit->model->backward_prefetch == FSDP_BACKWARD_PRE));
    unit->in_backward = 1;
    return FSDP_OK;
}

fsdp_status unit_post_backward(fsdp_unit *unit, const DLTensor *const *grads, int32_t n, fsdp_work **handle)
{
    fsdp_model *model = unit->model;
    TRY(unit_reduce(unit, grads, n, handle));
    unit->in_backward = 0;
    if (!unit->keep_after_backward) TRY(unit_reshard(unit, RESHARD_RELEASE));
    if (model->backward_prefetch != FSDP_BACKWARD_POST || unit->prefetch[FSDP_BACKWARD].n) return FSDP_OK;
    /* The reduction is under way, with the host's gradients: its handle must not be lost because of another unit. What
     * fails here fails again in that unit's pre_backward, and is told there. */
    (void)prefetch(unit, FSDP_BACKWARD, 1);
    return FSDP_OK;
}
