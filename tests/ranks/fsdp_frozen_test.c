/* Frozen parameters (A05 of the cases): what they cost, which is nothing, and when they may be frozen and thawed.
 *
 * What is counted: gradient memory of the rank, and the bytes that its units gave to reductions. */
#include "unit_host.h"

TestSuite(fsdp_frozen, .timeout = RANKS_SECONDS + 30);

static const struct par lora[] = {{.name = "W", .type = DTYPE_F32, .ndim = 2, .shape = {64, 64}, .frozen = 1},
                                  {.name = "A", .type = DTYPE_F32, .ndim = 2, .shape = {64, 2}},
                                  {.name = "B", .type = DTYPE_F32, .ndim = 2, .shape = {2, 64}, .dim = 1}};
#define LORA_BYTES (2 * 64 * 2 * 4)
#define WHOLE_BYTES (64 * 64 * 4)

/* Gradient memory of this rank, and what its unit has sent since `before`. */
static void expect_cost(fsdp_model *model, const struct kit *kit, const fsdp_unit_info *before, int64_t trainable,
                        int64_t memory, const char *when)
{
    fsdp_unit_info now = kit_query(kit);
    int64_t sent = now.reduced_bytes - before->reduced_bytes + now.replicated_bytes - before->replicated_bytes;
    CHECK(sent == trainable, "%s: %lld bytes of gradients went, not %lld", when, (long long)sent, (long long)trainable);
    CHECK(memory_of(model).gradients == memory, "%s: gradients take %lld bytes, not %lld", when,
          (long long)memory_of(model).gradients, (long long)memory);
}

static void rank_frozen(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    for (int layout = 0; layout <= LAYOUT_NO_SHARD; layout++) {
        fsdp_model *model = layout_model(group, (enum layout)layout, NULL);
        const char *when = layout_names[layout];
        int64_t parts = layout == LAYOUT_NO_SHARD ? 1 : r->size;
        struct kit kit;
        kit_make(model, "lora", lora, 3, 4, NULL, &kit);
        DLManagedTensorVersioned *none = NULL;
        REFUSED(fsdp_unit_param_grad(kit.unit, 0, &none), FSDP_ERR_STATE, "'W' is frozen");
        for (int step = 0; step < 2; step++) {
            fsdp_unit_info before = kit_query(&kit);
            OK(fsdp_model_zero_grad(model));
            kit_step(model, &kit, r->rank, step ? 7 : 6); /* a gradient given for W is not looked at */
            expect_cost(model, &kit, &before, LORA_BYTES, LORA_BYTES / parts, when);
            kit_expect_grads(&kit, r->size, 6, 1, when);
        }
        /* The other way round. A's gradient is given back and reads as zeros. */
        fsdp_unit_info before = kit_query(&kit);
        OK(fsdp_unit_set_frozen(kit.unit, 0, 0));
        OK(fsdp_unit_set_frozen(kit.unit, 1, 1));
        OK(fsdp_unit_set_frozen(kit.unit, 1, 1));
        CHECK(!kit_param(&kit, 0).frozen && kit_param(&kit, 1).frozen, "as told");
        REFUSED(fsdp_unit_param_grad(kit.unit, 1, &none), FSDP_ERR_STATE, "'A' is frozen");
        OK(fsdp_unit_param_grad(kit.unit, 0, &kit.grad[0]));
        double got[4096];
        for (int i = 0; i < 2; i++) {
            get_doubles(&kit.grad[i]->dl_tensor, got);
            for (int64_t k = 0; k < elements(&kit.grad[i]->dl_tensor); k++)
                CHECK(got[k] == 0, "%s: the gradient of '%s' begins at zero, not %g", when, lora[i].name, got[k]);
        }
        kit_step(model, &kit, r->rank, 7);
        expect_cost(model, &kit, &before, WHOLE_BYTES + LORA_BYTES / 2, (WHOLE_BYTES + LORA_BYTES / 2) / parts, when);
        get_doubles(&kit.grad[1]->dl_tensor, got);
        for (int64_t k = 0; k < elements(&kit.grad[1]->dl_tensor); k++) CHECK(got[k] == 0, "none comes while frozen");
        /* B goes on meanwhile: it holds the step before and this one. */
        struct kit only_b = kit;
        only_b.grad[0] = only_b.grad[1] = NULL;
        kit_expect_grads(&only_b, r->size, 6, 2, when);
        /* Thawed, A begins anew. */
        OK(fsdp_model_zero_grad(model));
        OK(fsdp_unit_set_frozen(kit.unit, 1, 0));
        kit_step(model, &kit, r->rank, 7);
        kit_expect_grads(&kit, r->size, 7, 1, when);
        /* All frozen: nothing is sent, nobody is met. */
        for (int i = 0; i < 3; i++) OK(fsdp_unit_set_frozen(kit.unit, i, 1));
        before = kit_query(&kit);
        OK(fsdp_unit_pre_backward(kit.unit));
        uint64_t operations = operations_of(group);
        OK(kit_give(&kit, r->rank, 7, NULL));
        OK(fsdp_model_finish_backward(model));
        CHECK(operations_of(group) == operations, "no operation for frozen parameters");
        expect_cost(model, &kit, &before, 0, 0, when);
        kit_drop(&kit);
        fsdp_model_release(model);
    }
    fsdp_group_release(group);
}

Test(fsdp_frozen, a05_frozen_parameters_cost_no_memory_and_no_traffic_and_toggle)
{
    ranks_run(1, rank_frozen, NULL);
    ranks_run(2, rank_frozen, NULL);
    ranks_run(4, rank_frozen, NULL);
}

static const struct par tied[] = {{.name = "in", .type = DTYPE_F32, .ndim = 2, .shape = {5, 4}},
                                  {.name = "bias", .type = DTYPE_F64, .ndim = 1, .shape = {3}},
                                  {.name = "out", .type = DTYPE_F32, .ndim = 2, .shape = {5, 4}, .tied = 1}};

static void rank_frozen_badly(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = model_make(group, NULL);
    struct kit kit;
    kit_make(model, "lora", lora, 3, 4, NULL, &kit);
    REFUSED(fsdp_unit_set_frozen(kit.unit, 3, 1), FSDP_ERR_INVALID, "index is 3");
    REFUSED(fsdp_unit_set_frozen(kit.unit, -1, 1), FSDP_ERR_INVALID, "index is -1");
    REFUSED(fsdp_unit_set_frozen(kit.unit, 1, 2), FSDP_ERR_INVALID, "frozen is 2");
    OK(fsdp_unit_pre_forward(kit.unit));
    OK(fsdp_unit_post_forward(kit.unit));
    OK(fsdp_unit_pre_backward(kit.unit));
    REFUSED(fsdp_unit_set_frozen(kit.unit, 1, 1), FSDP_ERR_STATE, "'A'");
    OK(fsdp_model_set_gradient_sync(model, 0));
    OK(kit_give(&kit, r->rank, 7, NULL));
    OK(fsdp_model_finish_backward(model));
    REFUSED(fsdp_unit_set_frozen(kit.unit, 0, 0), FSDP_ERR_STATE, "'W'");
    OK(fsdp_model_set_gradient_sync(model, 1));
    kit_step(model, &kit, r->rank, 6);
    kit_expect_grads(&kit, r->size, 6, 2, "refusals changed nothing");
    OK(fsdp_unit_set_frozen(kit.unit, 0, 0));
    OK(fsdp_unit_set_frozen(kit.unit, 0, 1));
    /* Ranks that differ are told at the next reduction, and go on when they agree. A and B are of one size, so that
     * nothing else tells the difference. */
    for (int how = 0; how < 2 && r->size > 1; how++) {
        int index = how && r->rank == 0 ? 1 : 2;
        OK(fsdp_model_zero_grad(model));
        OK(fsdp_unit_set_frozen(kit.unit, index, how || r->rank == 1));
        OK(fsdp_unit_pre_backward(kit.unit));
        REFUSED(kit_give(&kit, r->rank, 6, NULL), FSDP_ERR_MISMATCH, "frozen");
        CHECK(fsdp_model_finish_backward(model) == FSDP_ERR_MISMATCH, "the iteration is lost");
        OK(fsdp_model_zero_grad(model));
        OK(fsdp_unit_set_frozen(kit.unit, index, 0));
        kit_step(model, &kit, r->rank, 6);
        kit_expect_grads(&kit, r->size, 6, 1, "after a difference");
    }
    kit_drop(&kit);
    /* Either entry of a tied parameter freezes it. */
    kit_make(model, "tied", tied, 3, 1, NULL, &kit);
    OK(fsdp_unit_set_frozen(kit.unit, 2, 1));
    CHECK(kit_param(&kit, 0).frozen && kit_param(&kit, 2).frozen && !kit_param(&kit, 1).frozen, "one parameter");
    kit_drop(&kit);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

/* Sums that wait for the replicas are gradients under way, too. */
static void rank_frozen_with_partials(struct rank *r)
{
    fsdp_group *group = group_make(r, 0, 0);
    fsdp_model *model = layout_model(group, LAYOUT_HYBRID, NULL);
    struct kit kit;
    kit_make(model, "lora", lora, 3, 4, NULL, &kit);
    OK(fsdp_model_set_all_reduce(model, 0));
    kit_step(model, &kit, r->rank, 6);
    REFUSED(fsdp_unit_set_frozen(kit.unit, 1, 1), FSDP_ERR_STATE, "'A'");
    OK(fsdp_model_set_all_reduce(model, 1));
    kit_step(model, &kit, r->rank, 6);
    kit_expect_grads(&kit, r->size, 6, 2, "both micro-batches");
    OK(fsdp_unit_set_frozen(kit.unit, 1, 1));
    fsdp_unit_info before = kit_query(&kit);
    kit_step(model, &kit, r->rank, 6);
    fsdp_unit_info after = kit_query(&kit);
    CHECK(after.reduced_bytes - before.reduced_bytes == LORA_BYTES / 2, "B goes over the shard dimension");
    CHECK(after.replicated_bytes - before.replicated_bytes == LORA_BYTES / 2 / kit.size, "and its sums over the other");
    kit_drop(&kit);
    fsdp_model_release(model);
    fsdp_group_release(group);
}

Test(fsdp_frozen, parameters_are_not_frozen_in_the_middle)
{
    ranks_run(4, rank_frozen_with_partials, NULL);
    ranks_run(1, rank_frozen_badly, NULL);
    ranks_run(2, rank_frozen_badly, NULL);
}
