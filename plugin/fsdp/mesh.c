/* Meshes: a group's ranks as a grid of named dimensions, and the sub-groups along each. See fsdp.h.
 *
 * Making one is collective: first the ranks compare what they were given, then the group is split once for each
 * dimension. A mesh is never changed after that, so any thread may ask it. */
#include "fsdp/fsdp.h"

#include "base/mem.h"

#include <stdio.h>
#include <string.h>

int mesh_is(const fsdp_mesh *mesh)
{
    return mesh && ref_is(&mesh->ref, REF_MESH);
}

void mesh_release(fsdp_mesh *mesh)
{
    if (!mesh || !ref_put(&mesh->ref)) return;
    for (int32_t d = 0; d < mesh->ndim; d++) group_release(mesh->groups[d]);
    group_release(mesh->group);
    mem_free(mesh);
}

static fsdp_status check(const fsdp_group *group, int32_t ndim, const int64_t *sizes, const char *const *names)
{
    CHECK_ARG(ndim >= 1 && ndim <= FSDP_MESH_MAX_DIMS, "ndim is %d: a mesh has 1 to %d dimensions", ndim,
              FSDP_MESH_MAX_DIMS);
    int64_t product = 1;
    char text[160] = "";
    for (int32_t d = 0; d < ndim; d++) {
        CHECK_ARG(sizes[d] >= 1, "sizes[%d] is %lld: each dimension has 1 rank or more", d, (long long)sizes[d]);
        CHECK_ARG(names[d] && *names[d] && strlen(names[d]) < sizeof((fsdp_mesh *)NULL)->names[d],
                  "names[%d] is '%.40s': each dimension needs a name of 1 to 31 bytes", d, names[d] ? names[d] : "");
        for (int32_t other = 0; other < d; other++)
            CHECK_ARG(strcmp(names[other], names[d]) != 0, "names[%d] and names[%d] are both '%s'", other, d, names[d]);
        if (__builtin_mul_overflow(product, sizes[d], &product)) product = INT64_MAX;
        size_t used = strlen(text);
        snprintf(text + used, sizeof text - used, "%s%lld", d ? " x " : "", (long long)sizes[d]);
    }
    CHECK_ARG(product <= group->size, "a mesh of %s has %lld places, but group '%s' has only %d ranks", text,
              (long long)product, group->name, group->size);
    CHECK_ARG(product == group->size,
              "a mesh of %s covers ranks 0 to %lld, but group '%s' has %d ranks: it must cover all", text,
              (long long)product - 1, group->name, group->size);
    return FSDP_OK;
}

fsdp_status mesh_split(fsdp_mesh *mesh, uint32_t along, const char *name, fsdp_group **out)
{
    /* Ranks with equal coordinates in the other dimensions have one colour. */
    int64_t color = 0;
    for (int32_t d = 0; d < mesh->ndim; d++)
        if (!(along >> d & 1)) color = color * mesh->sizes[d] + mesh->coordinates[d];
    fsdp_group_options options = mesh->group->options;
    options.name = name;
    options.transport = NULL;
    TRY(group_split(mesh->group, (int32_t)color, mesh->group->rank, &options, out));
    group_adopt(mesh->group, *out);
    return FSDP_OK;
}

static fsdp_status compare(const fsdp_mesh *mesh)
{
    uint64_t hash = hash_bytes(HASH_START, mesh->sizes, sizeof mesh->sizes);
    hash = hash_bytes(hash, mesh->names, sizeof mesh->names);
    return group_exchange(mesh->group, FSDP_OP_CREATE_MESH, hash, NULL, 0, NULL);
}

fsdp_status mesh_create(fsdp_group *group, int32_t ndim, const int64_t *sizes, const char *const *names,
                        fsdp_mesh **out)
{
    TRY(group_usable(group));
    TRY(check(group, ndim, sizes, names));
    fsdp_mesh *mesh = mem_alloc(sizeof *mesh);
    if (!mesh) return mem_none("a mesh", sizeof *mesh);
    ref_init(&mesh->ref, REF_MESH);
    group_retain(group);
    mesh->group = group;
    mesh->ndim = ndim;
    int64_t rest = group->rank;
    for (int32_t d = ndim - 1; d >= 0; d--) {
        mesh->sizes[d] = sizes[d];
        mesh->coordinates[d] = rest % sizes[d];
        rest /= sizes[d];
        memcpy(mesh->names[d], names[d], strlen(names[d]) + 1);
    }
    fsdp_status status = compare(mesh);
    for (int32_t d = 0; d < ndim && status == FSDP_OK; d++) {
        char name[GROUP_NAME];
        if (ndim == 1) {
            group_retain(group);
            mesh->groups[d] = group;
            break;
        }
        snprintf(name, sizeof name, "%.28s/%s", group->name, mesh->names[d]);
        status = mesh_split(mesh, 1u << d, name, &mesh->groups[d]);
    }
    if (status != FSDP_OK) {
        fsdp_error_info failure;
        err_save(&failure);
        mesh_release(mesh);
        return err_restore(&failure);
    }
    *out = mesh;
    return FSDP_OK;
}

void mesh_query(const fsdp_mesh *mesh, fsdp_mesh_info *info)
{
    *info = (fsdp_mesh_info){
        .struct_size = sizeof *info, .ndim = mesh->ndim, .rank = mesh->group->rank, .size = mesh->group->size};
    memcpy(info->sizes, mesh->sizes, sizeof info->sizes);
    memcpy(info->coordinates, mesh->coordinates, sizeof info->coordinates);
    memcpy(info->names, mesh->names, sizeof info->names);
}

int32_t mesh_find(const fsdp_mesh *mesh, const char *name)
{
    char all[FSDP_MESH_MAX_DIMS * 36] = "";
    for (int32_t d = 0; d < mesh->ndim; d++) {
        if (strcmp(mesh->names[d], name) == 0) return d;
        size_t used = strlen(all);
        snprintf(all + used, sizeof all - used, "%s'%s'", d ? ", " : "", mesh->names[d]);
    }
    (void)err(FSDP_ERR_INVALID, "the mesh has no dimension '%.40s': it has %s", name, all);
    return -1;
}

fsdp_status mesh_group(fsdp_mesh *mesh, const char *name, fsdp_group **out)
{
    int32_t d = name ? mesh_find(mesh, name) : 0;
    if (d < 0) return FSDP_ERR_INVALID;
    fsdp_group *group = name ? mesh->groups[d] : mesh->group;
    group_retain(group);
    *out = group;
    return FSDP_OK;
}
