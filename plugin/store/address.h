/* Where ranks meet: URLs, and the variables that launchers set. Both are read once, at store_open. */
#ifndef FSDP_STORE_ADDRESS_H
#define FSDP_STORE_ADDRESS_H

#include "store/store_backend.h"

enum store_scheme { STORE_ENV, STORE_TCP, STORE_FILE };

#define STORE_PATH_MAX 4096

struct store_address {
    enum store_scheme scheme;
    struct store_endpoint endpoint; /* STORE_TCP */
    char path[STORE_PATH_MAX];      /* STORE_FILE */
    int32_t rank, world_size;       /* world_size 0: the URL names neither */
};

/* Errors: INVALID. */
fsdp_status store_url_parse(const char *url, struct store_address *out);

enum store_launcher { LAUNCHER_NONE, LAUNCHER_TORCHRUN, LAUNCHER_OPENMPI, LAUNCHER_PMI, LAUNCHER_SLURM };

/* Rank and world size from the first launcher whose variables are set; LAUNCHER_NONE when there is none.
 * Errors: RENDEZVOUS, naming the variable. */
fsdp_status store_env_identity(enum store_launcher *launcher, int32_t *rank, int32_t *world_size);

/* Where a job of several ranks meets. Never gives STORE_ENV. Errors: RENDEZVOUS, naming the variable; INVALID
 * for a malformed FSDP_STORE. */
fsdp_status store_env_address(enum store_launcher launcher, int32_t world_size, struct store_address *out);

int store_env_has_url(void); /* FSDP_STORE is set */

/* A decimal integer and nothing else: 1, or 0. */
int store_parse_int(const char *text, int64_t low, int64_t high, int64_t *out);

#endif
