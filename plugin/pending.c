/* Weak versions of what plugin/api_checkpoint.c exports, until it is there. Temporary. */
#include "fsdp.h"

#include "base/error.h"

#define WEAK __attribute__((weak))
WEAK fsdp_status fsdp_save_options_init(fsdp_save_options *options, size_t struct_size)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_checkpoint_save(fsdp_group *group, fsdp_state_dict *dict, const char *path, const fsdp_save_options *options, fsdp_save **save)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_save_query(fsdp_save *save, fsdp_save_info *info)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_save_wait(fsdp_save *save, int64_t timeout_ms)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_save_retain(fsdp_save *save)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK void fsdp_save_release(fsdp_save *save)
{
}
WEAK fsdp_status fsdp_checkpoint_open(const char *path, fsdp_checkpoint **checkpoint)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_checkpoint_retain(fsdp_checkpoint *checkpoint)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK void fsdp_checkpoint_release(fsdp_checkpoint *checkpoint)
{
}
WEAK fsdp_status fsdp_checkpoint_query(fsdp_checkpoint *checkpoint, fsdp_checkpoint_info *info)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_checkpoint_entry(fsdp_checkpoint *checkpoint, int64_t index, fsdp_entry *entry)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_checkpoint_find(fsdp_checkpoint *checkpoint, const char *name, int32_t rank, int64_t *index)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_checkpoint_json(fsdp_checkpoint *checkpoint, int64_t index, const char **name, const char **text)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_checkpoint_n_parts(fsdp_checkpoint *checkpoint, int64_t index, int64_t *n)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_checkpoint_part_of(fsdp_checkpoint *checkpoint, int64_t index, int64_t part, fsdp_checkpoint_part *out)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_checkpoint_read(fsdp_checkpoint *checkpoint, int64_t index, const int64_t *offset, const DLTensor *tensor)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_checkpoint_load(fsdp_checkpoint *checkpoint, fsdp_state_dict *into, const fsdp_load_options *options)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
WEAK fsdp_status fsdp_checkpoint_verify(fsdp_checkpoint *checkpoint, fsdp_progress_fn on_progress, void *user)
{
    return err(FSDP_ERR_INTERNAL, "not linked");
}
#include "state/state.h"
fsdp_status state_dict_gather(fsdp_state_dict *dict, fsdp_group *group, const fsdp_state_dict_options *options, fsdp_state_dict **out) { return err(FSDP_ERR_INTERNAL, "not linked"); }
fsdp_status model_state_dict(struct fsdp_model *model, const fsdp_state_dict_options *options, fsdp_state_dict **out){ return err(FSDP_ERR_INTERNAL, "not linked"); }
fsdp_status model_load_state_dict(struct fsdp_model *model, fsdp_state_dict *from, const fsdp_load_options *options){ return err(FSDP_ERR_INTERNAL, "not linked"); }
fsdp_status unit_param_entry(struct fsdp_unit *unit, int32_t index, fsdp_entry *out){ return err(FSDP_ERR_INTERNAL, "not linked"); }
